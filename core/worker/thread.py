"""A worker in a thread of the engine process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import WorkerError
from ..plan import StepInput, StepResult
from .base import Worker, WorkerInfo
from .lane import Lane
from .turns import Turns

if TYPE_CHECKING:
    from .runner import ModelRunner

RunnerFactory = Callable[[Config, tuple[str, ...]], "ModelRunner"]


def make_runner(config: Config, features: tuple[str, ...], clock: Callable[[], float] = time.thread_time) -> ModelRunner:
    """A runner with plugin instances of its own. Imports torch: call it on the thread that will run it."""
    from ..host import make_host
    from .threads import calm_openmp

    calm_openmp()
    from .runner import ModelRunner

    return ModelRunner(config, features, make_host("worker", config), clock=clock)


class ThreadWorker(Worker):
    def __init__(self, config: Config, features: tuple[str, ...], factory: RunnerFactory = make_runner) -> None:
        self._config = config
        self._features = features
        self._factory = factory
        self._lane = Lane("tokenbus-worker")
        self._turns: Turns | None = None

    async def load(self) -> WorkerInfo:
        return await self._lane.call(self._load)

    def _load(self) -> WorkerInfo:
        runner = self._factory(self._config, self._features)
        self._turns = Turns(runner)
        return runner.load()

    async def allocate(self, num_blocks: int) -> None:
        runner = self._loaded().runner
        await self._lane.call(lambda: runner.allocate(num_blocks))

    async def execute(self, order: StepInput) -> StepResult:
        turns = self._loaded()
        if turns.runner.ahead:
            return await self._lane.call_in_two(lambda: turns.begin(order))
        return await self._lane.call(lambda: turns.run(order))

    async def close(self) -> None:
        await self._lane.close(self._free)

    def _free(self) -> None:
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.runner.close()

    def _loaded(self) -> Turns:
        if self._turns is None:
            raise WorkerError("the worker is not loaded, or closed")
        return self._turns
