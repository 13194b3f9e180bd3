"""Where `prepare_fields` and `prepare_media` run: pool threads, few, with a bounded queue before them, each request at most until its
deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from ..errors import DeadlineError, OverloadedError

T = TypeVar("T")

THREADS = 4
"""Requests prepared at the same time. They mostly wait for a process that works for them."""


class PreparePool:
    def __init__(self, max_waiting: Callable[[], int], *, threads: int = THREADS) -> None:
        """max_waiting: how many requests may wait for a thread now."""
        self._max_waiting = max_waiting
        self._threads = threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, prepare: Callable[[], T], seconds: float) -> T:
        """`prepare()` on a thread, if there is one within so many seconds. A thread that has begun is waited for, also when the client is
        gone: so there are never more.

        Raises what it raises; OverloadedError when too many wait already, DeadlineError when its turn does not come in time.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._threads)
        if self._limiter.statistics().tasks_waiting >= self._max_waiting():
            raise OverloadedError("the queue is full: too many requests wait to be prepared", retry_after=1.0)
        with anyio.move_on_after(max(0.0, seconds)):
            return await anyio.to_thread.run_sync(prepare, limiter=self._limiter)
        raise DeadlineError("the request's time was over before plugins had prepared it")
