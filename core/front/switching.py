"""Keeps front and engine agreed on what is on: a change is prepared here, made by the engine, and adopted here as the engine says.

    set ──> prepare plugins here ──> SetFeatures ──> Reply: adopted, in the order of the wire, whether or not anybody still waits
                                                 └─> refused, or the engine is gone: forgotten, nothing has changed

The engine also switches off by itself what fails (PluginDisabled); what it can't switch off it refuses to serve.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import structlog

from ..bus import Bus
from ..errors import ConflictError, ErrorInfo, TokenbusError, UnavailableError
from ..host import PluginHost, Switches
from ..messages import PluginDisabled, Reply, SetFeatures
from ..request import AdmittedRequest
from .calls import Calls
from .events import FeatureChange
from .journal import Journal
from .plugins import FrontPlugins
from .recovery import Recovery

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """A switch change on its way to the engine and back. It counts whether or not whoever asked for it still waits."""

    changes: dict[str, bool]
    who: str
    target: Switches
    """What will be on if the engine agrees."""


class Switching:
    def __init__(
        self,
        switches: Switches,
        *,
        bus: Bus,
        host: PluginHost,
        plugins: FrontPlugins,
        journal: Journal,
        recovery: Recovery,
        calls: Calls,
    ) -> None:
        """switches: what is on at start."""
        self.switches = switches
        """What is on now, in the front and in the engine; survives a restart."""
        self.refusing: dict[str, ErrorInfo] = {}
        """Plugins that failed but enforce something or are in use: requests that need them are refused until they are switched off."""
        self._bus = bus
        self._host = host
        self._plugins = plugins
        self._journal = journal
        self._recovery = recovery
        self._calls = calls
        self._changes: dict[int, Change] = {}
        """On their way, by call id, in order."""

    async def set(self, changes: Mapping[str, bool], who: str) -> Switches:
        """As `EngineClient.set_features`."""
        expected = next((change.target for change in reversed(self._changes.values())), self.switches)
        target = self._host.change_switches(expected, changes)
        message = SetFeatures(self._calls.next_id(), dict(changes))
        self._changes[message.call_id] = Change(message.changes, who, target)
        try:
            self._plugins.prepare(target.on)
            call = self._calls.ask(message)
        except TokenbusError:
            self._forget(message.call_id)
            raise
        return await self._calls.answer(message.call_id, call)

    def replied(self, message: Reply) -> None:
        """The engine has answered; ignored when it was no change that was asked for."""
        if (change := self._changes.pop(message.call_id, None)) is None:
            return
        if message.switches is None:
            self.settle()
        else:
            self._adopt(message.switches, change.changes, change.who)

    def plugin_disabled(self, message: PluginDisabled) -> None:
        log.error("plugin_disabled", plugin=message.name, refuses_new=message.refuses_new, error=message.error.message)
        if message.refuses_new:
            self.refusing[message.name] = message.error
        off = dict.fromkeys(sorted(self.switches.on - message.switches.on), False)
        if off:
            self._adopt(message.switches, off, f"engine: {message.error.kind}")

    def engine_gone(self) -> None:
        """What it has not agreed to is not made."""
        for call_id in tuple(self._changes):
            self._forget(call_id)

    def check_serves(self, requests: Iterable[AdmittedRequest]) -> None:
        """UnavailableError when one of them needs a plugin that has failed."""
        for request in requests:
            for name, error in self.refusing.items():
                needed = self._host.with_dependents(name, self.switches.on)
                if any(self._host.needs(request.features, request.fields, other) for other in needed):
                    raise UnavailableError(
                        f"plugin {name!r} has failed, and this request needs it: {error.message}",
                        plugin=name, hook=error.hook, retry_after=30.0,
                    )  # fmt: skip

    def requests_ended(self) -> None:
        """Plugins that are off may have had their last request."""
        if len(self._host.loaded) > len(self.switches.on):
            self.settle()

    def settle(self) -> None:
        """Keep what is on, and what will be if the engine agrees to the changes that are on their way."""
        on = self.switches.on.union(*(change.target.on for change in self._changes.values()))
        self._plugins.settle(on, self._journal.features_in_use())

    def _forget(self, call_id: int) -> None:
        """It has been refused, or the engine is gone."""
        if self._changes.pop(call_id, None) is not None:
            self.settle()

    def _adopt(self, state: Switches, changes: dict[str, bool], who: str) -> None:
        """What the engine says is on. The one place where `switches` changes, called in the order of the wire."""
        self._recovery.switched(self.switches.on, state.on)
        self.switches = state
        for name in tuple(self.refusing):
            if name not in state.on:
                del self.refusing[name]
        try:
            self._plugins.prepare(state.on)
        except ConflictError as error:
            # it was prepared when the change was asked for: nothing but a plugin's own whim leads here
            log.exception("plugin_failed", plugin=error.plugin, hook=error.hook, error=error.message)
        self.settle()
        log.info("features_changed", changes=changes, on=state.names(), who=who)
        self._bus.publish(FeatureChange(changes, state, who, time.time()))
