"""The server process: starts the engine, loads the tokenizer meanwhile, answers HTTP, and ends in good order.

SIGTERM, SIGINT     drain: new requests get 503, running ones go on for `drain_seconds` at most, then exit 0
a second one        ends at once, with 128 + the signal's number; so does the first one before the server is ready, with 0
"""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from .. import logs
from ..bus import Bus
from ..config import Config
from ..errors import ConfigError, TokenbusError
from ..experiments.controller import Experiments
from ..experiments.engines import engine_configs, experiment_with_engines
from ..host import make_host
from ..models.resolve import ResolvedModel, resolve
from .client import EngineClient
from .startup import Phases, check_client_features, check_pool

if TYPE_CHECKING:
    from aiohttp import web

log = structlog.get_logger(__name__)

HANDLER_GRACE = 5.0
"""Seconds that handlers have to write their last bytes once every request has ended."""


def run(config: Config) -> int:
    """Serve until a signal; the exit code. Raises StartupError when the server can't start."""
    logs.configure_logs(config.server.log_format, config.server.log_level)
    try:
        return anyio.run(_serve, config)
    except BaseExceptionGroup as group:
        raise _cause(group) from None


def _cause(group: BaseExceptionGroup) -> BaseException:
    """The error that says why, out of a task group's."""
    found, todo = [], list[BaseException](group.exceptions)
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        else:
            found.append(error)
    return next((error for error in found if isinstance(error, TokenbusError)), found[0])


class _Signals:
    """What signals have asked for."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.serving = False
        self.code = 0

    async def watch(
        self, everything: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                if self.asked.is_set():
                    self.code = 128 + number
                if self.asked.is_set() or not self.serving:
                    everything.cancel()
                    return
                self.asked.set()


async def _serve(config: Config) -> int:
    phases = Phases()
    with phases.during("front: plugins"):
        engines = _engines(config)
    client = engines.server
    experiments = Experiments(client.config, client.host, client, client.bus, engines=engines.of_arms)
    signals = _Signals()
    async with anyio.create_task_group() as tasks:
        await tasks.start(signals.watch, tasks.cancel_scope)
        for engine in engines.all:
            await tasks.start(engine.run)
        async with _http(engines, experiments, phases, tasks) as address:
            for engine in engines.all:
                await engine.wait_ready()
            signals.serving = True
            phases.print_report(await client.wait_ready(), address)
            gc.collect()
            gc.freeze()  # what start-up made lives on: the collector need not look at it again
            await signals.asked.wait()
            open_requests = sum(engine.open_requests for engine in engines.all)
            log.info("draining", open_requests=open_requests, seconds=config.server.drain_seconds)
            async with anyio.create_task_group() as drains:
                for engine in engines.all:
                    drains.start_soon(engine.drain, config.server.drain_seconds)
        async with anyio.create_task_group() as closes:
            for engine in engines.all:
                closes.start_soon(engine.close)
        log.info("ended")
        tasks.cancel_scope.cancel()
    return signals.code


@dataclass(frozen=True)
class _Engines:
    server: EngineClient
    of_arms: dict[str, EngineClient]
    """Of the experiment whose arms have engines of their own, by arm; the control's is the server's. Empty where there is none."""

    @property
    def all(self) -> tuple[EngineClient, ...]:
        return tuple(self.of_arms.values()) or (self.server,)


def _engines(config: Config) -> _Engines:
    """Not started yet. ConfigError when they can't be as they are asked for."""
    host = make_host("front", config)
    check_client_features(config.server.client_features, host)
    name = experiment_with_engines(config)
    if name is None:
        switches = host.start_switches(config.features.enable, config.features.disable)
        check_pool(config, host, switches)
        return _Engines(EngineClient(config, Bus(), host, switches), {})
    fixed = f"switches and settings are those of experiment {name!r}, whose arms have engines of their own: restart with others"
    made: dict[str, EngineClient] = {}
    control = config.experiments[name].control_arm
    for arm, of_arm in engine_configs(name, config, host).items():
        host = make_host("front", of_arm)
        try:
            switches = host.start_switches(of_arm.features.enable, of_arm.features.disable)
        except ConfigError as error:
            raise ConfigError(f"experiments.{name}.arms.{arm}.features: {error.message}") from None
        made[arm] = EngineClient(of_arm, Bus(), host, switches, fixed=fixed, main=arm == control)
    return _Engines(made[control], made)


@asynccontextmanager
async def _http(engines: _Engines, experiments: Experiments, phases: Phases, tasks: anyio.abc.TaskGroup) -> AsyncIterator[str]:
    """The HTTP server; the value is its address. It answers before the engine is ready: /ready and requests with 503. Experiments run in
    `tasks` from then on."""
    with phases.during("front: HTTP modules"):  # while the engine process starts
        from ..api import admin, misc
        from ..api.app import Routes, make_app
        from ..api.auth import Gate
        from ..api.connection import make_runner
        from .service import Service, load_text_parts
    client = engines.server
    config = client.config
    gate = Gate(config.server)
    with phases.during("front: tokenizer, template"):
        model: ResolvedModel = await anyio.to_thread.run_sync(resolve, config.model.model)
        tokenizer, template = await anyio.to_thread.run_sync(load_text_parts, model, config)
    name = config.model.served_model_name or model.name
    service = Service(
        config,
        client.host,
        client,
        client.bus,
        model_name=name,
        tokenizer=tokenizer,
        template=template,
        experiments=experiments,
        engines=engines.of_arms,
    )
    await tasks.start(experiments.run)  # the audit trail hears what becomes of them
    routes = Routes(service)
    misc.add_routes(routes)
    admin.add_routes(routes)
    app = make_app(service, routes, gate)
    runner = make_runner(app, HANDLER_GRACE)
    await runner.setup()
    try:
        yield await _listen(runner, config)
        await runner.cleanup()
    except BaseException:
        with anyio.move_on_after(0.5, shield=True):
            await runner.cleanup()
        raise
    finally:
        service.close()


async def _listen(runner: web.AppRunner, config: Config) -> str:
    from aiohttp import web

    host, port = config.server.host, config.server.port
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except OSError as error:
        raise ConfigError(f"server.port: can't listen on {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{runner.addresses[0][1]}"
