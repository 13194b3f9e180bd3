"""The stand's workers: the runner in this process, or the real worker process. Both can lose all they know, as at an engine's death."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec
import torch

from ...kernels.cpu import lib
from ..config import Config
from ..plan import StepInput, StepResult
from ..worker import wire
from ..worker.base import WorkerInfo
from ..worker.process import ProcessWorker
from ..worker.runner import ModelRunner
from ..worker.threads import available_cores


class StandWorker(ABC):
    """One call at a time."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process that runs the steps; 0 before the first `begin`."""

    @abstractmethod
    def begin(self, blocks: int, threads: int | None) -> None:
        """A run begins, with an empty K/V cache. threads: None: as many as there are cores."""

    @abstractmethod
    def execute(self, order: StepInput) -> StepResult:
        """Run one step. Raises what a worker raises."""

    @abstractmethod
    def die(self, blocks: int) -> None:
        """Forget every request, what plugins know, and the K/V cache. The model may stay."""

    @abstractmethod
    def restore(self) -> None:
        """The switches are those of the start again, after a run that changed them."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""


class InThread(StandWorker):
    """Runs steps where it is called."""

    def __init__(self, make_runner: Callable[[], ModelRunner]) -> None:
        """Loads the model. Raises what that raises."""
        self._make_runner = make_runner
        self.runner = make_runner()
        self.info = self.runner.load()
        self._names = tuple(sorted(self.runner.plugins.features))

    @property
    def pid(self) -> int:
        return os.getpid()

    def begin(self, blocks: int, threads: int | None) -> None:
        count = threads or available_cores()
        torch.set_num_threads(count)
        if lib.load():
            lib.set_threads(count)
        self.runner.allocate(blocks)

    def execute(self, order: StepInput) -> StepResult:
        return self.runner.run(order)

    def die(self, blocks: int) -> None:
        """Plugins and requests are those of a new runner; model and layout, which no run changes, go over to it."""
        before, self.runner = self.runner, self._make_runner()
        self.runner.plugins.start()
        self.runner._model, self.runner._layout = before._loaded()
        self.runner.media = before.media
        self.runner._load_sides(self.info.model, *before._loaded())
        self.runner._told_attention = self.runner.plugins.attention(self.runner._loaded()[1])
        self.runner.allocate(blocks)

    def restore(self) -> None:
        self.runner.plugins.switch(self._names)

    def close(self) -> None:
        pass  # memory goes with the object


class InProcess(StandWorker):
    """The worker process that serving uses. It is started at the first run; a death makes it load everything again."""

    def __init__(self, config: Config, names: tuple[str, ...]) -> None:
        server = msgspec.structs.replace(config.server, log_level="warning")  # it says at each load what it loads
        self._config, self._names = msgspec.structs.replace(config, server=server), names
        self._loop = asyncio.Runner()
        self._worker: _Reloading | None = None
        self._threads: int | None = None

    @property
    def pid(self) -> int:
        return 0 if self._worker is None else self._worker.pid or 0

    def begin(self, blocks: int, threads: int | None) -> None:
        if self._worker is None or threads != self._threads:
            self._load(threads)
        self._allocate(blocks)

    def execute(self, order: StepInput) -> StepResult:
        assert self._worker is not None
        return self._loop.run(self._worker.execute(order))

    def die(self, blocks: int) -> None:
        self._load(self._threads)
        self._allocate(blocks)

    def restore(self) -> None:
        self._load(self._threads)

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._loop.run(worker.close())
        self._loop.close()

    def _load(self, threads: int | None) -> None:
        model = msgspec.structs.replace(self._config.model, threads=threads)
        config = msgspec.structs.replace(self._config, model=model)
        if self._worker is None:
            self._worker = _Reloading(config, self._names)
            self._loop.run(self._worker.load())
        else:
            self._loop.run(self._worker.reload(config))
        self._threads = threads

    def _allocate(self, blocks: int) -> None:
        assert self._worker is not None
        self._loop.run(self._worker.allocate(blocks))


class _Reloading(ProcessWorker):
    async def reload(self, config: Config) -> WorkerInfo:
        """A new runner in the same process, which saves starting another one: plugins, model and K/V cache are made anew."""
        return (await self._call(wire.Load(wire.VERSION, config, self._features), wire.Loaded)).info
