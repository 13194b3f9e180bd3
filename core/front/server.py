"""The server process: starts the engine, loads the tokenizer meanwhile, answers HTTP, and ends in good order.

SIGTERM, SIGINT     drain: new requests get 503, running ones go on for `drain_seconds` at most, then exit 0
a second one        ends at once, with 128 + the signal's number; so does the first one before the server is ready, with 0
"""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
        host = make_host("front", config)
        switches = host.start_switches(config.features.enable, config.features.disable)
        check_client_features(config.server.client_features, host)
        check_pool(config, host, switches)
    bus = Bus()
    client = EngineClient(config, bus, host, switches)
    experiments = Experiments(config, host, client, bus)
    signals = _Signals()
    async with anyio.create_task_group() as tasks:
        await tasks.start(signals.watch, tasks.cancel_scope)
        await tasks.start(client.run)
        await tasks.start(experiments.run)
        async with _http(config, client, experiments, phases) as address:
            info = await client.wait_ready()
            signals.serving = True
            phases.print_report(info, address)
            gc.collect()
            gc.freeze()  # what start-up made lives on: the collector need not look at it again
            await signals.asked.wait()
            log.info("draining", open_requests=client.open_requests, seconds=config.server.drain_seconds)
            await client.drain(config.server.drain_seconds)
        await client.close()
        log.info("ended")
        tasks.cancel_scope.cancel()
    return signals.code


@asynccontextmanager
async def _http(config: Config, client: EngineClient, experiments: Experiments, phases: Phases) -> AsyncIterator[str]:
    """The HTTP server; the value is its address. It answers before the engine is ready: /ready and requests with 503."""
    with phases.during("front: HTTP modules"):  # while the engine process starts
        from ..api import admin, misc
        from ..api.app import Routes, make_app
        from ..api.auth import Gate
        from ..api.connection import make_runner
        from .service import Service, load_text_parts
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
    )
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
