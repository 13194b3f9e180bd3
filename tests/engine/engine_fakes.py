"""A worker without a model: the next token is the last one plus one. What a prompt begins with can make it misbehave."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread
import msgspec

from tokenbus.core.config import Config
from tokenbus.core.errors import EngineDiedError, ModelError, WorkerError
from tokenbus.core.plan import StepInput, StepResult
from tokenbus.core.worker.base import Worker, WorkerInfo

VOCAB = 1000
EOS = 0

HANG, BLOCK_LOOP, CRASH, FAIL_STEP, BREAK, WORKER_DIES = 901, 902, 903, 904, 905, 906
"""First prompt tokens: never finish the step; block the engine's event loop; end the process; raise WorkerError; raise something
unexpected; raise EngineDiedError."""


def following(prompt: list[int], count: int) -> list[int]:
    """What the fake model answers."""
    return [(prompt[-1] + 1 + i) % 900 for i in range(count)]


class FakeWorker(Worker):
    def __init__(
        self,
        *,
        before: Callable[[StepInput], Awaitable[None]] | None = None,
        step_seconds: float = 0.0,
        load_error: Exception | None = None,
        encodes: bool = False,
    ) -> None:
        self.encodes = encodes
        self.before = before
        self.step_seconds = step_seconds
        self.load_error = load_error
        self.orders: list[StepInput] = []
        self.closed = False
        self.ran: list[StepInput] = []
        """Orders that were begun."""
        self._turn = asyncio.Lock()
        self._failed = False
        self._tokens: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}

    async def load(self) -> WorkerInfo:
        if self.load_error is not None:
            raise self.load_error
        return WorkerInfo(
            model="fake",
            architecture="Fake",
            dtype="float32",
            vocab_size=VOCAB,
            max_model_len=1_000_000,
            eos_token_ids=(EOS,),
            weights_bytes=1000,
            kv_bytes_per_token=16,
            free_bytes=2**30,
            lossless=True,
            phases={"weights": 0.5},
            encodes_in_pieces=self.encodes,
        )

    async def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    async def execute(self, order: StepInput) -> StepResult:
        self.orders.append(order)
        async with self._turn:
            self.ran.append(order)
            void, self._failed = self._failed and order.ahead, True
            if void:
                order = msgspec.structs.replace(order, num_tokens={}, drafts={})
            result = await self._take_turn(order)
            result.void, self._failed = void, False
            return result

    async def _take_turn(self, order: StepInput) -> StepResult:
        if self.before is not None:
            await self.before(order)
        if order.encode is not None and order.encode.digest == "deadly":
            os._exit(3)
        for new in order.new if order.num_tokens else ():
            await self._misbehave(new.tokens[0])
        if self.step_seconds:
            await anyio.sleep(self.step_seconds)
        return self._run(order)

    async def _misbehave(self, token: int) -> None:
        match token:
            case 901:
                await anyio.to_thread.run_sync(time.sleep, 600, abandon_on_cancel=True)
            case 902:
                time.sleep(600)  # noqa: ASYNC251 - that is the point
            case 903:
                os._exit(3)
            case 904:
                raise WorkerError("the fake step failed")
            case 905:
                raise RuntimeError("a bug")
            case 906:
                raise EngineDiedError("the worker process 1 ended with signal 9")

    def _run(self, order: StepInput) -> StepResult:
        for request_id in order.dropped:
            self._tokens.pop(request_id, None)
        for new in order.new:
            self._tokens[new.request_id] = list(new.tokens)
            self._computed[new.request_id] = new.num_computed
        sampled = {}
        for request_id, count in order.num_tokens.items():
            tokens = self._tokens[request_id]
            self._computed[request_id] += count
            if self._computed[request_id] == len(tokens):
                tokens.append((tokens[-1] + 1) % 900)
                sampled[request_id] = [tokens[-1]]
        return StepResult(step_id=order.step_id, sampled=sampled, encoded=[] if order.encode is None else [order.encode.digest])

    async def close(self) -> None:
        self.closed = True


def make_fake(config: Config, features: tuple[str, ...]) -> Worker:
    """A worker for an engine process, as `model.model` says. "fake" and "encodes" (in pieces): 1 ms a step, "slow": 20 ms, "zero": none;
    the others can't start."""
    match config.model.model:
        case "wrong":
            return FakeWorker(load_error=ModelError("this model can't be run: it is a fake"))
        case "crash":
            os._exit(9)
        case "bug":
            return FakeWorker(load_error=ZeroDivisionError("at load"))
        case "stuck":
            return StuckWorker()
        case "zero":
            return FakeWorker()
        case "encodes":
            return FakeWorker(encodes=True, step_seconds=0.001)
        case "slow":
            return FakeWorker(step_seconds=0.02)
    return FakeWorker(step_seconds=0.001)


class StuckWorker(FakeWorker):
    async def load(self) -> WorkerInfo:
        await anyio.sleep(600)
        raise AssertionError


if __name__ == "__main__":
    from tokenbus.core.engine.main import main

    main(make_fake)
