"""The steps that the worker has: one computes, and where steps are planned ahead, another one waits behind it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import NamedTuple

from ..errors import PluginError, TokenbusError, WorkerError
from ..plan import StepInput, StepPlan, StepResult
from ..worker.base import Worker


class Sent(NamedTuple):
    plan: StepPlan
    order: StepInput
    result: asyncio.Task[StepResult]
    at: float
    """time.monotonic() seconds."""


class InFlight:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._steps: deque[Sent] = deque()
        self._landed = 0.0
        """When the last result was there."""
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._steps)

    def request_ids(self) -> AbstractSet[str]:
        """That the steps are about."""
        return set().union(*(step.plan.concerns for step in self._steps))

    def send(self, plan: StepPlan, order: StepInput) -> None:
        """Hand the worker a step; it has it once the event loop has run."""
        result = asyncio.ensure_future(self._worker.execute(order))
        self._steps.append(Sent(plan, order, result, time.monotonic()))
        self._last_id = self._steps[0].plan.step_id

    async def land(self) -> tuple[Sent, StepResult | TokenbusError, float]:
        """Wait for the oldest step: what it gave, or why it failed as a whole, and the seconds it took (StepReport.duration). Raises what
        the engine does not survive: EngineDiedError, and anything that isn't from our tree."""
        step = self._steps[0]
        try:
            outcome = await step.result
        except (WorkerError, PluginError) as error:
            outcome = error
        began, self._landed = max(step.at, self._landed), time.monotonic()
        self._steps.popleft()
        if self._steps:
            self._last_id = self._steps[0].plan.step_id
        return step, outcome, self._landed - began

    def pulse(self) -> tuple[int, float]:
        """(the step that computes, or the last one that did; for how many seconds it has, 0 when none does)."""
        if not self._steps:
            return self._last_id, 0.0
        return self._last_id, time.monotonic() - max(self._steps[0].at, self._landed)

    async def abandon(self) -> None:
        """The engine ends in the middle: nobody wants these results."""
        for step in self._steps:
            step.result.cancel()
        for step in self._steps:
            with suppress(asyncio.CancelledError, Exception):
                await step.result
        self._steps.clear()
