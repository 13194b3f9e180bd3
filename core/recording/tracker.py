"""What the worker knows of each request, followed from outside: the orders it got and the tokens it gave say all of it.

A recording that begins in the middle of a run, or goes on in another file, begins with this; a replay finds with it which blocks hold K/V.
"""

from __future__ import annotations

import msgspec

from ..plan import StepInput, WorkerRequest


class Copy:
    """The worker's state of one request."""

    __slots__ = ("blocks", "computed", "order", "tokens")

    def __init__(self, order: WorkerRequest) -> None:
        self.order = order
        self.tokens = list(order.tokens)
        self.computed = order.num_computed
        self.blocks = list(order.blocks)

    def as_order(self) -> WorkerRequest:
        return msgspec.structs.replace(
            self.order, tokens=list(self.tokens), num_computed=self.computed, blocks=list(self.blocks)
        )


class WorkerTracker:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[str, Copy] = {}
        self.written: set[int] = set()
        """Blocks that got K/V from steps seen here, or were said to hold some (`open`)."""

    def open(self, request: WorkerRequest) -> None:
        """A request that the worker knows already, its first `num_computed` tokens run."""
        self.requests[request.request_id] = Copy(request)

    def ordered(self, order: StepInput) -> None:
        """Before the step runs."""
        for request_id in order.dropped:
            self.requests.pop(request_id, None)
        for new in order.new:
            self.requests[new.request_id] = Copy(new)
        for request_id, blocks in order.new_blocks.items():
            if request_id in self.requests:
                self.requests[request_id].blocks.extend(blocks)

    def given(self, order: StepInput, sampled: dict[str, list[int]]) -> None:
        """After it ran."""
        size = self.block_size
        for request_id, count in order.num_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            before = request.computed
            request.computed += count
            self.written.update(request.blocks[before // size : -(-request.computed // size)])
            if (new := sampled.get(request_id)) is None:
                continue
            request.tokens.extend(new)
            if request_id in order.drafts:
                request.computed = len(request.tokens) - 1
                del request.blocks[-(-len(request.tokens) // size) :]

    def holds(self, request: WorkerRequest) -> bool:
        """Whether all K/V that the request says it has was written by steps seen here."""
        return self.written.issuperset(request.blocks[: -(-request.num_computed // self.block_size)])

    def open_requests(self) -> list[WorkerRequest]:
        return [request.as_order() for request in self.requests.values()]
