"""Switches that change while requests are open: who keeps what, and when a plugin is really gone.

A plugin is in one of three states here:

    on          among `switches.on`
    lingering   switched off, but an open request was admitted with it: loaded, its hooks still called
    gone        `engine_stopped` called, unloaded
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from ..errors import PluginError, TokenbusError, UnavailableError
from ..host import HookTable, PluginHost, Switches
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
        """The plugins a new request runs with: those it was admitted with, less those that went off on its way here and may leave it
        (`PluginHost.leaving`: the rule for open requests). UnavailableError when one that may not is gone."""
        features = frozenset(admitted.features)
        if features <= self.switches.on:
            return features
        host, off = self._host, features - self.switches.on
        known = off & host.catalogue.keys()
        leaves = host.leaving(features - (off - known), known, pinned=admitted.pinned, fields=admitted.fields)
        for name in sorted(off - leaves - host.loaded.keys()):
            raise UnavailableError(
                f"plugin {name!r} was switched off while the request was on its way; try again",
                request_id=admitted.request_id,
                plugin=name,
                retry_after=1.0,
            )
        return features - leaves

    def revive(self, features: Iterable[str]) -> None:
        """Load those of a resumed request's plugins that are off: the engine that died had kept them for it. Raises PluginLoadError."""
        missing = sorted((set(features) & self._host.catalogue.keys()) - self._host.loaded.keys())
        if not missing:
            return
        for name in missing:
            self._start_plugin(name)
        self._batch.lingering |= set(missing)
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

    def _on_evict(self, block: int) -> None:
        for impl in self.engine_hooks.block_evicted:
            self._batch.call_engine_wide(impl, block_id=block)
