"""What a plugin is: a class with an `info`, an optional settings type, and hook implementations from `core/hooks.py`.

    from tokenbus import PluginInfo, Plugin, hookimpl

    class Shout(Plugin):
        info = PluginInfo(name="shout", summary="upper-case answers", scope="request", lossless=False, claims={"shout"})

        @hookimpl
        def check_fields(self, fields, request): ...

It is found by an entry point in the group `tokenbus.plugins` whose name is `info.name`. One instance lives in each process (front,
engine, worker); the instances share nothing but their settings. A plugin keeps state about a request in `request.stash[key]`, with a
key of its own (`StashKey`), never as an attribute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import msgspec
import pluggy

PROJECT = "tokenbus"
ENTRY_POINT_GROUP = "tokenbus.plugins"
HOOK_API_VERSION = (1, 3)
"""(major, minor). A plugin made for another major version is refused; a newer minor version too."""

Scope = Literal["request", "step", "engine"]
Slot = Literal["attention", "scheduling", "quantization", "tool_calls"]
Role = Literal["front", "engine", "worker"]

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

T = TypeVar("T")


class PluginInfo:
    """What a plugin declares about itself. Immutable."""

    __slots__ = (
        "api_version", "claims", "conflicts", "default", "enforces", "live_settings", "lossless", "name", "requires", "resident",
        "resumable", "scope", "slot", "summary",
    )  # fmt: skip

    def __init__(
        self,
        *,
        name: str,
        summary: str,
        scope: Scope,
        lossless: bool,
        claims: Iterable[str] = (),
        requires: Iterable[str] = (),
        conflicts: Iterable[str] = (),
        enforces: bool = False,
        slot: Slot | None = None,
        default: bool = False,
        resumable: bool = True,
        resident: bool = False,
        live_settings: Iterable[str] = (),
        api_version: tuple[int, int] = HOOK_API_VERSION,
    ) -> None:
        """
        name: as in --enable, dotted for families ("speculative.ngram"). summary: one line for `tokenbus plugins`.
        scope: the finest at which it can be switched: "request" (may differ between requests of one batch), "step" (live, for all),
            "engine" (at start).
        lossless: never changes a token id or logprob; then a live switch applies to running requests too.
        claims: request fields it honours. A request that uses a field which no active plugin claims is refused.
        requires / conflicts: names of plugins that must / must not be on with it.
        enforces: it upholds a limit or a mask, so it is never switched off by a failure of its own.
        slot: exactly one plugin is active in a slot; swapping is atomic. default: on unless switched off.
        resumable: when an engine dies, `request_added` and `worker_request_added` of the next one can rebuild all that it knew of a
            request, from the request's tokens and fields. If not, requests that need it and have begun to answer end with an error.
        resident: it takes memory that is shared out at start (`side_model`). It can be switched only if it was on at start; while it is
            off, the worker's instance stays.
        live_settings: names of its `Settings` that can change while it is loaded: `self.settings` is then replaced between two steps, in
            front, engine and worker, so it must be read where it is used.
        """
        put = object.__setattr__
        put(self, "name", name)
        put(self, "summary", summary)
        put(self, "scope", scope)
        put(self, "lossless", lossless)
        put(self, "claims", frozenset(claims))
        put(self, "requires", frozenset(requires))
        put(self, "conflicts", frozenset(conflicts))
        put(self, "enforces", enforces)
        put(self, "slot", slot)
        put(self, "default", default)
        put(self, "resumable", resumable)
        put(self, "resident", resident)
        put(self, "live_settings", frozenset(live_settings))
        put(self, "api_version", tuple(api_version))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"PluginInfo is immutable ({name})")

    def __repr__(self) -> str:
        return f"PluginInfo({self.name!r}, scope={self.scope!r}, lossless={self.lossless})"


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a plugin that has none."""


class Plugin:
    """Base class of plugins. `settings` is an instance of `Settings`, decoded from `[plugins.NAME]` of the configuration."""

    info: ClassVar[PluginInfo]
    Settings: ClassVar[type[msgspec.Struct]] = NoSettings

    def __init__(self, settings: Any, role: Role) -> None:
        """Cheap: imports of heavy modules belong into the hooks that need them. `role` is the process it lives in."""
        self.settings = settings
        self.role: Role = role


class StashKey(Generic[T]):
    """A typed key for plugin state on a core object. Two keys are equal only if they are the same object."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"StashKey({self.name!r})"


class Stash:
    """Typed storage for plugins on a core object (after pytest's). Lives and dies with the object."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: dict[StashKey[Any], Any] | None = None

    def __setitem__(self, key: StashKey[T], value: T) -> None:
        if self._items is None:
            self._items = {}
        self._items[key] = value

    def __getitem__(self, key: StashKey[T]) -> T:
        if self._items is None:
            raise KeyError(key)
        return cast("T", self._items[key])

    def get(self, key: StashKey[T], default: T | None = None) -> T | None:
        return default if self._items is None else self._items.get(key, default)

    def __contains__(self, key: StashKey[T]) -> bool:
        return self._items is not None and key in self._items

    def pop(self, key: StashKey[T]) -> T | None:
        return None if self._items is None else self._items.pop(key, None)
