"""The engine as the front process sees it: submit requests, read their streams, switch plugins, ask questions.

Used by the HTTP server and by the offline `LLM`; knows nothing of HTTP. The supervisor keeps the process alive, the journal knows the open
requests, the client turns engine messages into streams, and keeps the front's plugins (plugins.py) in step with the engine's switches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import anyio
import anyio.abc
import msgspec
import structlog

from ..bus import Bus
from ..config import Config
from ..contexts import FrontContext
from ..errors import (
    ErrorInfo,
    OverloadedError,
    RequestError,
    TokenbusError,
    UnavailableError,
    from_wire,
)
from ..host import PluginHost, Switches
from ..messages import (
    Add,
    Cancel,
    EngineInfo,
    EngineMessage,
    Heartbeat,
    PluginDisabled,
    Query,
    Reply,
    SetFeatures,
    StepOutput,
)
from ..request import AdmittedRequest
from .events import EngineDied, EngineStarted, FeatureChange, LoopLag
from .journal import Journal
from .plugins import FrontPlugins
from .stream import CancelReason, TokenChunk, TokenStream, failed
from .supervisor import ENGINE, Death, Supervisor, death_error, startup_error

__all__ = ["EngineClient", "TokenChunk", "TokenStream"]

log = structlog.get_logger(__name__)

State = Literal["starting", "ready", "restarting", "draining", "stopped"]

SPARE_MESSAGES = 256
"""Room in the outbox beside one Add and one Cancel for every open request: queries and switch changes."""
FIRST_START_SECONDS = 5.0
"""What a client is told to wait before the first start's time is known."""
SHUTDOWN_MESSAGE = "the server is shutting down"


