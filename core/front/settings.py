"""The front's side of live settings: what is asked of the engine, what the present values are, and who is told.

begin ──> on its way ──> answered    adopted: `config`, the front's plugins and log level, SettingsChange on the bus
                    └──> refused     nothing has changed: ChangeRefused on the bus
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import structlog

from .. import live_settings, logs
from ..bus import Bus
from ..config import Config
from ..errors import TokenbusError
from ..host import PluginHost
from ..messages import SetSettings
from .events import ChangeRefused, SettingsChange

log = structlog.get_logger(__name__)


class LiveSettings:
    def __init__(self, config: Config, host: PluginHost, bus: Bus) -> None:
        self.config = config
        """With every live change so far: what the next engine starts with."""
        self._host = host
        self._bus = bus
        self._on_the_way: dict[int, tuple[dict[str, Any], str]] = {}
        """New values and who asked, by call id, in order."""

    @property
    def capacity(self) -> int:
        """Requests that may be open at once."""
        return self.config.scheduler.max_running + self.config.scheduler.max_waiting

    def begin(self, call_id: int, changes: Mapping[str, Any], who: str) -> SetSettings:
        """What to ask the engine. Raises what `live_settings.check` raises: refused then."""
        try:
            values = live_settings.check(self.config, self._host, changes)
        except TokenbusError as error:
            self._tell_refused(dict(changes), who, error)
            raise
        self._on_the_way[call_id] = values, who
        return SetSettings(call_id, values)

    def answered(self, call_id: int) -> None:
        """The engine has applied it, if it is one of these: so does this process."""
        if (change := self._on_the_way.pop(call_id, None)) is None:
            return
        values, who = change
        before = live_settings.live_values(self.config, self._host)
        self.config = live_settings.with_values(self.config, values)
        live_settings.apply_to_plugins(self.config, self._host, values)
        logs.set_level(self.config.server.log_level)
        log.info("settings_changed", values=values, who=who)
        self._bus.publish(SettingsChange({name: before[name] for name in values}, values, who, time.time()))

    def refused(self, call_id: int, error: TokenbusError) -> None:
        """It did not come about, if it is one of these."""
        if (change := self._on_the_way.pop(call_id, None)) is not None:
            self._tell_refused(change[0], change[1], error)

    def all_refused(self, error: TokenbusError) -> None:
        """The engine has ended."""
        for call_id in tuple(self._on_the_way):
            self.refused(call_id, error)

    def _tell_refused(self, asked: dict[str, Any], who: str, error: TokenbusError) -> None:
        self._bus.publish(ChangeRefused("settings", asked, error.message, who, time.time()))
