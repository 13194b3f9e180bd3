"""The front's side of switching: plugin instances of this process come and go as the engine's switches do.

host.load, front_started     when a plugin goes on (at start, and live)
front_stopped                when it goes off, and at the end; it is unloaded after its last open request
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from ..contexts import FrontContext
from ..errors import ConflictError, PluginLoadError, TokenbusError
from ..host import PluginHost

log = structlog.get_logger(__name__)


class FrontPlugins:
    def __init__(self, host: PluginHost, context: FrontContext) -> None:
        self._host = host
        self._context = context
        self._started: set[str] = set()

    def start(self, on: Iterable[str]) -> None:
        """At start. Raises PluginLoadError or ConfigError when one can't be loaded or started."""
        self._host.load(on)
        try:
            for name in sorted(on):
                self._start(name)
        except TokenbusError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error

    def prepare(self, on: frozenset[str]) -> None:
        """Get what goes on going, before the engine is asked. ConflictError when one can't; the caller then calls `settle` either way."""
        try:
            self._host.load(on)
            for name in sorted(on - self._started):
                self._start(name)
        except TokenbusError as error:
            raise ConflictError(f"can't be switched: {error.message}", plugin=error.plugin, hook=error.hook) from error

    def settle(self, on: frozenset[str], in_use: frozenset[str]) -> None:
        """Stop what isn't on, unload what isn't used by an open request either."""
        for name in sorted(self._started - on):
            self._stop(name)
        self._host.release_unused(on | in_use)

    def stop(self) -> None:
        """At the end."""
        for name in sorted(self._started):
            self._stop(name)

    def _start(self, name: str) -> None:
        for impl in self._host.table(frozenset({name})).front_started:
            impl(front=self._context)
        self._started.add(name)

    def _stop(self, name: str) -> None:
        self._started.discard(name)
        for impl in self._host.table(frozenset({name})).front_stopped:
            try:
                impl()
            except TokenbusError as error:
                log.exception("plugin_failed", plugin=name, hook="front_stopped", error=error.message)
