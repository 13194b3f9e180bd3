"""Steps that were launched and not collected: what becomes of them when their sampled ids are known."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..plan import StepResult
from .sampling import accepted

if TYPE_CHECKING:
    from .device_steps import Drawn, Later
    from .requests import Requests


@dataclass(slots=True, eq=False)
class Pending:
    """A launched step."""

    result: StepResult
    later: Later | None = None
    """Tokens that are still on their way; None: the result is complete."""

    def done(self) -> bool:
        """Whether the result can be had without waiting."""
        return self.later is None or self.later.done()


class InFlight:
    """In the order of launch, which is the order in which tokens become known."""

    def __init__(self, book: Requests, block_size: int) -> None:
        self._book = book
        self._block_size = block_size
        self._steps: deque[Pending] = deque()

    def add(self, pending: Pending, later: Later | None) -> None:
        pending.later = later
        if later is not None:
            self._steps.append(pending)

    def settle(self, last: Pending | None = None) -> None:
        """Wait for all steps up to `last` (None: all), and write their tokens into requests and results."""
        while self._steps and (last is None or last.later is not None):
            self._take(self._steps.popleft())

    def _take(self, pending: Pending) -> None:
        later, result, pending.later = pending.later, pending.result, None
        assert later is not None
        for drawn in later.wait():
            request_id = drawn.request.request_id
            present = self._book.known.get(request_id) is drawn.request
            if present and request_id in self._book.failed:  # in the step before, when this one was launched already
                result.errors[request_id] = self._book.failed[request_id]
            elif drawn.error is None:
                result.sampled[request_id] = self._write(drawn)
            elif present:
                self._book.fail(request_id, drawn.error, result)
            else:
                result.errors[request_id] = drawn.error.to_wire()

    def _write(self, drawn: Drawn) -> list[int]:
        """The request's new tokens, which are written where they belong; with drafts those up to the first that was wrong."""
        request, place = drawn.request, drawn.place
        if not drawn.drafts:
            request.tokens[place] = drawn.tokens[0]
            return drawn.tokens
        new = accepted(request.tokens[place : place + len(drawn.tokens) - 1], drawn.tokens)
        request.tokens[place:] = new
        request.computed = len(request.tokens) - 1
        del request.blocks[-(-len(request.tokens) // self._block_size) :]
        return new
