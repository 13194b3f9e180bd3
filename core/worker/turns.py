"""One step after the other, on the thread that runs the model: what thread worker and worker process have in common.

Orders queue up in front of this (StepInput.ahead): a step that counts on one that has failed runs nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from ..plan import StepInput, StepResult
    from .runner import ModelRunner


class Turns:
    """The steps of one runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._failed = False
        """The last step failed as a whole."""
        self._ended: float | None = None
        """When the last step ended."""

    def run(self, order: StepInput) -> StepResult:
        """The runner's result, with `phases["idle"]`: seconds since the last step ended. Raises what `ModelRunner.run` raises."""
        void = order.ahead and self._failed
        if void:
            order = msgspec.structs.replace(order, num_tokens={}, drafts={})
        idle = 0.0 if self._ended is None else time.perf_counter() - self._ended
        self._failed = True
        try:
            result = self.runner.run(order)
        finally:
            self._ended = time.perf_counter()
        self._failed = False
        result.void = void
        result.phases["idle"] = idle
        return result
