"""Who runs next, who gives way: the contract of the "scheduling" slot, and core's default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .request import Request


class SchedulingPolicy(ABC):
    """Owns the queue of waiting requests (new and preempted ones) and picks victims. Times are `time.time()` seconds.

    All methods are quick and called from the engine's loop only. The scheduler guarantees that a request is in the queue at most once
    and that every request it adds is popped or removed exactly once.
    """

    @abstractmethod
    def add(self, request: Request, *, preempted: bool, now: float) -> None:
        """Queue a request; a preempted one has waited before and goes back to its old place, not to the end."""

    @abstractmethod
    def peek(self, now: float) -> Request | None:
        """The request that must be tried next; None when nobody waits. Does not change the queue."""

    @abstractmethod
    def pop(self, request: Request) -> None:
        """Take out the request that `peek` just gave."""

    @abstractmethod
    def remove(self, request: Request) -> None:
        """Take out any waiting request (cancelled, timed out). O(log n) or better amortised."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """All waiting requests, in no promised order (used when policies are swapped, and by integrity checks)."""

    @abstractmethod
    def victim(self, running: Sequence[Request], now: float) -> Request:
        """Which of the running requests (at least one; oldest admission to the batch first) gives its blocks back when they run out."""

    def displaces(self, waiting: Request, running: Sequence[Request], now: float) -> Request | None:
        """A running request that must make room for `waiting` when the batch or the pool is full. None: waiting waits."""
        return None


class FcfsPolicy(SchedulingPolicy):
    """First come, first served; the newest running request is the victim. Core's default."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def add(self, request: Request, *, preempted: bool, now: float) -> None:
        if not preempted:
            self._queue.append(request)
            return
        # a preempted request came before everybody who was never started; among the preempted, arrival decides
        index = 0
        for other in self._queue:
            if other.preemptions == 0 or other.arrival > request.arrival:
                break
            index += 1
        self._queue.insert(index, request)

    def peek(self, now: float) -> Request | None:
        return self._queue[0] if self._queue else None

    def pop(self, request: Request) -> None:
        assert self._queue[0] is request
        self._queue.popleft()

    def remove(self, request: Request) -> None:
        self._queue.remove(request)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def victim(self, running: Sequence[Request], now: float) -> Request:
        return running[-1]
