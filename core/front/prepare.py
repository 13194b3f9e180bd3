"""Where `prepare_fields` runs: pool threads, few, with a bounded queue before them, each request at most until its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ..errors import DeadlineError, OverloadedError

if TYPE_CHECKING:
    from .admission import Admission

THREADS = 4
"""Requests prepared at the same time. They mostly wait for a process that works for them."""


class PreparePool:
    def __init__(self, max_waiting: Callable[[], int]) -> None:
        """max_waiting: how many requests may wait for a thread now."""
        self._max_waiting = max_waiting
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, prepare: Callable[[Admission], Admission], admission: Admission) -> Admission:
        """`prepare(admission)` on a thread. A thread that has begun is waited for, also when the client is gone: so there are never more.

        Raises what it raises; OverloadedError when too many wait already, DeadlineError when its turn does not come in time.
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(THREADS)
        if self._limiter.statistics().tasks_waiting >= self._max_waiting():
            raise OverloadedError("the queue is full: too many requests wait to be prepared", retry_after=1.0)
        deadline = admission.requests[0].deadline
        seconds = float("inf") if deadline is None else max(0.0, deadline - time.time())
        with anyio.move_on_after(seconds):
            return await anyio.to_thread.run_sync(prepare, admission, limiter=self._limiter)
        raise DeadlineError("the request's time was over before plugins had prepared it")
