"""The worker process of tests: the real main with the fake model."""

from __future__ import annotations

from worker_fakes import make_runner

from tokenbus.core.worker.process_main import main

main(make_runner)
