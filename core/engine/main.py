"""The engine process: `python -m tokenbus.core.engine.main --fd N`, started by the front's supervisor and driven over that socket.

    Hello ─> plugins ─> weights ─> KV pool ─> Ready ─> EngineCore.run         Heartbeat about every second, from the beginning

SIGINT and SIGTERM are ignored: the front decides when the engine ends. So is SIGTTOU: the engine is in the front's session, not in the
terminal's foreground, and logs all the same. When the front is gone the engine ends within 5 s (watchdog.py).
A start that fails is told in a Failed message; exit status 0 after Shutdown, else not 0.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import anyio
import anyio.to_thread
import structlog

from ..bus import Bus
from ..config import Config
from ..errors import ConfigError, StartupError
from ..host import PluginHost, make_host
from ..ipc import Channel, open_channel
from ..kv import sizing
from ..logs import configure_logs
from ..messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    EngineMessage,
    Failed,
    FrontMessage,
    Heartbeat,
    Hello,
    Ready,
)
from ..worker.base import Worker, WorkerInfo
from ..worker.make import make_worker
from ..worker.threads import keep_to
from .loop import EngineCore, beat, describe
from .watchdog import watch_parent

log = structlog.get_logger(__name__)

START_BEAT_SECONDS = 0.25
"""Between heartbeats while loading: phases may be short."""

WorkerFactory = Callable[[Config, tuple[str, ...]], Worker]


class Start:
    """What start-up is doing, and how long each phase took."""

    def __init__(self) -> None:
        self.phase = "hello"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        self.phase, began = phase, time.monotonic()
        yield
        self.seconds[phase] = time.monotonic() - began

    def pulse(self) -> tuple[int, float, str]:
        return 0, 0.0, self.phase


async def serve(sock: socket.socket, worker_factory: WorkerFactory) -> int:
    """Start and run one engine over the socket; the exit status."""
    channel = await open_channel(sock, FrontMessage)
    start = Start()
    engine: EngineCore | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat, _sender(channel), start.pulse, START_BEAT_SECONDS)
            engine = await _start(channel, start, worker_factory)
            tasks.cancel_scope.cancel()
    except Exception as group:
        error = group.exceptions[0] if isinstance(group, ExceptionGroup) else group
        if not isinstance(error, StartupError):
            log.exception("engine_start_failed", phase=start.phase)
        with anyio.move_on_after(2):
            await channel.send(Failed(describe(error)))
        return 1
    if engine is None:
        return 1
    gc.collect()
    gc.freeze()  # what loading left behind lives as long as the process: the collector need not walk it
    try:
        return 0 if await engine.run() else 1
    except Exception:  # the engine has logged it and told the front
        return 1


async def _start(
    channel: Channel[FrontMessage, EngineMessage], start: Start, worker_factory: WorkerFactory
) -> EngineCore | None:
    """A running engine that has said Ready; None when the front is gone."""
    hello = await channel.receive()
    if hello is None:
        return None
    if not isinstance(hello, Hello) or hello.version != PROTOCOL_VERSION:
        raise StartupError(
            f"the front's first message must be Hello in protocol version {PROTOCOL_VERSION}, got {type(hello).__name__}"
        )
    config, features = hello.config, hello.switches.names()
    configure_logs(config.server.log_format, config.server.log_level)
    if hello.spawned:
        start.seconds["process"] = max(0.0, time.time() - hello.spawned)
    keep_to(config.model.cores)
    with start.during("plugins"):
        host = await anyio.to_thread.run_sync(_load_plugins, config, features)
    with start.during("model"):
        worker = await anyio.to_thread.run_sync(worker_factory, config, features)
        found = await worker.load()
    with start.during("kv"):
        memory = _plan_memory(config, found)
        await worker.allocate(memory.num_blocks)
    info = _describe_engine(found, memory, start, ahead=_plans_ahead(config, found))
    engine = EngineCore(
        config=config,
        info=info,
        host=host,
        switches=hello.switches,
        worker=worker,
        channel=channel,
        bus=Bus(),
    )
    await channel.send(Ready(info))
    return engine


def _load_plugins(config: Config, features: tuple[str, ...]) -> PluginHost:
    host = make_host("engine", config)
    host.load(features)
    return host


def _plan_memory(config: Config, found: WorkerInfo) -> sizing.MemoryPlan:
    wanted = config.model.max_model_len
    if wanted is not None and wanted > found.max_model_len:
        raise ConfigError(f"model.max_model_len = {wanted}: the model takes {found.max_model_len} tokens at most")
    plan = sizing.plan(
        found.free_bytes,
        found.kv_bytes_per_token,
        found.weights_bytes,
        config.cache,
        wanted or found.max_model_len,
        found.kv_memory_fraction,
    )
    log.info("memory_plan", **{name.replace(" ", "_"): value for name, value in plan.rows()})
    return plan


def _plans_ahead(config: Config, found: WorkerInfo) -> bool:
    return found.ahead if config.scheduler.ahead == "auto" else config.scheduler.ahead == "on"


def _describe_engine(found: WorkerInfo, memory: sizing.MemoryPlan, start: Start, *, ahead: bool) -> EngineInfo:
    parts = {f"model.{name}": seconds for name, seconds in found.phases.items()}
    imports = max(0.0, start.seconds["model"] - sum(parts.values()))
    phases = {**start.seconds, "model.imports": imports, **parts}
    return EngineInfo(
        version=PROTOCOL_VERSION,
        model=found.model,
        architecture=found.architecture,
        dtype=found.dtype,
        vocab_size=found.vocab_size,
        max_model_len=memory.longest_request,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        weights_bytes=found.weights_bytes,
        kv_bytes_per_token=found.kv_bytes_per_token,
        eos_token_ids=found.eos_token_ids,
        lossless=found.lossless,
        lossless_reason=found.lossless_reason,
        phases=phases,
        read_bytes_per_second=found.read_bytes_per_second,
        flops_per_second=found.flops_per_second,
        ahead=ahead,
        encodes_in_pieces=found.encodes_in_pieces,
        pid=os.getpid(),
    )


def _sender(channel: Channel[FrontMessage, EngineMessage]) -> Callable[[Heartbeat], Awaitable[None]]:
    async def send(message: Heartbeat) -> None:
        with suppress(OSError):  # the front is gone: the watchdog ends the process
            await channel.send(message)

    return send


def main(worker_factory: WorkerFactory = make_worker, arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tokenbus.core.engine.main", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    fd: int = parser.parse_args(arguments).fd
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    watch_parent(fd)
    status = anyio.run(serve, socket.socket(fileno=fd), worker_factory)
    os._exit(status)  # a step that still computes must not keep the process


if __name__ == "__main__":
    main()
