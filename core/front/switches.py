"""The front's side of switching: what is on, what the engine was asked to change, and who is told.

begin ──> on its way ──> answered    adopted: `now`, the front's plugins, open requests, FeatureChange on the bus
                    └──> refused     nothing has changed: ChangeRefused on the bus
disabled                             the engine itself switched a plugin off, because it failed
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import structlog

from ..bus import Bus
from ..contexts import FrontContext
from ..errors import ConflictError, ErrorInfo, TokenbusError, UnavailableError
from ..host import PluginHost, Switches
from ..messages import PluginDisabled, SetFeatures
from ..request import AdmittedRequest
from .calls import Change
from .events import ChangeRefused, FeatureChange
from .journal import Journal
from .plugins import FrontPlugins, Hold
from .recovery import Recovery

log = structlog.get_logger(__name__)


class FrontSwitches:
    def __init__(
        self, now: Switches, host: PluginHost, context: FrontContext, journal: Journal, recovery: Recovery, bus: Bus
    ) -> None:
        self.now = now
        """What is on, in the front and in the engine; survives a restart."""
        self.refusing: dict[str, ErrorInfo] = {}
        """Plugins that failed but enforce something or are in use: requests that need them are refused until they are switched off."""
        self._host = host
        self._journal = journal
        self._recovery = recovery
        self._bus = bus
        self._plugins = FrontPlugins(host, context)
        self._on_the_way: dict[int, Change] = {}
        """By call id, in order."""

    # ---- plugins of this process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """At start. Raises PluginLoadError or ConfigError when a plugin can't be loaded or started."""
        self._plugins.start(self.now.on)

    def stop(self) -> None:
        """At the end."""
        self._plugins.stop()

    def hold(self) -> Hold:
        """What keeps a request's plugins loaded until the journal knows it."""
        return self._plugins.hold(self.release)

    def release(self) -> None:
        """Requests have ended: unload what only they used. Costs nothing while no more is loaded than on."""
        if len(self._host.loaded) > len(self.now.on):
            self._settle()

    def _settle(self) -> None:
        """Keep what is on, and what will be if the engine agrees to the changes that are on their way."""
        on = self.now.on.union(*(change.target.on for change in self._on_the_way.values()))
        self._plugins.settle(on, self._journal.features_in_use())

    # ---- requests ---------------------------------------------------------------------------------------------------------------

    def refuse_if_failed(self, requests: Iterable[AdmittedRequest]) -> None:
        """UnavailableError when one of them needs a plugin that has failed and can't be switched off."""
        for request in requests:
            for name, error in self.refusing.items():
                needed = self._host.with_dependents(name, self.now.on)
                if any(self._host.needs(request.features, request.fields, other) for other in needed):
                    raise UnavailableError(
                        f"plugin {name!r} has failed, and this request needs it: {error.message}",
                        plugin=name, hook=error.hook, retry_after=30.0,
                    )  # fmt: skip

    # ---- changes ----------------------------------------------------------------------------------------------------------------

    def begin(self, call_id: int, changes: Mapping[str, bool], who: str) -> SetFeatures:
        """What to ask the engine; this process's plugins are going already. Raises what `PluginHost.change_switches` and
        `FrontPlugins.prepare` raise: refused then."""
        expected = next((change.target for change in reversed(self._on_the_way.values())), self.now)
        try:
            target = self._host.change_switches(expected, changes)
        except TokenbusError as error:
            self._tell_refused(changes, who, error)
            raise
        self._on_the_way[call_id] = Change(dict(changes), who, target)
        try:
            self._plugins.prepare(target.on)
        except TokenbusError as error:
            self.refused(call_id, error)
            raise
        return SetFeatures(call_id, dict(changes))

    def answered(self, call_id: int, state: Switches) -> None:
        """The engine has applied it. Counts whether or not whoever asked for it still waits."""
        if (change := self._on_the_way.pop(call_id, None)) is not None:
            self._adopt(state, change.changes, change.who)

    def refused(self, call_id: int, error: TokenbusError) -> None:
        """It did not come about, if it is one of these."""
        if (change := self._on_the_way.pop(call_id, None)) is not None:
            self._settle()
            self._tell_refused(change.changes, change.who, error)

    def all_refused(self, error: TokenbusError) -> None:
        """The engine has ended."""
        for call_id in tuple(self._on_the_way):
            self.refused(call_id, error)

    def disabled(self, message: PluginDisabled) -> None:
        log.error("plugin_disabled", plugin=message.name, refuses_new=message.refuses_new, error=message.error.message)
        if message.refuses_new:
            self.refusing[message.name] = message.error
        if message.switches != self.now:
            off = dict.fromkeys(sorted(self.now.on - message.switches.on), False)
            self._adopt(message.switches, off or {message.name: False}, f"engine: plugin {message.name!r} failed")

    def _adopt(self, state: Switches, changes: dict[str, bool], who: str) -> None:
        """What the engine says is on. The one place where `now` changes, called in the order of the wire."""
        before, self.now = self.now, state
        self._recovery.switched(before.on, state.on)
        for name in self.refusing.keys() - state.on:
            del self.refusing[name]
        try:
            self._plugins.prepare(state.on)
        except (
            ConflictError
        ) as error:  # it was prepared when the change was asked for: nothing but a plugin's own whim leads here
            log.exception("plugin_failed", plugin=error.plugin, hook=error.hook, error=error.message)
        self._settle()
        log.info("features_changed", changes=changes, on=state.names(), who=who)
        self._bus.publish(FeatureChange(changes, state, who, time.time(), before))

    def _tell_refused(self, changes: Mapping[str, bool], who: str, error: TokenbusError) -> None:
        log.info("features_refused", changes=dict(changes), who=who, reason=error.message)
        self._bus.publish(ChangeRefused("features", dict(changes), error.message, who, time.time()))
