"""Typed publish/subscribe inside one process. Hooks decide; the bus only tells.

`publish` never waits and never raises because of a subscriber: a bounded queue that is full drops the event and counts it.
Who must lose nothing listens and says how far behind it is (`backlog`): the engine then takes in no new requests until it has caught up.
Everything runs on one event loop; nothing here is thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import structlog

log = structlog.get_logger(__name__)


class Subscription:
    """An async iterator over events; `dropped` counts what its bounded queue had no room for."""

    def __init__(self, bus: Bus, types: tuple[type, ...], maxsize: int) -> None:
        self._bus = bus
        self.types = types
        self.maxsize = maxsize
        self.dropped = 0
        self._queue: deque[Any] = deque()
        self._wake = anyio.Event()
        self._closed = False

    def offer(self, event: Any) -> None:
        if len(self._queue) >= self.maxsize:
            self.dropped += 1
            return
        self._queue.append(event)
        self._wake.set()

    def close(self) -> None:
        """Stop receiving. What is queued is still delivered, then the iteration ends."""
        self._bus.unsubscribe(self)
        self._closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while True:
            while self._queue:
                yield self._queue.popleft()
            if self._closed:
                return
            self._wake = anyio.Event()
            await self._wake.wait()


class Listener:
    """A plain function called at once, on the loop, for each event; see `Bus.listen`."""

    def __init__(
        self, bus: Bus, types: tuple[type, ...], call: Callable[[Any], None], backlog: Callable[[], float] | None
    ) -> None:
        self._bus = bus
        self.types = types
        self.call = call
        self.backlog = backlog
        self.failures = 0
        self.closed = False

    def offer(self, event: Any) -> None:
        try:
            self.call(event)
        except Exception:
            self.failures += 1
            log.exception("bus_listener_failed", listener=repr(self.call), kind=type(event).__name__)

    def close(self) -> None:
        self.closed = True
        self._bus.unsubscribe(self)


class Bus:
    """Delivers each event to all whose types match exactly (no subclassing), in order of subscription."""

    def __init__(self) -> None:
        self._by_type: dict[type, list[Subscription | Listener]] = {}
        self._lossless: list[Listener] = []

    def subscribe(self, *types: type, maxsize: int = 1024) -> Subscription:
        """Receive events through a bounded queue, as an async iterator."""
        subscription = Subscription(self, types, maxsize)
        self._register(subscription)
        return subscription

    def listen(self, call: Callable[[Any], None], *types: type, backlog: Callable[[], float] | None = None) -> Listener:
        """Have `call(event)` run inside `publish`: for work of microseconds, such as counting. Errors are logged and counted.

        backlog: for a listener that must lose nothing and works events off elsewhere, a thread, say: how full its own queue is, from 0
        (all is done) to 1 (no new work, please). Asked between steps, and after `close` until it is 0. Must be quick and not raise."""
        listener = Listener(self, types, call, backlog)
        self._register(listener)
        if backlog is not None:
            self._lossless.append(listener)
        return listener

    @property
    def backlog(self) -> float:
        """The largest `backlog` of the listeners that have one; 0 when there are none. One that is closed and done is forgotten."""
        if not self._lossless:
            return 0.0
        found = [(one.backlog() if one.backlog is not None else 0.0, one) for one in self._lossless]
        self._lossless = [one for behind, one in found if behind > 0 or not one.closed]
        return max(behind for behind, _ in found)

    def _register(self, receiver: Subscription | Listener) -> None:
        for kind in receiver.types:
            self._by_type.setdefault(kind, []).append(receiver)

    def unsubscribe(self, receiver: Subscription | Listener) -> None:
        """Idempotent."""
        for kind in receiver.types:
            if receiver in self._by_type.get(kind, ()):
                self._by_type[kind].remove(receiver)

    def wants(self, kind: type) -> bool:
        """Whether anybody listens: an event that is costly to build may be left out."""
        return bool(self._by_type.get(kind))

    def publish(self, event: Any) -> None:
        for receiver in tuple(self._by_type.get(type(event), ())):
            receiver.offer(event)
