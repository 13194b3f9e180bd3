"""Which plugins are on in the engine: live changes, all or none, and what happens when one fails outside any one request.

Everything here runs between two steps. `note_failure` alone may be called in the middle of one: it only takes a note.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from ..contexts import EngineContext
from ..errors import ConflictError, PluginError, PluginLoadError, TokenbusError
from ..host import PluginHost, Switches
from ..messages import PluginDisabled
from ..plan import StepInput
from ..request import Request
from ..scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)

POLICY_HOOK = "scheduling_policy"
"""Failures of a scheduling policy: core's has taken over, so its plugin goes off whoever claims it."""


class Switchboard:
    def __init__(self, host: PluginHost, context: EngineContext) -> None:
        self._host = host
        self._context = context
        self._failures: dict[str, PluginError] = {}
        self._refusing: set[str] = set()
        self._on_worker: frozenset[str] = frozenset()
        """What was on when the worker last finished a step."""
        self._notices: list[PluginDisabled] = []

    def start(self, switches: Switches) -> None:
        """At start: load and start what is on. PluginLoadError when one can't."""
        self._host.load(switches.on)
        try:
            for name in switches.names():
                self._started(name)
        except PluginError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        self._on_worker = switches.on

    def change(self, scheduler: Scheduler, changes: Mapping[str, bool]) -> Switches:
        """Switch plugins; the state after it. NotFoundError or ConflictError, and nothing changed, when refused."""
        now = scheduler.switches
        target = self._host.change_switches(now, changes)
        loaded_before = frozenset(self._host.loaded)
        started: list[str] = []
        try:
            fresh = self._host.load(target.on)
            for name in fresh:
                started.append(name)
                self._started(name)
        except (PluginError, PluginLoadError) as error:
            for name in started:
                self._stopped(name)
            self._host.release_unused(loaded_before)
            raise ConflictError(f"can't be switched: {error.message}", plugin=error.plugin, hook=error.hook) from error
        scheduler.apply_switches(target, time.time())
        self._refusing &= target.on
        log.info("features_applied", changes=dict(changes), on=target.names())
        return scheduler.switches

    def note_failure(self, name: str, error: PluginError) -> None:
        """An engine-wide hook raised. Dealt with by `settle`, between two steps; a plugin's first failure counts."""
        if name not in self._refusing:
            self._failures.setdefault(name, error)

    def step_done(self, order: StepInput) -> None:
        """The worker has finished a step."""
        if order.features is not None:
            self._on_worker = frozenset(order.features)

    def step_failed(self, scheduler: Scheduler, order: StepInput, error: TokenbusError) -> None:
        """A step failed as a whole. If it was the first with plugins newly on, they go off again: the worker may not be able to load them,
        and then every further step would fail."""
        if isinstance(error, PluginError) and error.plugin is not None:
            self.note_failure(error.plugin, error)
        if order.features is None:
            return
        for name in sorted(frozenset(order.features) - self._on_worker):
            if name in scheduler.switches.on:
                self._notices.append(self._switch_off(scheduler, name, error))

    def settle(self, scheduler: Scheduler) -> list[PluginDisabled]:
        """Deal with the failures noted since the last call: what the front must know."""
        notices, self._notices = self._notices, []
        while self._failures:
            name, error = self._failures.popitem()
            if name in scheduler.switches.on:
                notices.append(self._disable(scheduler, name, error))
        return notices

    def _disable(self, scheduler: Scheduler, name: str, error: PluginError) -> PluginDisabled:
        """Off, when that changes nothing for anybody; else end the requests that need it and have new ones refused."""
        doomed = self._with_dependents(name, scheduler.switches)
        claimed = [r for r in scheduler.requests.values() if any(self._claims(r, other) for other in doomed)]
        bound = any(self._host.info(other).enforces or self._host.info(other).scope == "engine" for other in doomed)
        if error.hook != POLICY_HOOK and (claimed or bound):
            users = claimed or [r for r in scheduler.requests.values() if name in r.features and self._host.info(name).enforces]
            for request in users:
                scheduler.fail(request.request_id, error.to_wire(), time.time())
            self._refusing.add(name)
            log.error("plugin_failed_and_kept", plugin=name, hook=error.hook, error=error.message, ended_requests=len(users))
            return PluginDisabled(name, error.to_wire(), refuses_new=True)
        return self._switch_off(scheduler, name, error)

    def _switch_off(self, scheduler: Scheduler, name: str, error: TokenbusError) -> PluginDisabled:
        doomed = self._with_dependents(name, scheduler.switches)
        reasons = dict(scheduler.switches.reasons)
        for other in doomed:
            reasons[other] = f"failed: {error.message}" if other == name else f"needs {name!r}, which failed"
        log.error("plugin_switched_off", plugin=name, hook=error.hook, error=error.message, with_it=sorted(doomed - {name}))
        scheduler.apply_switches(Switches(scheduler.switches.on - doomed, reasons), time.time())
        return PluginDisabled(name, error.to_wire(), refuses_new=False)

    def _with_dependents(self, name: str, switches: Switches) -> frozenset[str]:
        doomed = {name}
        while more := {other for other in switches.on - doomed if self._host.info(other).requires & doomed}:
            doomed |= more
        return frozenset(doomed)

    def _claims(self, request: Request, name: str) -> bool:
        return name in request.features and not self._host.info(name).claims.isdisjoint(request.fields)

    def _started(self, name: str) -> None:
        for impl in self._host.table(frozenset({name})).engine_started:
            impl(engine=self._context)

    def _stopped(self, name: str) -> None:
        for impl in self._host.table(frozenset({name})).engine_stopped:
            try:
                impl()
            except PluginError as error:
                log.exception("plugin_failed", plugin=name, hook=error.hook, error=error.message)
