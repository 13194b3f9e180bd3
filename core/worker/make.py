"""Which worker a configuration asks for. Imports no torch: that is for `Worker.load`."""

from __future__ import annotations

from ..config import Config
from .base import Worker


def make_worker(config: Config, features: tuple[str, ...]) -> Worker:
    """A worker that is not loaded yet. features: names of the plugins that are on at start."""
    if config.model.worker == "process":
        from .process import ProcessWorker

        return ProcessWorker(config, features)
    from .thread import ThreadWorker

    return ThreadWorker(config, features)
