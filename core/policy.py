"""Who runs next, who gives way, what shares a step: the contract of the "scheduling" slot, and core's default."""

from __future__ import annotations

import enum
import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .plugin import StashKey

if TYPE_CHECKING:
    from .request import Request


class Work(enum.Flag):
    """What a step may run."""

    DECODES = enum.auto()
    """Running requests with one token to run, and drafts behind it."""
    PROMPTS = enum.auto()
    """Running requests with more (known tokens, after a preemption) to run."""
    JOINING = enum.auto()
    """Waiting requests, which thereby join the batch."""
    ALL = DECODES | PROMPTS | JOINING


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
        """Which of the running requests (at least one; oldest admission to the batch first) gives its blocks back when they run out.

        The answer must leave at least one request alone for as long as it runs (the oldest of the most urgent, say), or a full pool
        may go round in circles.
        """

    def displaces(self, waiting: Request, running: Sequence[Request], now: float) -> Request | None:
        """A running request that must make room for `waiting` when the batch or the pool is full. None: waiting waits."""
        return None

    def compose(self, running: Sequence[Request], now: float) -> Sequence[Work]:
        """What the next step may be made of: each entry is tried in turn until something is planned. Once a step, before anything else.

        When nothing is, everything is tried (as with an empty answer, the default): no plan is empty while there is work, but for those
        that only encode pictures or sounds.
        """
        return ()

    def reserve(self, request: Request) -> int:
        """Tokens, prompt and output together, for which a request must find room when it joins, and keeps it while it runs: nobody else
        joins on it. Core adds what its known tokens and the next block need, and cuts what the pool hasn't. 0: no more than that."""
        return 0


ORDER: StashKey[int] = StashKey("order of arrival")
"""A request's place among all that were ever queued: the same for every `OrderedPolicy`, so that swaps keep it."""

_arrivals = itertools.count()


class OrderedPolicy(SchedulingPolicy):
    """A heap by `rank`, lowest first, ties by order of arrival. A rank must never change while its request waits.

    Removal is lazy: the heap drops what is no longer waiting as it surfaces, and is rebuilt when more than half of it is gone.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self._heap: list[tuple[float, int, Request]] = []

    @abstractmethod
    def rank(self, request: Request) -> float: ...

    def add(self, request: Request, *, preempted: bool, now: float) -> None:
        order = request.stash.get(ORDER)
        if order is None:
            order = request.stash[ORDER] = next(_arrivals)
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self.rank(request), order, request))

    def peek(self, now: float) -> Request | None:
        heap, waiting = self._heap, self._waiting
        while heap and heap[0][2].request_id not in waiting:
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def pop(self, request: Request) -> None:
        if not self._heap or self._heap[0][2] is not request:
            raise ValueError(f"{request!r} is not at the head of the queue")
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[2].request_id in self._waiting]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(tuple(self._waiting.values()))


class FcfsPolicy(OrderedPolicy):
    """First come, first served; the newest running request is the victim. Core's default."""

    def rank(self, request: Request) -> float:
        return 0.0

    def victim(self, running: Sequence[Request], now: float) -> Request:
        return max(running, key=lambda request: request.stash.get(ORDER) or 0)
