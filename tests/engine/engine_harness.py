"""An EngineCore in this process, with a fake worker, driven over a real socket pair as the front would."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
from engine_fakes import EOS, VOCAB, FakeWorker

from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, SchedulerConfig
from tokenbus.core.engine.loop import EngineCore
from tokenbus.core.errors import from_wire
from tokenbus.core.host import PluginHost, Switches
from tokenbus.core.ipc import open_channel
from tokenbus.core.messages import (
    PROTOCOL_VERSION,
    Add,
    EngineInfo,
    EngineMessage,
    Finish,
    FrontMessage,
    Heartbeat,
    Query,
    Reply,
    SetFeatures,
    Shutdown,
    StepBegins,
    StepOutput,
)
from tokenbus.core.request import AdmittedRequest


def request(request_id: str, prompt: list[int] | None = None, max_tokens: int = 3, **values: Any) -> AdmittedRequest:
    return AdmittedRequest(request_id=request_id, prompt=prompt or [10, 20, 30], max_tokens=max_tokens, **values)


class Harness:
    def __init__(self, core: EngineCore, channel: Any, worker: FakeWorker) -> None:
        self.core = core
        self.channel = channel
        self.worker = worker
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finish] = {}
        self.ends: list[str] = []
        self.outputs: list[StepOutput] = []
        self.others: list[EngineMessage] = []
        self.begun: list[StepBegins] = []
        self._calls = 0

    async def add(self, *requests: AdmittedRequest) -> None:
        await self.channel.send(Add(list(requests)))

    async def arrived(self, messages: int) -> None:
        """Wait until this many messages lie in the engine's mailbox (while a step computes)."""
        while len(self.core._mailbox) < messages:
            await anyio.lowlevel.checkpoint()

    async def receive(self) -> EngineMessage:
        """The next message that is no heartbeat and no StepBegins, noted; so are the latter."""
        while isinstance(message := await self.channel.receive(), Heartbeat | StepBegins):
            if isinstance(message, StepBegins):
                self.begun.append(message)
        if isinstance(message, StepOutput):
            self.outputs.append(message)
            for request_id, tokens in message.tokens.items():
                self.tokens.setdefault(request_id, []).extend(tokens)
            self.finished.update(message.finished)
            self.ends.extend(message.finished)
        else:
            self.others.append(message)
        return message

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert await self.receive() is not None, "the engine has ended"

    async def until_finished(self, *request_ids: str) -> None:
        await self.until(lambda: self.finished.keys() >= set(request_ids))

    async def call(self, make: Callable[[int], FrontMessage]) -> Any:
        """The value of the reply, or the switches it tells; raises its error."""
        self._calls += 1
        await self.channel.send(make(self._calls))
        reply: list[Reply] = []
        while not reply:
            message = await self.receive()
            if isinstance(message, Reply) and message.call_id == self._calls:
                reply.append(message)
        if reply[0].error is not None:
            raise from_wire(reply[0].error)
        return reply[0].value if reply[0].switches is None else reply[0].switches

    async def query(self, what: str, **args: Any) -> Any:
        return await self.call(lambda call_id: Query(call_id, what, args))

    async def switch(self, **changes: bool) -> frozenset[str]:
        return (await self.call(lambda call_id: SetFeatures(call_id, changes))).on


@asynccontextmanager
async def engine(
    *plugins: type,
    worker: Any = None,
    on: tuple[str, ...] = (),
    num_blocks: int = 64,
    block_size: int = 4,
    scheduler: SchedulerConfig | None = None,
    shutdown: bool = True,
    expect: type[Exception] | None = None,
    ahead: bool = False,
    served: tuple[Config, EngineInfo, PluginHost] | None = None,
) -> AsyncIterator[Harness]:
    """On the way out: Shutdown, and the engine must have ended by itself; with `expect` it must have raised that instead.

    served: what a real `worker` runs, which is loaded and has its cache."""
    config = Config(scheduler=scheduler or SchedulerConfig())
    host = PluginHost("engine")
    for plugin in plugins:
        host.add(plugin)
    worker = worker or FakeWorker()
    ours, theirs = socket.socketpair()
    channel, engine_channel = await open_channel(ours, EngineMessage), await open_channel(theirs, FrontMessage)
    info = EngineInfo(
        version=PROTOCOL_VERSION, model="fake", architecture="Fake", dtype="float32", vocab_size=VOCAB,
        max_model_len=num_blocks * block_size, block_size=block_size, num_blocks=num_blocks, weights_bytes=0,
        kv_bytes_per_token=1, eos_token_ids=(EOS,), lossless=True, ahead=ahead,
    )  # fmt: skip
    if served is not None:
        config, info, host = served
    outcome: list[Any] = []

    async def run(core: EngineCore) -> None:
        try:
            outcome.append(await core.run())
        except Exception as error:
            outcome.append(error)

    try:
        core = EngineCore(
            config=config,
            info=info,
            host=host,
            switches=Switches(frozenset(on)),
            worker=worker,
            channel=engine_channel,
            bus=Bus(),
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, core)
            harness = Harness(core, channel, worker)
            yield harness
            if expect is None and shutdown:
                await channel.send(Shutdown())
    finally:
        channel.abort()
        engine_channel.abort()
        await anyio.lowlevel.checkpoint()
    if expect is not None:
        assert isinstance(outcome[0], expect), outcome
    elif shutdown:
        assert outcome == [True]
        assert worker.closed
