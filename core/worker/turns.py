"""One step after the other, on the thread that runs the model: what thread worker and worker process have in common.

Orders queue up in front of this (StepInput.ahead): a step that counts on one that has failed runs nothing. On a device a step is begun
while the one before has not ended.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ..errors import EngineDiedError, TokenbusError
from ..plan import StepResult
from .lane import Begun

if TYPE_CHECKING:
    from ..plan import StepInput
    from .pending import Pending
    from .runner import ModelRunner


class Turns:
    """The steps of one runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._failed = False
        """The last step failed as a whole."""
        self._ended: float | None = None
        """When the last step ended."""
        self._open = 0
        """Steps that have begun and not ended."""

    def run(self, order: StepInput) -> StepResult:
        """The runner's result, with `phases["idle"]`: seconds since the last step ended. Raises what `ModelRunner.run` raises."""
        order, void, idle = self._next(order)
        try:
            result = self.runner.run(order)
        finally:
            self._ended = time.perf_counter()
        self._failed = False
        return _told(result, void, idle)

    def begin(self, order: StepInput) -> Turn:
        """The same in two halves. Raises what `ModelRunner.launch` raises."""
        order, void, idle = self._next(order)
        try:
            pending = self.runner.launch(order)
        except BaseException:
            self._ended = time.perf_counter()
            raise
        self._failed = False
        self._open += 1
        return Turn(self, pending, void, idle)

    def end(self, pending: Pending) -> StepResult:
        """Wait for the oldest step that has begun. EngineDiedError when it failed and the device has been given one that counts on it."""
        try:
            return self.runner.collect(pending)
        except TokenbusError as error:
            if self._open > 1:
                raise EngineDiedError(f"{error.message}; the step behind it had begun") from error
            self._failed = True
            raise
        finally:
            self._open -= 1
            self._ended = time.perf_counter()

    def _next(self, order: StepInput) -> tuple[StepInput, bool, float]:
        """What of the order is run, whether that is nothing, and for how long nobody ran anything. Counts as failed until it is known."""
        void = order.ahead and self._failed
        if void:
            order = msgspec.structs.replace(order, num_tokens={}, drafts={}, encode=None)
        idle = 0.0 if self._ended is None or self._open else time.perf_counter() - self._ended
        self._failed = True
        return order, void, idle


class Turn(Begun[StepResult]):
    """A step that was given to the device."""

    def __init__(self, turns: Turns, pending: Pending, void: bool, idle: float) -> None:
        self._turns = turns
        self._pending = pending
        self._void = void
        self._idle = idle

    def ready(self) -> bool:
        return self._pending.done()

    def end(self) -> StepResult:
        return _told(self._turns.end(self._pending), self._void, self._idle)


def _told(result: StepResult, void: bool, idle: float) -> StepResult:
    result.void = void
    result.phases["idle"] = idle
    return result
