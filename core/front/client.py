"""The engine as the front process sees it: submit requests, read their streams, switch plugins, ask questions.

Used by the HTTP server and by the offline `LLM`; knows nothing of HTTP. The supervisor keeps the process alive, the journal knows the open
requests, the client turns engine messages into streams. What is on, and how that changes, is in switches.py and settings.py.
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
    ConflictError,
    ErrorInfo,
    OverloadedError,
    RequestError,
    TokenbusError,
    UnavailableError,
    from_wire,
)
from ..host import PluginHost, Switches
from ..ipc import FrameError
from ..live_settings import MOST_OPEN
from ..messages import (
    Cancel,
    EngineInfo,
    EngineMessage,
    Finish,
    Heartbeat,
    PluginDisabled,
    Query,
    Reply,
    SetFeatures,
    SetSettings,
    StepBegins,
    StepOutput,
)
from ..request import AdmittedRequest
from .calls import Call
from .events import ChangeRefused, EngineDied, EngineStarted, LoopLag
from .journal import Journal
from .plugins import Hold
from .recovery import Recovery
from .settings import LiveSettings
from .stream import CancelReason, TokenChunk, TokenStream, failed
from .supervisor import ENGINE, Death, Supervisor, death_error, startup_error
from .switches import FrontSwitches

__all__ = ["EngineClient", "TokenChunk", "TokenStream"]

log = structlog.get_logger(__name__)

State = Literal["starting", "ready", "restarting", "draining", "stopped"]

SPARE_MESSAGES = 256
"""Room in the outbox beside one Add and one Cancel for every open request: queries and switch changes."""
EXPIRE_SECONDS = 0.1
"""Between two looks at the deadlines of requests that are held back."""
FIRST_START_SECONDS = 5.0
"""What a client is told to wait before the first start's time is known."""
SHUTDOWN_MESSAGE = "the server is shutting down"


