"""All experiments of a server: decides who gets which arm, drives time slices, watches guard rails, writes rows, survives restarts.

Lives in the front, on its event loop. An engine's restart changes nothing here: the front keeps the switches and the open requests.

    start     a new run: arms are fixed as they are now, units are dealt
    ramp      another share of the units takes part; nobody changes arms
    rollback  every arm but the control is off: their units get the control's switches
    stop      nobody is in an arm any more, everybody's switches are put back as they were
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from .. import live_settings
from ..bus import Bus, Listener
from ..config import Config
from ..errors import ConfigError, ConflictError, FieldError, NotFoundError, TokenbusError, shorten
from ..front.admission import ParsedRequest
from ..front.events import EngineStarted, FeatureChange, RequestRecord, SettingsChange
from ..front.features import Overrides
from ..front.settings import LiveSettings
from ..host import PluginHost, Switches
from ..messages import EngineInfo, StepReport
from .open_requests import OpenRequests
from .plan import SETTING, Plan, check, check_beside, make_plan, plan_engines
from .records import Event, Kind, experiment_dir
from .running import Decision, Experiment
from .state import load_secret, load_state, lock_state_dir, save_state, settings_hash
from .writer import RowWriter, write_event

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
"""Between two looks at guard rails, and two writes of rows."""
SPARE_ROWS = 16384
"""Rows that may wait for the disk beside those of open requests."""
SERVER = "server"
GUARD = "guard rail"


class SwitchedEngine(Protocol):
    """What an experiment needs of the front's `EngineClient`."""

    info: EngineInfo | None

    @property
    def switches(self) -> Switches: ...

    @property
    def settings(self) -> LiveSettings: ...

    async def set_features(self, changes: Mapping[str, bool], who: str) -> Any: ...

    async def set_settings(self, changes: Mapping[str, Any], who: str) -> None: ...


class OwnEngine(SwitchedEngine, Protocol):
    """What it needs of the engine that an arm has for its own."""

    bus: Bus
    config: Config
    host: PluginHost
    restarts: int

    @property
    def state(self) -> str: ...