class EngineClient:
    """One engine, through all its lives. Everything runs on the event loop that runs `run`."""

    def __init__(
        self, config: Config, bus: Bus, host: PluginHost, switches: Switches, *, command: Sequence[str] = ENGINE
    ) -> None:
        """host: role "front". switches: what is on at start. command: what starts an engine process."""
        self.config = config
        self.bus = bus
        self.host = host
        self.switches = switches
        """What is on now, in the front and in the engine; survives a restart."""
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        """The engine's description; None before the first start succeeded. That of the last life while it restarts."""
        self.restarts = 0
        self.journal = Journal()
        self.capacity = config.scheduler.max_running + config.scheduler.max_waiting
        """Requests that may be open at once."""
        self.refusing: dict[str, ErrorInfo] = {}
        """Plugins that failed but enforce something or are in use: requests that need them are refused until they are switched off."""
        self._supervisor = Supervisor(config, self, outbox_size=2 * self.capacity + SPARE_MESSAGES, command=command)
        self._streams: dict[str, TokenStream] = {}
        self._calls: dict[int, _Call] = {}
        self._call_ids = 0
        self._switching = anyio.Lock()
        self._coming: frozenset[str] = frozenset()
        """What will be on if the engine agrees to the change that is on its way."""
        self._settled = anyio.Event()
        """Set once the first start succeeded or was given up."""
        self._start_error: TokenbusError | None = None
        self._all_ended = anyio.Event()
        self._stopped = anyio.Event()
        self._started = False
        self._restart_at = time.monotonic()
        self._start_seconds = FIRST_START_SECONDS
        self._plugins = FrontPlugins(host, FrontContext(bus=bus, config=config, info=lambda: self.info))

    # ---- life -------------------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the engine and keep it alive until `close`, cancellation, or a first start that can't succeed (see `wait_ready`).

        Raises PluginLoadError or ConfigError when a plugin can't be loaded in this process. No process is left behind.
        """
        self._started = True
        try:
            self._plugins.start(self.switches.on)
            task_status.started()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._measure_lag)
                await self._supervisor.run()
                tasks.cancel_scope.cancel()
        finally:
            self._become_stopped()

    async def wait_ready(self) -> EngineInfo:
        """The engine's description once it is ready. Raises StartupError or a subclass, in the engine's own words, when it can't start."""
        await self._settled.wait()
        if self._start_error is not None:
            raise self._start_error
        assert self.info is not None
        return self.info

    def begin_drain(self) -> None:
        """Refuse new requests from now on; those that are open go on. Idempotent."""
        if self.state != "stopped":
            self.state = "draining"

    async def drain(self, seconds: float) -> bool:
        """Wait until no request is open, `seconds` at most; whatever is still open then ends with UnavailableError.

        True when all ended by themselves."""
        self.begin_drain()
        with anyio.move_on_after(seconds):
            while self._streams:
                self._all_ended = anyio.Event()
                await self._all_ended.wait()
        late = len(self._streams)
        for request_id in tuple(self._streams):
            self._post_cancel(request_id, "cancelled")
            self._end(request_id, UnavailableError(SHUTDOWN_MESSAGE))
        if late:
            log.warning("drain_limit_passed", ended_requests=late, seconds=seconds)
        return not late

    async def close(self) -> None:
        """Stop the engine: asked first, killed after a few seconds. Open requests end with UnavailableError. Idempotent."""
        self.begin_drain()
        self._supervisor.close()
        if self._started:
            await self._stopped.wait()
        else:
            self._become_stopped()

    def ready(self) -> tuple[bool, str]:
        """Whether requests are taken and the engine makes progress; and if not, why."""
        if self.state != "ready":
            return False, {
                "starting": "the engine is starting",
                "restarting": "the engine died and is being restarted",
                "draining": SHUTDOWN_MESSAGE,
                "stopped": "the engine has stopped",
            }[self.state]
        vitals = self._supervisor.vitals
        doubt = "the engine is gone" if vitals is None else vitals.doubt()
        return doubt is None, doubt or "ok"

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    @property
    def engine_pid(self) -> int | None:
        """Process id (and group) of the engine that lives now."""
        return self._supervisor.pid

    # ---- requests ---------------------------------------------------------------------------------------------------------------

    def submit(self, requests: list[AdmittedRequest]) -> list[TokenStream]:
        """Hand requests to the engine, all or none; their streams in the same order.

        Raises UnavailableError (with `retry_after`) while the engine isn't ready or a plugin they need has failed, OverloadedError
        when they would be more than `capacity` together with those that are open, RequestError when they alone are more than that.
        """
        self._refuse_if_unavailable(requests)
        if len(requests) > self.capacity:
            raise RequestError(f"{len(requests)} choices at once are more than this server's queue takes ({self.capacity})")
        if len(self._streams) + len(requests) > self.capacity:
            raise OverloadedError(f"the queue is full: {len(self._streams)} requests are open", retry_after=1.0)
        self.journal.admit(requests)
        if not self._supervisor.post(Add(requests)):
            for request in requests:
                self.journal.end(request.request_id)
            raise UnavailableError("the engine does not take requests now", retry_after=self._retry_after())
        streams = [TokenStream(request.request_id, self._cancel) for request in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        return streams

    def _refuse_if_unavailable(self, requests: Iterable[AdmittedRequest]) -> None:
        if self.state != "ready":
            raise UnavailableError(self.ready()[1], retry_after=self._retry_after())
        for request in requests:
            for name in self.refusing:
                if self._needs(request, name):
                    error = self.refusing[name]
                    raise UnavailableError(
                        f"plugin {name!r} has failed, and this request needs it: {error.message}",
                        plugin=name, hook=error.hook, retry_after=30.0,
                    )  # fmt: skip

    def _needs(self, request: AdmittedRequest, name: str) -> bool:
        """Whether a plugin acts on a request: it is in force, and claims nothing or something that the request uses."""
        claims = self.host.info(name).claims
        return name in request.features and (not claims or not claims.isdisjoint(request.fields))

    def _retry_after(self) -> float:
        """Seconds until an engine should be there: the rest of the back-off, and a start as long as the last one."""
        return max(1.0, self._restart_at + self._start_seconds - time.monotonic())

    def _cancel(self, request_id: str, reason: CancelReason) -> None:
        entry = self.journal.get(request_id)
        if entry is not None and entry.cancel_reason is None:
            entry.cancel_reason = reason
            self._post_cancel(request_id, reason)

    def _post_cancel(self, request_id: str, reason: CancelReason) -> None:
        # always room: an open request has at most one Add and one Cancel in the outbox; without an engine there is nothing to cancel
        self._supervisor.post(Cancel([request_id], reason))

    def _end(self, request_id: str, error: TokenbusError) -> None:
        self.journal.end(request_id)
        self._streams.pop(request_id).end(failed(error))
        self._after_ends()

    def _after_ends(self) -> None:
        if not self._streams:
            self._all_ended.set()
        if len(self.host.loaded) > len(self.switches.on):
            self._settle_plugins()

    # ---- calls ------------------------------------------------------------------------------------------------------------------

    async def query(self, what: str, **args: Any) -> Any:
        """Ask the engine ("plans", "integrity", "stats"). Raises UnavailableError when no engine can answer, or what it answered."""
        return await self._call(Query(self._next_call_id(), what, args))

    async def set_features(self, changes: Mapping[str, bool], who: str) -> Switches:
        """Switch plugins live, all or none, in the engine and in this process; the state after it.

        Raises NotFoundError for an unknown plugin, ConflictError with the reason when refused, UnavailableError without an engine.
        Then nothing has changed. who: for the log and the bus.
        """
        async with self._switching:
            target = self.host.change_switches(self.switches, changes)
            self._coming = target.on
            try:
                self._plugins.prepare(target.on)
                reply = await self._call(SetFeatures(self._next_call_id(), dict(changes)))
            except BaseException:
                self._coming = frozenset()
                self._settle_plugins()
                raise
            self._coming = frozenset()
            # the engine has the last word: it may have switched more off meanwhile
            self._adopt(Switches(msgspec.convert(reply, Switches).on, target.reasons), dict(changes), who)
        return self.switches

    def _next_call_id(self) -> int:
        self._call_ids += 1
        return self._call_ids

    async def _call(self, message: Query | SetFeatures) -> Any:
        if self.state not in {"ready", "draining"} or not self._supervisor.post(message):
            raise UnavailableError(self.ready()[1], retry_after=self._retry_after())
        call = self._calls[message.call_id] = _Call()
        try:
            await call.done.wait()
        finally:
            self._calls.pop(message.call_id, None)
        if call.error is not None:
            raise call.error
        return call.value

    def _settle_plugins(self) -> None:
        self._plugins.settle(self.switches.on | self._coming, self.journal.features_in_use())

    def _adopt(self, state: Switches, changes: dict[str, bool], who: str) -> None:
        self.switches = state
        for name in tuple(self.refusing):
            if name not in state.on:
                del self.refusing[name]
        self._settle_plugins()
        log.info("features_changed", changes=changes, on=state.names(), who=who)
        self.bus.publish(FeatureChange(changes, state, who, time.time()))

    # ---- what the supervisor tells (its Owner) ----------------------------------------------------------------------------------

    def hello_features(self) -> tuple[str, ...]:
        return self.switches.names()

    def engine_ready(self, info: EngineInfo, restarts: int) -> None:
        self.info = info
        self.restarts = restarts
        self._start_seconds = sum(seconds for phase, seconds in info.phases.items() if "." not in phase)
        self.refusing.clear()
        if self.state != "draining":
            self.state = "ready"
        self._settled.set()
        log.info("engine_ready", pid=info.pid, restarts=restarts, model=info.model, max_model_len=info.max_model_len)
        self.bus.publish(EngineStarted(info, restarts))

    def engine_message(self, message: EngineMessage) -> None:
        match message:
            case StepOutput():
                self._take_output(message)
            case Heartbeat():
                self.bus.publish(LoopLag("engine", message.loop_lag, message.cpu_seconds, message.step_age))
            case Reply():
                if (call := self._calls.get(message.call_id)) is not None:
                    call.answer(message.value, None if message.error is None else from_wire(message.error))
            case PluginDisabled():
                self._plugin_disabled(message)

    def engine_died(self, death: Death, restart_in: float | None) -> None:
        count = len(self._streams)
        if restart_in is not None:
            self._restart_at = time.monotonic() + restart_in
            if self.state == "ready":
                self.state = "restarting"
        elif not self._settled.is_set() and not death.closed:
            self._start_error = startup_error(death)
            self._settled.set()
        if death.closed:
            self._end_all(UnavailableError(SHUTDOWN_MESSAGE))
            return
        self._end_all(death_error(death, restarting=restart_in is not None and self.state != "draining"))
        self.bus.publish(EngineDied(death.reason, count, restart_in or 0.0))

    def _take_output(self, output: StepOutput) -> None:
        for request_id in {**output.prompt_logprobs, **output.tokens}:
            stream = self._streams.get(request_id)
            if stream is not None:
                tokens = output.tokens.get(request_id, [])
                self.journal.emit(request_id, tokens)
                stream.push(tokens, output.logprobs.get(request_id), output.prompt_logprobs.get(request_id))
        for request_id, finish in output.finished.items():
            if (stream := self._streams.pop(request_id, None)) is not None:
                self.journal.end(request_id)
                stream.end(finish)
        if output.finished:
            self._after_ends()
        if output.report is not None:
            self.bus.publish(output.report)

    def _plugin_disabled(self, message: PluginDisabled) -> None:
        log.error("plugin_disabled", plugin=message.name, refuses_new=message.refuses_new, error=message.error.message)
        if message.refuses_new:
            self.refusing[message.name] = message.error
            return
        reasons = {**self.switches.reasons, message.name: f"switched off after it failed: {message.error.message}"}
        off = {message.name}
        while more := {name for name in self.switches.on - off if self.host.info(name).requires & off}:
            off |= more  # the engine did the same
        reasons |= dict.fromkeys(off - {message.name}, f"needs {message.name!r}, which failed")
        state = Switches(self.switches.on - off, reasons)
        self._adopt(state, dict.fromkeys(sorted(off), False), f"engine: {message.error.kind}")

    def _end_all(self, error: TokenbusError) -> None:
        for request_id in tuple(self._streams):
            self._end(request_id, error)
        for call in tuple(self._calls.values()):
            call.answer(None, UnavailableError("the engine ended before it could answer", retry_after=self._retry_after()))

    def _become_stopped(self) -> None:
        self.state = "stopped"
        if not self._settled.is_set():
            self._start_error = UnavailableError("the engine was stopped before it was ready")
            self._settled.set()
        self._end_all(UnavailableError(SHUTDOWN_MESSAGE))
        self._plugins.stop()
        self._stopped.set()

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await anyio.sleep(1.0)
            self.bus.publish(LoopLag("front", max(0.0, time.monotonic() - before - 1.0), time.process_time()))


class _Call:
    """A question on its way."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.value: Any = None
        self.error: TokenbusError | None = None

    def answer(self, value: Any, error: TokenbusError | None) -> None:
        if not self.done.is_set():
            self.value, self.error = value, error
            self.done.set()
