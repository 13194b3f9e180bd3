"""Compiling beforehand: several processes run small calls once each, and Triton's cache on disk then has their machine code.

A kernel takes seconds to compile on one core, a part that measures needs dozens, and a card waits meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from typing import Any

from .record import Record

MOST = 12
"""Processes; each has a context on the device, of some hundred MB."""
SHARE = 0.5
"""Of a part's time, for compiling."""


def compile_beforehand(record: Record, call: Callable[[Any], object], items: Sequence[Any]) -> None:
    """call(item) for each item, in other processes, so both must be picklable. What fails there is noted, and fails again, aloud, where it
    is measured; what takes too long is left to be compiled then."""
    began, until = time.monotonic(), record.left * SHARE
    processes = max(1, min(MOST, len(items), (os.cpu_count() or 2) - 2))
    context = multiprocessing.get_context("spawn")  # a forked process can't use the device
    pool = ProcessPoolExecutor(processes, mp_context=context)
    jobs = {pool.submit(call, item): item for item in items}
    done, _ = wait(jobs, timeout=until)
    workers = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for worker in workers:  # idle, or in a compilation that would disturb what is timed
        worker.terminate()
    for worker in workers:
        worker.join()
    failed = [f"{jobs[job]}: {job.exception()}"[:300] for job in done if job.exception() is not None]
    for text in failed:
        record.note(f"could not be compiled beforehand: {text}")
    took = time.monotonic() - began
    print(f"compiled beforehand: {len(done) - len(failed)} of {len(items)}, in {took:.0f} s", flush=True)