class EngineClient:
    """One engine, through all its lives. Everything runs on the event loop that runs `run`."""

    def __init__(
        self,
        config: Config,
        bus: Bus,
        host: PluginHost,
        switches: Switches,
        *,
        command: Sequence[str] = ENGINE,
        fixed: str = "",
        main: bool = True,
    ) -> None:
        """host: role "front". switches: what is on at start. command: what starts an engine process. fixed: why switches and settings can't
        change live, if they can't. main: it is the server's, not only an arm's."""
        self.config = config
        self.bus = bus
        self.host = host
        self.state: State = "starting"
        self._fixed = fixed
        self.info: EngineInfo | None = None
        """The engine's description; None before the first start succeeded. That of the last life while it restarts."""
        self.restarts = 0
        self.journal = Journal()
        self.settings = LiveSettings(config, host, bus)
        self._supervisor = Supervisor(
            config, self, outbox_size=2 * max(self.capacity, MOST_OPEN) + SPARE_MESSAGES, command=command
        )
        self._recovery = Recovery(self.journal, host, self._supervisor.post)
        context = FrontContext(bus=bus, config=config, info=lambda: self.info, main=main)
        self._switches = FrontSwitches(switches, host, context, self.journal, self._recovery, bus)
        self._failed_starts = 0
        """Deaths in a row of engines that were not ready yet."""
        self._streams: dict[str, TokenStream] = {}
        self._calls: dict[int, Call] = {}
        self._call_ids = 0
        self._settled = anyio.Event()
        """Set once the first start succeeded or was given up."""
        self._start_error: TokenbusError | None = None
        self._all_ended = anyio.Event()
        self._stopped = anyio.Event()
        self._started = False
        self._restart_at = time.monotonic()
        self._start_seconds = FIRST_START_SECONDS

    # ---- life -------------------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start the engine and keep it alive until `close`, cancellation, or a first start that can't succeed (see `wait_ready`).

        Raises PluginLoadError or ConfigError when a plugin can't be loaded in this process. No process is left behind.
        """
        self._started = True
        try:
            self._switches.start()
            task_status.started()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._measure_lag)
                tasks.start_soon(self._expire_held)
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
    def switches(self) -> Switches:
        """What is on now, in the front and in the engine; survives a restart."""
        return self._switches.now

    @property
    def refusing(self) -> dict[str, ErrorInfo]:
        """Plugins that failed but enforce something or are in use: requests that need them are refused until they are switched off."""
        return self._switches.refusing

    @property
    def capacity(self) -> int:
        """Requests that may be open at once."""
        return self.settings.capacity

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    @property
    def suspects(self) -> int:
        """Requests that may have killed the last engine and are being tried, one at a time; the others wait meanwhile."""
        return len(self._recovery.quarantine)

    @property
    def engine_pid(self) -> int | None:
        """Process id (and group) of the engine that lives now."""
        return self._supervisor.pid

    # ---- requests ---------------------------------------------------------------------------------------------------------------

    def submit(self, requests: list[AdmittedRequest]) -> list[TokenStream]:
        """Hand requests to the engine, all or none; their streams in the same order.

        Raises UnavailableError (with `retry_after`) while the engine isn't ready or a plugin they need has failed, OverloadedError
        when they would be more than `capacity` together with those that are open, RequestError when they alone are more than that,
        TooLargeError when they can't be sent at all.
        """
        self._refuse_if_unavailable(requests)
        if len(requests) > self.capacity:
            raise RequestError(f"{len(requests)} choices at once are more than this server's queue takes ({self.capacity})")
        if len(self._streams) + len(requests) > self.capacity:
            raise OverloadedError(f"the queue is full: {len(self._streams)} requests are open", retry_after=1.0)
        self._check_room_for_media(requests)
        self.journal.admit(requests)
        try:
            self._recovery.submit(requests)
        except TokenbusError as error:
            for request in requests:
                self.journal.end(request.request_id)
            if isinstance(error, UnavailableError):
                error.retry_after = self._retry_after()
            raise
        streams = [TokenStream(request.request_id, self._cancel) for request in requests]
        self._streams.update((stream.request_id, stream) for stream in streams)
        return streams

    def _check_room_for_media(self, requests: Iterable[AdmittedRequest]) -> None:
        size = sum(item.size for request in requests for item in request.media)
        most = self.config.limits.max_open_media_mb << 20
        if size and (others := self.journal.media_bytes()) and size + others > most:
            raise OverloadedError("there is no room for more pictures and sounds now", retry_after=1.0)

    def _refuse_if_unavailable(self, requests: Iterable[AdmittedRequest]) -> None:
        if self.state != "ready":
            raise UnavailableError(self.ready()[1], retry_after=self._retry_after())
        self._switches.refuse_if_failed(requests)

    def _retry_after(self) -> float:
        """Seconds until an engine should be there: the rest of the back-off, and a start as long as the last one."""
        return max(1.0, self._restart_at + self._start_seconds - time.monotonic())

    def _cancel(self, request_id: str, reason: CancelReason) -> None:
        entry = self.journal.get(request_id)
        if entry is not None and entry.cancel_reason is None:
            entry.cancel_reason = reason
            if self._recovery.holds(request_id):
                self._finish(request_id, self._recovery.cancelled(request_id))
            else:
                self._post_cancel(request_id, reason)

    def _post_cancel(self, request_id: str, reason: CancelReason) -> None:
        # always room: an open request has at most one Add and one Cancel in the outbox; without an engine there is nothing to cancel
        self._supervisor.post(Cancel([request_id], reason))

    def _end(self, request_id: str, error: TokenbusError) -> None:
        self._finish(request_id, failed(error))

    def _finish(self, request_id: str, finish: Finish) -> None:
        """End a request that the engine hasn't, or has no say in any more."""
        self.journal.end(request_id)
        self._recovery.ended(request_id)
        self._streams.pop(request_id).end(finish)
        self._after_ends()

    def _advance(self) -> None:
        """Hand to the engine what was held back and may go there now."""
        while refused := self._recovery.advance():
            for request_id, error in refused.items():
                self._end(request_id, error)

    async def _expire_held(self) -> None:
        """Deadlines of requests that no engine has are this process's to watch."""
        while True:
            await anyio.sleep(EXPIRE_SECONDS)
            for request_id, finish in self._recovery.expired(time.time()).items():
                self._finish(request_id, finish)

    def hold_plugins(self) -> Hold:
        """What keeps a request's plugins loaded in this process until it is submitted."""
        return self._switches.hold()

    def _after_ends(self) -> None:
        if not self._streams:
            self._all_ended.set()
        self._switches.release()

    # ---- calls ------------------------------------------------------------------------------------------------------------------

    async def query(self, what: str, **args: Any) -> Any:
        """Ask the engine ("plans", "integrity", "stats"). Raises UnavailableError when no engine can answer, or what it answered."""
        message = Query(self._next_call_id(), what, args)
        return await self._answer(message.call_id, self._post_call(message))

    async def set_features(self, changes: Mapping[str, bool], who: str) -> Switches:
        """Switch plugins live, all or none, in the engine and in this process; the state after it.

        Raises NotFoundError for an unknown plugin, ConflictError with the reason when refused, UnavailableError without an engine.
        Then nothing has changed. who: for the log and the bus. Cancelled while it waits: the change may come about all the same.
        """
        self._refuse_if_fixed("features", changes, who)
        return await self._change(self._switches.begin(self._next_call_id(), changes, who), self._switches)

    async def set_settings(self, changes: Mapping[str, Any], who: str) -> None:
        """Change live settings, all or none, in the engine between two steps and then in this process.

        Raises what `live_settings.check` raises, UnavailableError without an engine; then nothing has changed. Cancelled while it waits:
        the change may come about all the same."""
        self._refuse_if_fixed("settings", changes, who)
        await self._change(self.settings.begin(self._next_call_id(), changes, who), self.settings)

    def _refuse_if_fixed(self, what: Literal["features", "settings"], changes: Mapping[str, Any], who: str) -> None:
        if self._fixed:
            self.bus.publish(ChangeRefused(what, dict(changes), self._fixed, who, time.time()))
            raise ConflictError(self._fixed)

    async def _change(self, message: SetFeatures | SetSettings, owner: FrontSwitches | LiveSettings) -> Any:
        try:
            call = self._post_call(message)
        except TokenbusError as error:
            owner.refused(message.call_id, error)
            raise
        return await self._answer(message.call_id, call)

    def _next_call_id(self) -> int:
        self._call_ids += 1
        return self._call_ids

    def _post_call(self, message: Query | SetFeatures | SetSettings) -> Call:
        try:
            sent = self.state in {"ready", "draining"} and self._supervisor.post(message)
        except FrameError as error:
            raise RequestError(f"the engine can't be asked: {error}") from error
        if not sent:
            raise UnavailableError(self.ready()[1], retry_after=self._retry_after())
        call = self._calls[message.call_id] = Call()
        return call

    async def _answer(self, call_id: int, call: Call) -> Any:
        try:
            return await call.wait()
        finally:
            self._calls.pop(call_id, None)

    # ---- what the supervisor tells (its Owner) ----------------------------------------------------------------------------------

    def hello_switches(self) -> Switches:
        return self._switches.now

    def hello_config(self) -> Config:
        return self.settings.config

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
        self._recovery.started()
        self._advance()

    def engine_message(self, message: EngineMessage) -> None:
        match message:
            case StepBegins():
                self._recovery.step_begins(message)
            case StepOutput():
                self._take_output(message)
            case Heartbeat():
                self.bus.publish(LoopLag("engine", message.loop_lag, message.cpu_seconds, message.step_age))
                self._advance()
            case Reply():
                self._take_reply(message)
            case PluginDisabled():
                self._switches.disabled(message)

    def engine_died(self, death: Death, restart_in: float | None) -> None:
        count = len(self._streams)
        self._failed_starts = 0 if death.was_ready else self._failed_starts + 1
        if restart_in is not None:
            self._restart_at = time.monotonic() + restart_in
            if self.state == "ready":
                self.state = "restarting"
        elif not self._settled.is_set() and not death.closed:
            self._start_error = startup_error(death)
            self._settled.set()
        self._end_calls()
        if death.closed:
            self._end_all(UnavailableError(SHUTDOWN_MESSAGE))
            return
        for request_id, finish in self._recovery.died(death.reason).items():
            self._finish(request_id, finish)
        if restart_in is None or self._failed_starts >= self.config.supervision.resume_starts:
            self._end_all(death_error(death, self._failed_starts))
        if count:
            log.warning(
                "requests_held",
                held=len(self._streams),
                ended=count - len(self._streams),
                suspects=self.suspects,
                pairs_kept_apart=len(self._recovery.apart),
            )
        for entry in self.journal:
            self._streams[entry.admitted.request_id].resumptions = entry.resumptions
        self.bus.publish(EngineDied(death.reason, count, restart_in or 0.0, count - len(self._streams)))

    def _take_output(self, output: StepOutput) -> None:
        for request_id in {**output.prompt_logprobs, **output.tokens}:
            stream = self._streams.get(request_id)
            if stream is not None:
                tokens, prompt_logprobs = output.tokens.get(request_id, []), output.prompt_logprobs.get(request_id)
                self._recovery.emitted(request_id, tokens, prompt_logprobs)
                stream.push(tokens, output.logprobs.get(request_id), prompt_logprobs)
        self._recovery.step_ended(output.tokens)
        for request_id, end in output.finished.items():
            if request_id in self._streams and (finish := self._recovery.finished(request_id, end)) is not None:
                self._finish(request_id, finish)
        self._advance()
        if output.kernels is not None and self.info is not None:
            lossless, reason = output.kernels.lossless, output.kernels.reason
            self.info = msgspec.structs.replace(self.info, lossless=lossless, lossless_reason=reason)
            log.info("attention_changed", backend=output.kernels.attention, lossless=lossless, reason=reason)
        if output.report is not None:
            self.bus.publish(output.report)

    def _take_reply(self, message: Reply) -> None:
        """A change counts whether or not whoever asked for it still waits."""
        error = None if message.error is None else from_wire(message.error)
        if error is not None:
            self._switches.refused(message.call_id, error)
            self.settings.refused(message.call_id, error)
        elif message.switches is not None:
            self._switches.answered(message.call_id, message.switches)
        else:
            self.settings.answered(message.call_id)
        if (call := self._calls.get(message.call_id)) is not None:
            call.answer(message.value if message.switches is None else message.switches, error)

    def _end_all(self, error: TokenbusError) -> None:
        for request_id in tuple(self._streams):
            self._end(request_id, error)

    def _end_calls(self) -> None:
        words = "the engine ended before it could answer"
        for call in tuple(self._calls.values()):
            call.answer(None, UnavailableError(words, retry_after=self._retry_after()))
        error = UnavailableError(words)
        self._switches.all_refused(error)
        self.settings.all_refused(error)

    def _become_stopped(self) -> None:
        self.state = "stopped"
        if not self._settled.is_set():
            self._start_error = UnavailableError("the engine was stopped before it was ready")
            self._settled.set()
        self._end_calls()
        self._end_all(UnavailableError(SHUTDOWN_MESSAGE))
        self._switches.stop()
        self._stopped.set()

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await anyio.sleep(1.0)
            self.bus.publish(LoopLag("front", max(0.0, time.monotonic() - before - 1.0), time.process_time()))