class Experiments:
    def __init__(
        self,
        config: Config,
        host: PluginHost,
        client: SwitchedEngine,
        bus: Bus,
        *,
        engines: Mapping[str, OwnEngine] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """ConfigError when an experiment could never run here, or the state directory can't be used.

        engines: of the experiment whose arms have engines of their own, by arm, the control's (`client`) among them; None: there are none
        here, and such an experiment can't start."""
        self._host = host
        self._client = client
        self._engines = engines or {}
        self._bus = bus
        self._now = now
        self._wake = anyio.Event()
        self._turn = anyio.Lock()
        """Whoever starts, stops or switches holds it."""
        self._values: tuple[Config, dict[str, Any]] | None = None
        """Of live settings, for a configuration that was in force lately."""
        self._lock_file: int | None = None
        self.all: dict[str, Experiment] = {}
        if config.experiments:
            self._load(config)
        self._running: list[Experiment] = []
        self._open = OpenRequests(self.all)
        self.headers = frozenset(h for e in self.all.values() if (h := e.config.header) is not None)
        """Names of the headers that splits go by, in small letters."""
        told = {
            RequestRecord: self._open.ended, StepReport: self._open.step, EngineStarted: self._on_engine, FeatureChange: self._on_change,
            SettingsChange: self._on_change,
        }  # fmt: skip
        self._listeners = [bus.listen(call, kind) for kind, call in told.items()] if self.all else []
        for arm, engine in self._engines.items():
            if engine is not client:
                self._listeners += self._listen(arm, engine)

    def _load(self, config: Config) -> None:
        if config.server.state_dir is None:
            name = next(iter(config.experiments))
            raise ConfigError(
                f"[experiments.{name}] needs server.state_dir: a folder for the state and the rows of experiments"
            )
        self._state_dir = Path(config.server.state_dir)
        for name, settings in config.experiments.items():
            check(name, settings, self._host, config)
        secret = load_secret(self._state_dir)
        self._lock_file = lock_state_dir(self._state_dir)
        most = config.scheduler.max_running + config.scheduler.max_waiting + config.limits.max_choices + SPARE_ROWS
        try:
            for name, settings in config.experiments.items():
                writer = RowWriter(experiment_dir(self._state_dir, name), most)
                self.all[name] = Experiment(name, settings, self._host, load_state(self._state_dir, name), secret, writer)
        except OSError as error:
            raise ConfigError(f"server.state_dir: {error}") from None
        finally:
            if len(self.all) < len(config.experiments):
                os.close(self._lock_file)

    def _listen(self, arm: str, engine: OwnEngine) -> list[Listener]:
        return [
            engine.bus.listen(partial(self._open.step, key=arm), StepReport),
            engine.bus.listen(partial(self._on_engine, key=arm), EngineStarted),
            engine.bus.listen(self._on_change, FeatureChange, SettingsChange),
        ]

    # ---- life -------------------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Go on with what ran, and keep going until cancelled; then everything that waits is written."""
        self._resume()
        task_status.started()
        if not self.all:
            return
        try:
            while True:
                self._wake = anyio.Event()
                await self._tick_safely()
                with anyio.move_on_after(self._until_next()):
                    await self._wake.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Write what waits, and let go of the state directory. Blocking. Idempotent."""
        for listener in self._listeners:
            listener.close()
        for experiment in self.all.values():
            self._write(experiment)
            if experiment.writer.waiting:
                experiment.writer.settle(experiment.writer.write(experiment.writer.take()))
            experiment.writer.close()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _resume(self) -> None:
        for experiment in self.all.values():
            state = experiment.state
            if state.status == "running":
                self._resume_one(experiment)
            elif experiment.config.autostart and not state.run:
                try:
                    self._begin(experiment, SERVER, None)
                except ConflictError as error:
                    state.reason = f"it could not start with the server: {error.message}"
                    log.exception("experiment_not_started", experiment=experiment.name, error=error.message)

    def _resume_one(self, experiment: Experiment) -> None:
        if why := experiment.resume(partial(self._plan, experiment)):
            self._end(experiment, SERVER, why, self._now())
            return
        self._take_up(experiment)
        self._note(experiment, SERVER, "resumed")

    def _take_up(self, experiment: Experiment) -> None:
        experiment.begin(self._stands)
        experiment.changed_at, experiment.failing = self._now(), ""
        self._running.append(experiment)

    def _until_next(self) -> float:
        """Seconds until something is due."""
        now = self._now()
        ends = [e.slice_end(e.slice_now(now)) - now for e in self._running if e.plan.live]
        return max(0.0, min([TICK_SECONDS, *ends]))

    async def _tick_safely(self) -> None:
        """No failure of an experiment may end the server."""
        try:
            await self.tick()
        except Exception:
            log.exception("experiments_failed")

    async def tick(self) -> None:
        """Do what is due: guard rails, slices, rows and state to the disk."""
        async with self._turn:
            now = self._now()
            for experiment in tuple(self._running):
                for arm, why in experiment.passed_limits(now).items():
                    self._switch_off(experiment, arm, GUARD, why)
                if experiment.writer.bytes > experiment.config.max_megabytes * 2**20:
                    self._end(experiment, SERVER, f"its rows have reached {experiment.config.max_megabytes:g} MiB", now)
            for experiment in self.all.values():
                await self._apply_quietly(experiment)
                await self._flush(experiment)

    async def _flush(self, experiment: Experiment) -> None:
        writer = experiment.writer
        if writer.waiting:
            writer.settle(await anyio.to_thread.run_sync(writer.write, writer.take()))
        if experiment.events or experiment.unsaved:
            await anyio.to_thread.run_sync(self._write, experiment)

    def _write(self, experiment: Experiment) -> None:
        """Events and state to the disk. What can't be written is tried again. Blocking."""
        if not (experiment.events or experiment.unsaved):
            return
        try:
            save_state(self._state_dir, experiment.name, experiment.state)
            experiment.unsaved = False
            while experiment.events:
                write_event(experiment_dir(self._state_dir, experiment.name), experiment.events[0])
                del experiment.events[0]
        except OSError as error:
            experiment.unsaved = True
            log.exception("experiment_state_not_written", experiment=experiment.name, error=str(error))

    # ---- requests ---------------------------------------------------------------------------------------------------------------

    def assign(self, parsed: ParsedRequest) -> Overrides | None:
        """A request's arms and their switches; None: it is in none. Every call is followed by one of `refused`, `dropped`, another `assign`
        of the same group, or a RequestRecord for each of its choices."""
        if not self._running:
            return None
        choices, now = len(parsed.prompts) * parsed.n, self._now()
        decisions: list[Decision] = []
        for experiment in self._running:
            if (decision := experiment.decide(parsed, self._stands, now)) is None:
                continue
            if experiment.writer.reserve(choices):
                decisions.append(decision)
            else:
                experiment.unrecorded += 1
        self._open.admit(parsed.group, decisions, choices)
        if not decisions:
            return None
        label = ",".join(decision.label for decision in decisions)
        engine = next((decision.engine for decision in decisions if decision.engine), "")
        return Overrides(label, {name: wish for decision in decisions for name, wish in decision.own.items()}, engine)

    def not_given(self, group: str) -> None:
        """Admission could not apply what `assign` said: the request runs without."""
        self._open.not_given(group)

    def refused(self, parsed: ParsedRequest, error: TokenbusError) -> None:
        """It was answered with an error before the engine had it."""
        self._open.refused(parsed, error, self._now())

    def dropped(self, group: str) -> None:
        """Nothing became of it: whoever sent it left before it was admitted."""
        self._open.dropped(group)

    def _on_engine(self, started: EngineStarted, key: str = "") -> None:
        self._open.engine_started(started, key)
        for experiment in self._running:
            experiment.changed_at = self._now()
        self._wake.set()

    def _on_change(self, change: FeatureChange | SettingsChange) -> None:
        """Another hand on everybody's switches and settings of an experiment ends it: its slices would not be what they say."""
        for experiment in self.all.values():
            if change.who == _who(experiment):
                experiment.applied = {name: self._stands(name) for name in experiment.applied}
                continue
            if experiment.running and experiment.plan.engines:
                if self._plan(experiment).arms != experiment.plan.arms:
                    self._end(experiment, SERVER, f"an engine was changed by {shorten(change.who)}", self._now())
                continue
            touched = [name for name, was in experiment.applied.items() if self._stands(name) != was]
            experiment.applied = {name: was for name, was in experiment.applied.items() if name not in touched}
            experiment.restore = {name: wish for name, wish in experiment.restore.items() if name not in touched}
            if touched and experiment.running:
                now = self._now()
                names = ", ".join(name.removeprefix(SETTING) for name in touched)
                self._end(experiment, SERVER, f"{names} was changed by {shorten(change.who)}", now)

    # ---- what can be done with them ---------------------------------------------------------------------------------------------

    def get(self, name: str) -> Experiment:
        """NotFoundError for a name that the settings don't have."""
        if name not in self.all:
            known = ", ".join(sorted(self.all)) or "none"
            raise NotFoundError(f"no experiment is called {shorten(name)!r}; there are: {known}", param="name")
        return self.all[name]

    async def start(self, name: str, who: str, traffic: float | None = None) -> None:
        """A new run. ConflictError with the reason when it can't begin, UnavailableError when the engine can't switch now; then nothing
        runs. traffic: share of units; None: as the settings say."""
        experiment = self.get(name)
        _check_traffic(experiment, traffic)
        async with self._turn:
            if experiment.restore:
                await self._apply(experiment)
            self._begin(experiment, who, traffic)
            try:
                await self._apply(experiment)
            except TokenbusError as error:
                self._end(experiment, SERVER, f"it could not start: {error.message}", self._now())
                raise
            finally:
                await self._flush(experiment)
        self._wake.set()

    async def ramp(self, name: str, who: str, traffic: float) -> None:
        """Units join or leave; none changes arms. ConflictError when it doesn't run."""
        experiment = self.get(name)
        _check_traffic(experiment, traffic)
        async with self._turn:
            _must_run(experiment)
            experiment.state.traffic = traffic
            self._note(experiment, who, "ramped")
            await self._flush(experiment)

    async def rollback(self, name: str, who: str) -> None:
        """ConflictError when it doesn't run."""
        experiment = self.get(name)
        async with self._turn:
            _must_run(experiment)
            for arm in experiment.config.arms:
                if arm != experiment.config.control_arm:
                    experiment.state.off.setdefault(arm, f"rolled back by {who}")
            self._note(experiment, who, "rolled_back")
            await self._apply_quietly(experiment)
            await self._flush(experiment)

    async def stop(self, name: str, who: str) -> None:
        """ConflictError when it doesn't run."""
        experiment = self.get(name)
        async with self._turn:
            _must_run(experiment)
            self._end(experiment, who, f"stopped by {who}", self._now())
            await self._apply_quietly(experiment)
            await self._flush(experiment)

    def view(self) -> dict[str, Any]:
        now = self._now()
        shown = {name: experiment.view(now) for name, experiment in self.all.items()}
        for name, experiment in self.all.items():
            if experiment.config.own_engines:
                for arm, engine in self._engines.items():
                    shown[name]["arms"][arm]["engine"] = _engine_view(engine)
        return shown

    # ---- changes of state -------------------------------------------------------------------------------------------------------

    def _begin(self, experiment: Experiment, who: str, traffic: float | None) -> None:
        name, config, state = experiment.name, experiment.config, experiment.state
        if experiment.running:
            raise ConflictError(f"experiment {name!r} is running (run {state.run}): stop it first")
        plan = self._plan(experiment)
        check_beside(name, config, plan, {other.name: (other.config, other.plan) for other in self._running}, self._host)
        state.status, state.run, state.started = "running", state.run + 1, self._now()
        state.traffic = config.traffic if traffic is None else traffic
        state.plan, state.off, state.reason, state.settings = plan, {}, "", settings_hash(config)
        self._take_up(experiment)
        self._note(experiment, who, "started")

    def _plan(self, experiment: Experiment) -> Plan:
        """As its arms would run from now on. ConflictError with the reason when they can't."""
        config, engines = experiment.config, self._engines
        if not config.own_engines:
            return make_plan(experiment.name, config, self._host, self._client.switches, self._client.settings.config)
        if engines.keys() != config.arms.keys():
            raise ConflictError(f"experiment {experiment.name!r}: this server has no engines of its arms' own")
        values = {
            arm: {
                key: setting.value for key, setting in live_settings.all_settings(engine.settings.config, engine.host).items()
            }
            for arm, engine in engines.items()
        }
        return plan_engines(config, {arm: engine.switches for arm, engine in engines.items()}, values)

    def _end(self, experiment: Experiment, who: str, reason: str, now: float) -> None:
        state = experiment.state
        state.status, state.stopped, state.reason = "stopped", now, reason
        experiment.failing = ""
        if experiment in self._running:  # otherwise it has changed nothing in this server's life
            self._running.remove(experiment)
            before = experiment.plan.before
            experiment.restore = {name: before[name] for name, was in experiment.applied.items() if before[name] != was}
        self._note(experiment, who, "stopped", detail=reason)
        self._wake.set()

    def _switch_off(self, experiment: Experiment, arm: str, who: str, why: str) -> None:
        experiment.state.off[arm] = why
        self._note(experiment, who, "tripped", arm=arm, detail=why)

    def _note(self, experiment: Experiment, who: str, kind: Kind, *, arm: str = "", detail: str = "") -> None:
        """Into the log, onto the bus, and to the disk as soon as the caller flushes."""
        state = experiment.state
        event = Event(
            when=self._now(), who=who, experiment=experiment.name, run=state.run, kind=kind, arm=arm, detail=detail,
            traffic=state.traffic, weights={} if state.plan is None else _shares(experiment),
        )  # fmt: skip
        experiment.events.append(event)
        experiment.unsaved = True
        tell = log.warning if kind in {"tripped", "slice_failed"} else log.info
        tell(f"experiment_{kind}", experiment=experiment.name, run=state.run, arm=arm or None, who=who, detail=detail or None)
        self._bus.publish(event)

    def _stands(self, name: str) -> Any:
        """How a switch that is everybody's, or a live setting, stands."""
        if not name.startswith(SETTING):
            return name in self._client.switches.on
        config = self._client.settings.config
        if self._values is None or self._values[0] is not config:
            self._values = config, live_settings.live_values(config, self._host)
        return self._values[1][name.removeprefix(SETTING)]

    # ---- everybody's switches ---------------------------------------------------------------------------------------------------

    async def _apply(self, experiment: Experiment) -> None:
        """Make everybody's switches what the experiment wants now. Raises what `set_features` raises."""
        wanted = experiment.restore or experiment.everybodys(self._now())
        changes = {name: wish for name, wish in wanted.items() if self._stands(name) != wish}
        features = {name: wish for name, wish in changes.items() if not name.startswith(SETTING)}
        settings = {name.removeprefix(SETTING): value for name, value in changes.items() if name.startswith(SETTING)}
        if features:
            await self._client.set_features(features, _who(experiment))
        if settings:
            await self._client.set_settings(settings, _who(experiment))
        if changes:
            experiment.changed_at = self._now()
        if wanted is experiment.restore:  # nobody has ended it meanwhile
            experiment.restore = {}

    async def _apply_quietly(self, experiment: Experiment) -> None:
        """The same; what can't be done now is noted once, and tried again with each tick."""
        if self._client.info is None:  # the first engine starts: nobody is served yet
            return
        try:
            await self._apply(experiment)
        except TokenbusError as error:
            if not experiment.failing:
                self._note(experiment, SERVER, "slice_failed", detail=error.message)
            experiment.failing = error.message
        else:
            experiment.failing = ""


def _who(experiment: Experiment) -> str:
    return f"experiment {experiment.name}"


def _engine_view(engine: OwnEngine) -> dict[str, Any]:
    info = engine.info
    return {
        "state": engine.state,
        "pid": None if info is None else info.pid,
        "restarts": engine.restarts,
        "cores": engine.config.model.cores,
        "threads": engine.config.model.threads,
        "kv_tokens": None if info is None else info.num_blocks * info.block_size,
    }


def _shares(experiment: Experiment) -> dict[str, float]:
    return {arm: 0.0 if arm in experiment.state.off else share for arm, share in experiment.plan.shares.items()}


def _must_run(experiment: Experiment) -> None:
    if not experiment.running:
        raise ConflictError(f"experiment {experiment.name!r} is not running: start it first")


def _check_traffic(experiment: Experiment, traffic: float | None) -> None:
    if traffic is None:
        return
    if not 0 <= traffic <= 1:
        raise FieldError("traffic", f"must be between 0 and 1, got {traffic:g}")
    if experiment.config.sliced and traffic != 1:
        raise ConflictError(
            f"experiment {experiment.name!r} goes by time slices, which are everybody's: it can't take a part of traffic"
        )
    if experiment.config.own_engines and traffic != 1:
        raise ConflictError(
            f"experiment {experiment.name!r} has engines of its arms' own, and whoever is in no arm would be the control's to serve: "
            "it can't take a part of traffic; use weights"
        )
