"""Which plugins are on in the engine: live changes, all or none, and what happens when one fails outside any one request.

Everything here runs between two steps, with none in flight. `note_failure`, `step_done` and `step_failed` may be called in the middle of
one: they only take a note, and `settle` acts on it, so that what goes to the front is told in the order in which it came about.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import structlog

from ..contexts import EngineContext
from ..errors import ConflictError, PluginError, PluginLoadError, TokenbusError, from_wire, plain_text
from ..host import PluginHost, Switches
from ..messages import PluginDisabled
from ..plan import StepInput, StepResult
from ..scheduling.scheduler import Scheduler

log = structlog.get_logger(__name__)

SLOT_HOOKS = frozenset({"scheduling_policy", "attention_backend"})
"""Failures of what a slot's holder gave: core's own takes over, so the plugin goes off whoever claims it."""


class Switchboard:
    def __init__(self, host: PluginHost, context: EngineContext) -> None:
        self._host = host
        self._context = context
        self._failures: dict[str, TokenbusError] = {}
        self._unloadable: dict[str, TokenbusError] = {}
        """Plugins newly on in a step that failed as a whole."""
        self._refusing: set[str] = set()
        self._lingering_failed: set[str] = set()
        """Plugins that are off, but still in use, and have failed: told once."""
        self._on_worker: frozenset[str] = frozenset()
        """What was on when the worker last finished a step."""

    def start(self, switches: Switches) -> None:
        """At start: load and start what is on. PluginLoadError when one can't."""
        self._host.load(switches.on)
        try:
            for name in switches.names():
                self._started(name)
        except TokenbusError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        self._on_worker = switches.on

    def stop(self) -> None:
        """The engine ends: tell all that are on, or still in use."""
        for name in sorted(self._host.loaded):
            self._stopped(name)

    def revive(self, name: str) -> None:
        """Load and start a plugin that is off, for a request that has it all the same. PluginLoadError when it can't be; it then counts
        as failed."""
        try:
            self._host.load((name,))
            self._started(name)
        except TokenbusError as error:
            self._host.release_unused(self._host.loaded.keys() - {name})
            failure = PluginLoadError(error.message, plugin=name, hook=error.hook)
            self.note_failure(name, failure)
            raise failure from error

    def change(self, scheduler: Scheduler, changes: Mapping[str, bool]) -> Switches:
        """Switch plugins; the state after it. NotFoundError or ConflictError, and nothing changed, when refused."""
        now = scheduler.switches
        target = self._host.change_switches(now, changes)
        if scheduler.requests and self._host.kernels(now.on) != self._host.kernels(target.on):
            raise ConflictError(
                f"{len(scheduler.requests)} requests are open, and another kernel set would change their answers: try again when none is"
            )
        loaded_before = frozenset(self._host.loaded)
        started: list[str] = []
        try:
            fresh = self._host.load(target.on)
            for name in fresh:
                started.append(name)
                self._started(name)
        except TokenbusError as error:
            for name in started:
                self._stopped(name)
            self._host.release_unused(loaded_before)
            raise ConflictError(f"can't be switched: {error.message}", plugin=error.plugin, hook=error.hook) from error
        scheduler.apply_switches(target, time.time())
        self._refusing &= target.on
        self._lingering_failed -= target.on
        log.info("features_applied", changes=dict(changes), on=target.names())
        return scheduler.switches

    # ---- notes ------------------------------------------------------------------------------------------------------------------

    def note_failure(self, name: str, error: TokenbusError) -> None:
        """An engine-wide hook raised. A plugin's first failure counts, but for those that make it lose its slot."""
        if error.hook in SLOT_HOOKS:
            self._failures[name] = error
        elif name not in self._refusing and name not in self._lingering_failed:
            self._failures.setdefault(name, error)

    @property
    def failures_noted(self) -> bool:
        """Whether `settle` has something to do."""
        return bool(self._failures or self._unloadable)

    def step_done(self, scheduler: Scheduler, order: StepInput, result: StepResult) -> None:
        """The worker has finished a step; the scheduler doesn't know yet. A request that has ended meanwhile says again why, in a step that
        was planned before."""
        if order.features is not None:
            self._on_worker = frozenset(order.features)
        for request_id, error in result.errors.items():
            if request_id not in scheduler.requests:
                continue
            if error.kind == PluginLoadError.__name__ and error.plugin is not None:
                self.note_failure(error.plugin, from_wire(error))
        if result.kernels is not None and (failed := result.kernels.error) is not None and failed.plugin is not None:
            self.note_failure(failed.plugin, from_wire(failed))

    def step_failed(self, scheduler: Scheduler, order: StepInput, error: TokenbusError) -> None:
        """A step failed as a whole. If no plugin is to blame, and it was the first with plugins newly on, they go off again: the worker may
        not be able to load them, and then every further step would fail."""
        if isinstance(error, PluginError) and error.plugin is not None:
            self.note_failure(error.plugin, error)
        elif order.features is not None:
            newly_on = frozenset(order.features) - self._on_worker
            self._unloadable |= dict.fromkeys(sorted(newly_on & scheduler.switches.on), error)

    # ---- acting on them ---------------------------------------------------------------------------------------------------------

    def settle(self, scheduler: Scheduler) -> list[PluginDisabled]:
        """Deal with the failures noted since the last call: what the front must know."""
        notices: list[PluginDisabled] = []
        failures, self._failures = self._failures, {}
        unloadable, self._unloadable = self._unloadable, {}
        for name, error in failures.items():
            if name in scheduler.switches.on:
                notices.append(self._disable(scheduler, name, error))
            elif name in self._host.catalogue:
                notices.append(self._keep_off(scheduler, name, error))
        for name, error in unloadable.items():
            if name in scheduler.switches.on:
                notices.append(self._switch_off(scheduler, name, error))
        return notices

    def _disable(self, scheduler: Scheduler, name: str, error: TokenbusError) -> PluginDisabled:
        """Off, when that changes nothing for anybody; else end the requests that need it and have new ones refused."""
        host, doomed = self._host, self._host.with_dependents(name, scheduler.switches.on)
        used = any(
            other in request.features and not host.info(other).claims.isdisjoint(request.fields)
            for request in scheduler.requests.values()
            for other in doomed
        )
        bound = any(host.info(other).enforces or host.info(other).scope == "engine" for other in doomed)
        if error.hook in SLOT_HOOKS or not (used or bound):
            return self._switch_off(scheduler, name, error)
        ended = self._end_users(scheduler, doomed, error)
        self._refusing.add(name)
        log.error("plugin_failed_and_kept", plugin=name, hook=error.hook, error=error.message, ended_requests=ended)
        return PluginDisabled(name, error.to_wire(), refuses_new=True, switches=scheduler.switches)

    def _keep_off(self, scheduler: Scheduler, name: str, error: TokenbusError) -> PluginDisabled:
        """One that is off failed for requests that have it: those that need it end, and no other may have it."""
        self._lingering_failed.add(name)
        ended = self._end_users(scheduler, frozenset({name}), error)
        log.error("plugin_failed_after_it_went_off", plugin=name, hook=error.hook, error=error.message, ended_requests=ended)
        now = scheduler.switches
        scheduler.apply_switches(Switches(now.on, now.reasons | {name: _after_failure(error)}, now.failed | {name}))
        return PluginDisabled(name, error.to_wire(), refuses_new=False, switches=scheduler.switches)

    def _end_users(self, scheduler: Scheduler, names: frozenset[str], error: TokenbusError) -> int:
        """End the requests that can't do without one of these plugins; how many they were."""
        users = [
            request.request_id
            for request in scheduler.requests.values()
            if any(self._host.needs(request.features, request.fields, name) for name in names)
        ]
        for request_id in users:
            scheduler.fail(request_id, error.to_wire(), time.time())
        return len(users)

    def _switch_off(self, scheduler: Scheduler, name: str, error: TokenbusError) -> PluginDisabled:
        doomed = self._host.with_dependents(name, scheduler.switches.on)
        now = scheduler.switches
        reasons = now.reasons | dict.fromkeys(sorted(doomed), f"needs {name!r}, which failed") | {name: _after_failure(error)}
        log.error("plugin_switched_off", plugin=name, hook=error.hook, error=error.message, with_it=sorted(doomed - {name}))
        scheduler.apply_switches(Switches(now.on - doomed, reasons, now.failed | {name}), time.time())
        self._refusing -= doomed
        return PluginDisabled(name, error.to_wire(), refuses_new=False, switches=scheduler.switches)

    def _started(self, name: str) -> None:
        for impl in self._host.table(frozenset({name})).engine_started:
            impl(engine=self._context)

    def _stopped(self, name: str) -> None:
        for impl in self._host.table(frozenset({name})).engine_stopped:
            try:
                impl()
            except TokenbusError as error:
                log.exception("plugin_failed", plugin=name, hook="engine_stopped", error=error.message)


def _after_failure(error: TokenbusError) -> str:
    return plain_text(f"switched off after it failed: {error.message}")
