"""One thread that does blocking work in order, so that an event loop never waits for it."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.0002
"""How often it is looked whether a begun call can end, while another one may come to be begun before."""


class Begun(ABC, Generic[T]):
    """A call's second half. Both methods are called on the lane's thread; `end` once."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `end` would not wait."""

    @abstractmethod
    def end(self) -> T:
        """Wait for the result; raises what the call raises."""


@dataclass(slots=True)
class _Job:
    future: Future[Any]
    work: Callable[[], Any]
    begins: bool
    """`work` gives a Begun."""


class Lane:
    """Runs calls one after the other in a thread of its own. The thread starts with the first call and is a daemon: a call that never
    returns doesn't keep the process alive.

    A call made of two halves lets the next such call begin before it ends: at most one that has begun waits for its end while the next
    begins. Ends keep the order of beginnings, and a call of one piece runs when all before it have ended."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` after all earlier calls; returns or raises what it does. A cancelled caller leaves a started call running.
        RuntimeError after `close`."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The same for whoever waits otherwise, on another thread."""
        return self._put(work, begins=False)

    async def call_in_two(self, begin: Callable[[], Begun[T]]) -> T:
        """As `call`, for work of two halves: what `begin` gives is ended later, on the same thread."""
        return await asyncio.wrap_future(self._put(begin, begins=True))

    def _put(self, work: Callable[[], Any], *, begins: bool) -> Future[Any]:
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._queue.put(_Job(future, work, begins))
        return future

    async def close(self, last: Callable[[], Any] | None = None) -> None:
        """Run `last` after all earlier calls, then end the thread. Safe to call twice; waits only the first time."""
        if self._closed:
            return
        try:
            await self.call(last or (lambda: None))
        finally:
            self._closed = True
            self._queue.put(None)

    # ---- on the thread ----------------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        begun: tuple[Future[Any], Begun[Any]] | None = None
        while True:
            job = self._queue.get() if begun is None else self._next(begun[1])
            if begun is not None and (job is None or not job.begins):
                _finish(begun[0], begun[1].end)
                begun = None
                if job is _NONE_YET:
                    continue
            if job is None:
                return
            if not job.future.set_running_or_notify_cancel():
                continue
            if not job.begins:
                _finish(job.future, job.work)
            else:
                before, begun = begun, _begin(job)
                if before is not None:
                    _finish(before[0], before[1].end)
                del before
            del job  # a waiting thread must not keep the last result alive

    def _next(self, begun: Begun[Any]) -> _Job | None:
        """The next job, or _NONE_YET when what has begun can end before one came."""
        while not begun.ready():
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return _NONE_YET


_NONE_YET = _Job(Future(), lambda: None, begins=False)


def _finish(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _begin(job: _Job) -> tuple[Future[Any], Begun[Any]] | None:
    try:
        return job.future, job.work()
    except BaseException as error:
        job.future.set_exception(error)
        return None
