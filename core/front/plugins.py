"""The front's side of switching: plugin instances of this process come and go as the engine's switches do.

host.load, front_started     when a plugin goes on (at start, and live), or a request has it while it is off (`Hold.load`)
front_stopped                when it goes off or, if it wasn't on, after the last such request; and at the end. Not while a request is
                             being admitted with it. It is unloaded after its last open request

A request is in use of plugins from its admission on, before the journal knows it: a `Hold` keeps them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

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
        self._demanded: set[str] = set()
        """Started for requests while they were off."""
        self._holds: dict[Hold, frozenset[str]] = {}

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

    def demand(self, name: str) -> None:
        """Get a plugin that is off going for a request. PluginLoadError when it can't be; then nothing has changed."""
        if name in self._started and name in self._host.loaded:
            return
        fresh = name not in self._host.loaded
        try:
            self._host.load((name,))
            self._start(name)
        except TokenbusError as error:
            if fresh:
                self._host.release_unused(self._host.loaded.keys() - {name})
            raise PluginLoadError(error.message, plugin=name, hook=error.hook) from error
        self._demanded.add(name)

    def settle(self, on: frozenset[str], in_use: frozenset[str]) -> None:
        """Stop what isn't on, unless it was started for requests that have it still; unload what isn't used by an open request either."""
        held = frozenset().union(*self._holds.values())
        in_use |= held
        self._demanded &= in_use
        for name in sorted(self._started - on - self._demanded - held):
            self._stop(name)
        self._host.release_unused(on | in_use)

    def hold(self, released: Callable[[], None]) -> Hold:
        """released: called after it; `settle` then has to be called when more is loaded than on."""
        return Hold(self, self._holds, released)

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


class Hold:
    """A context manager: what is loaded through it stays loaded until it ends."""

    def __init__(self, plugins: FrontPlugins, holds: dict[Hold, frozenset[str]], released: Callable[[], None]) -> None:
        self._plugins = plugins
        self._holds = holds
        self._released = released

    def load(self, features: frozenset[str], on: frozenset[str]) -> None:
        """Hold all of these, and get those going that aren't on. PluginLoadError, naming the plugin, when one can't be."""
        self._holds[self] = features
        for name in sorted(features - on):
            self._plugins.demand(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._holds.pop(self, None) is not None:
            self._released()
