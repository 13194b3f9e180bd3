"""Switches that change while requests are open: who keeps what, and when a plugin is really gone.

A plugin is in one of three states here:

    on          among `switches.on`
    lingering   off, but an open request was admitted with it: loaded, its hooks called
    gone        `engine_stopped` called, unloaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import structlog

from ..errors import PluginError, TokenbusError, UnavailableError
from ..host import KERNEL_SLOTS, HookTable, PluginHost, Switches
from ..policy import FcfsPolicy, SchedulingPolicy
from ..request import AdmittedRequest, Request
from .batch import Batch

log = structlog.get_logger(__name__)


class LiveSwitches:
    def __init__(self, host: PluginHost, switches: Switches, batch: Batch, start_plugin: Callable[[str], object]) -> None:
        """start_plugin: loads one that is off and calls its `engine_started`; PluginLoadError when it can't be."""
        self.switches = switches
        self._start_plugin = start_plugin
        self._host = host
        self._batch = batch
        self._announcement: tuple[str, ...] | None = None
        self._settings: dict[str, dict[str, Any]] = {}
        self.engine_hooks: HookTable = host.table(switches.on)
        """Implementations of engine-wide hooks, those of lingering plugins included."""
        batch.pool.on_evict = self._on_evict
        self._take_slot(0.0)

    # ---- for intake -------------------------------------------------------------------------------------------------------------

    def kernels(self, features: frozenset[str]) -> str:
        return self._host.kernels(features)

    def table(self, features: frozenset[str], fields: Iterable[str]) -> HookTable:
        return self._host.table(features, fields)

    def features_of(self, admitted: AdmittedRequest) -> frozenset[str]:
        """The plugins a new request runs with, all loaded: those it was admitted with, less those that went off on its way here and may
        leave it (`PluginHost.leaving`: the rule for open requests), and with whoever now computes attention. UnavailableError when one
        that it can't leave can't be had."""
        features, on = frozenset(admitted.features), self.switches.on
        if features <= on:
            return features
        host = self._host
        for name in sorted(features - host.catalogue.keys()):
            raise UnavailableError(
                f"the engine has no plugin {name!r}", request_id=admitted.request_id, plugin=name, retry_after=1.0
            )
        features = self._with_present_kernels(features)
        features -= host.leaving(features, features - on, pinned=admitted.pinned, fields=admitted.fields)
        if admitted.resumed is None and (failed := features & self.switches.failed):
            raise UnavailableError(
                f"plugin {min(failed)!r} failed while the request was on its way",
                request_id=admitted.request_id, plugin=min(failed), retry_after=1.0,
            )  # fmt: skip
        if missing := features - host.loaded.keys():
            self._load_for(admitted.request_id, missing)
        return features

    def _with_present_kernels(self, features: frozenset[str]) -> frozenset[str]:
        """What holds a kernel slot works for everybody: another holder than at admission takes its predecessor's place."""
        host, on = self._host, self.switches.on
        gone = {name for name in features - on if host.info(name).slot in KERNEL_SLOTS}
        slots = {host.info(name).slot for name in gone}
        return (features - gone) | {name for name in on if host.info(name).slot in slots}

    def _load_for(self, request_id: str, names: frozenset[str]) -> None:
        """Load plugins that are off, for a request whose client or arm has them on, or that had them when they went off, or when an engine
        died. They linger until its end."""
        for name in sorted(names):
            try:
                self._start_plugin(name)
            except TokenbusError as error:
                self._batch.users_left = True  # those that were loaded before it have none
                raise UnavailableError(
                    f"plugin {name!r} is off and can't be started for this request: {error.message}",
                    request_id=request_id, plugin=name, hook=error.hook, retry_after=30.0,
                ) from error  # fmt: skip
            self._batch.lingering.add(name)
        self.engine_hooks = self._host.table(self.switches.on | self._batch.lingering)

    # ---- changing ---------------------------------------------------------------------------------------------------------------

    def apply(self, new: Switches, now: float) -> list[str]:
        old, self.switches = self.switches, new
        changed = old.on ^ new.on
        if not changed:
            return []
        self._batch.distrusted -= changed
        for request in tuple(self._batch.requests.values()):
            features = self._host.after_switch(request.features, old.on, new.on, pinned=request.pinned, fields=request.fields)
            if features != request.features:
                self._move(request, features, now)
        kernels = self._host.kernels(new.on)
        if kernels != self._host.kernels(old.on):
            self._recompute(kernels, now)
        if self._host.holder("scheduling", old.on) != self._host.holder("scheduling", new.on):
            self._take_slot(now)
        self.announce()
        return self._unload(now)

    def _move(self, request: Request, features: frozenset[str], now: float) -> None:
        """Give an open request other plugins; those that leave and those that join are told. One that raises ends the request."""
        before, left = request.features, request.hooks.request_removed
        request.features = features
        request.hooks = self._host.table(features, request.fields)
        calls = [impl for impl in left if impl.plugin not in features]
        calls += [impl for impl in request.hooks.request_added if impl.plugin not in before]
        try:
            for impl in calls:
                impl(request=request)
        except TokenbusError as error:
            self._batch.end(request, "error", now, error=error.to_wire())

    def _recompute(self, kernels: str, now: float) -> None:
        """Another kernel set from here on, although requests are open: the old one has failed. It may have kept K/V in an order that others
        can't read, so what is running is computed again, and nobody finds the old set's blocks."""
        for request in tuple(self._batch.running):
            self._batch.preempt(request, now)
        for request in self._batch.requests.values():
            request.kernels = kernels

    def _take_slot(self, now: float) -> None:
        """Give the waiting line the policy of whoever holds the slot."""
        owner = self._host.holder("scheduling", self.switches.on) or ""
        policy: SchedulingPolicy | None = None
        if owner:
            try:
                policy = self._host.table(frozenset({owner})).first("scheduling_policy")
            except TokenbusError as error:
                failure = (
                    error if isinstance(error, PluginError) else PluginError(str(error), plugin=owner, hook="scheduling_policy")
                )
                log.exception("scheduling_policy_failed", plugin=owner, error=failure.message)
                self._batch.line.swap(FcfsPolicy(), "", now)
                self._batch.tell_failure(owner, failure)
                return
        if policy is None:
            policy, owner = FcfsPolicy(), ""
        self._batch.line.swap(policy, owner, now)

    def release(self, now: float) -> None:
        """Unload lingering plugins whose last request has ended. Costs nothing while there are none."""
        if self._batch.users_left:
            self._unload(now)

    def _unload(self, now: float) -> list[str]:
        self._batch.users_left = False
        used = frozenset().union(*(request.features for request in self._batch.requests.values()))
        off = frozenset(self._host.loaded) - self.switches.on
        gone = off - used
        for name in sorted(gone):
            for impl in self._host.table(frozenset({name})).engine_stopped:
                self._batch.call_engine_wide(impl)
        self._batch.lingering = set(off & used)
        unloaded = self._host.release_unused(self.switches.on | used)
        self._batch.distrusted -= gone
        self.engine_hooks = self._host.table(self.switches.on | self._batch.lingering)
        return unloaded

    # ---- telling the worker -----------------------------------------------------------------------------------------------------

    def announce(self) -> None:
        """The next step tells the worker which switches are in force."""
        self._announcement = self.switches.names()

    def take_announcement(self) -> tuple[str, ...] | None:
        told, self._announcement = self._announcement, None
        return told

    def announce_settings(self, settings: Mapping[str, Mapping[str, Any]], *, again: bool = False) -> None:
        """The next step tells the worker these settings of plugins. again: they are older than what waits to be told."""
        told = {name: dict(values) for name, values in settings.items()}
        self._settings = told | self._settings if again else self._settings | told

    def take_settings(self) -> dict[str, dict[str, Any]]:
        told, self._settings = self._settings, {}
        return told

    def _on_evict(self, block: int) -> None:
        for impl in self.engine_hooks.block_evicted:
            self._batch.call_engine_wide(impl, block_id=block)
