"""One thread that does blocking work in order, so that an event loop never waits for it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """Runs calls one after the other in a thread of its own. The thread starts with the first call and is a daemon: a call that never
    returns doesn't keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def call(self, work: Callable[[], T]) -> T:
        """Run `work` after all earlier calls; returns or raises what it does. A cancelled caller leaves a started call running.
        RuntimeError after `close`."""
        return await asyncio.wrap_future(self.submit(work))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """The same for whoever waits otherwise, on another thread."""
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._queue.put((future, work))
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

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work  # a waiting thread must not keep the last result alive
