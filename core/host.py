"""The plugin host: finds plugins, decides which are on, and resolves hooks to plain callables. One in each process.

catalogue   every plugin that could be found, as classes            (discover)
Switches    which of them are on, and why the others are off        (start_switches, change_switches: pure functions)
loaded      instances of those on, or still in use by a request     (load, release_unused)
HookTable   for one set of features: hook name -> implementations   (table: cached, looked up when sets change, not in steps)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec
import pluggy
import structlog

from . import hooks
from .device import DeviceKind, device_kind
from .errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    OverloadedError,
    PluginError,
    PluginLoadError,
    RequestError,
    UnavailableError,
    shorten,
)
from .hook_answers import CHECKS
from .plugin import ENTRY_POINT_GROUP, HOOK_API_VERSION, PROJECT, Plugin, PluginInfo, Role

log = structlog.get_logger(__name__)

HOOK_NAMES: tuple[str, ...] = tuple(
    name for name, spec in vars(hooks).items() if callable(spec) and hasattr(spec, f"{PROJECT}_spec")
)
"""Every hook, in the order of the manual."""

ALL_ITS_REQUESTS = frozenset({"request_added", "match_prefix", "limit_chunk", "blocks_filled", "request_removed"})
"""Per-request hooks that are called whether or not the request uses a claimed field."""

MAY_BLOCK = frozenset({"prepare_fields", "prepare_media"})
"""Hooks that are called on a pool thread; they may also say that the client should come again."""
MOST_REASON = 2000
"""Characters of a plugin's exception that an error repeats: it may hold what a client sent."""

KERNEL_SLOTS = ("attention", "quantization")
SHARED_SLOTS = (*KERNEL_SLOTS, "scheduling")
"""What holds these works for all requests of an engine, whatever the plugin's scope is."""
MAX_TABLES = 1024
"""Cached hook tables; clients choose which fields they use, so the cache must not grow without bound."""


class Impl:
    """One plugin's implementation of one hook. Call it with keyword arguments."""

    __slots__ = ("_call", "_check", "hook", "info", "plugin")

    def __init__(self, hook: str, info: PluginInfo, call: Callable[..., Any]) -> None:
        self.hook = hook
        self.info = info
        self.plugin = info.name
        self._call = call
        self._check = CHECKS.get(hook)

    def __call__(self, **arguments: Any) -> Any:
        """The implementation's answer, of the kind the hook asks for, or None. Raises RequestError as raised (where the hook may block,
        OverloadedError and UnavailableError too); anything else, and an answer that is none, as PluginError naming plugin and hook."""
        try:
            answer = self._call(**arguments)
            if answer is None or self._check is None or (problem := self._check(answer, arguments, self.info)) is None:
                return answer
        except (RequestError, OverloadedError, UnavailableError) as error:
            if not isinstance(error, RequestError) and self.hook not in MAY_BLOCK:
                raise self.failure(f"{type(error).__name__}: {error.message}") from error
            error.plugin, error.hook = self.plugin, self.hook
            raise
        except Exception as error:
            raise self.failure(f"{type(error).__name__}: {shorten(error, MOST_REASON)}") from error
        raise self.failure(problem)

    def failure(self, reason: str) -> PluginError:
        """The error that says what this implementation, or something it gave, did wrong."""
        return PluginError(f"plugin {self.plugin!r} failed in {self.hook}: {reason}", plugin=self.plugin, hook=self.hook)

    def __repr__(self) -> str:
        return f"Impl({self.plugin}.{self.hook})"


class HookTable:
    """For one set of features: each hook's implementations in call order, as attributes named like the hooks."""

    __slots__ = HOOK_NAMES

    def __init__(self, impls: Mapping[str, tuple[Impl, ...]]) -> None:
        for name in HOOK_NAMES:
            setattr(self, name, impls.get(name, ()))

    def __getattr__(self, name: str) -> tuple[Impl, ...]:  # for type checkers: slots are filled in __init__
        raise AttributeError(name)

    def first(self, hook: str, **arguments: Any) -> Any:
        """The first answer that is not None; None when nobody has one."""
        for impl in getattr(self, hook):
            answer = impl(**arguments)
            if answer is not None:
                return answer
        return None


class Switches(msgspec.Struct, frozen=True):
    """Which plugins are on, after all rewrites; and why a plugin that was asked for, or is on by default, is off."""

    on: frozenset[str]
    reasons: dict[str, str] = {}
    failed: frozenset[str] = frozenset()
    """Those that are off because they failed: no request may bring them back, only whoever switches them on."""

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self.on))


class PluginHost:
    def __init__(self, role: Role, settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.role: Role = role
        self.catalogue: dict[str, type[Plugin]] = {}
        self.sources: dict[str, str] = {}
        self.broken: dict[str, PluginLoadError] = {}
        self.loaded: dict[str, Plugin] = {}
        self.at_start: tuple[tuple[str, ...], tuple[str, ...]] = (), ()
        """What the configuration enables and disables."""
        self.device: DeviceKind = "cpu"
        """Where the model runs."""
        self._settings = {name: dict(values) for name, values in (settings or {}).items()}
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hooks)
        self._tables: dict[tuple[frozenset[str], frozenset[str] | None], HookTable] = {}

    # ---- finding ----------------------------------------------------------------------------------------------------------------

    def discover(self, extra: Iterable[str] = ()) -> None:
        """Fill the catalogue from entry points and from "module:Class" strings. A plugin that can't be imported is kept in `broken`:
        it is an error only for those who want it on."""
        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
            source = point.dist.name if point.dist else "?"
            self._try_add(point.name, source, point.load)
        for path in extra:
            self._try_add(None, path, lambda path=path: _import_path(path))

    def _try_add(self, name: str | None, source: str, load: Callable[[], Any]) -> None:
        try:
            self.add(load(), source=source, name=name)
        except PluginLoadError as error:
            if name is None:
                raise
            self.broken[name] = error
        except Exception as error:
            problem = PluginLoadError(
                f"plugin {name or source!r} ({source}) can't be imported: {type(error).__name__}: {error}"
            )
            if name is None:
                raise problem from error
            self.broken[name] = problem

    def add(self, cls: type[Plugin], *, source: str = "", name: str | None = None) -> None:
        """Put one plugin class into the catalogue; PluginLoadError when it can't be a plugin of this version."""
        where = f"plugin {name or getattr(cls, '__name__', cls)!r}" + (f" ({source})" if source else "")
        info = getattr(cls, "info", None)
        if not (isinstance(cls, type) and issubclass(cls, Plugin) and isinstance(info, PluginInfo)):
            raise PluginLoadError(f"{where} is not a subclass of tokenbus.Plugin with a PluginInfo in `info`")
        if name is not None and name != info.name:
            raise PluginLoadError(f"{where}: its entry point is called {name!r}, its info says {info.name!r}")
        ours, theirs = HOOK_API_VERSION, info.api_version
        if theirs[0] != ours[0] or theirs[1] > ours[1]:
            raise PluginLoadError(
                f"{where} is made for hook API {theirs[0]}.{theirs[1]}; this Tokenbus has hook API {ours[0]}.{ours[1]}"
            )
        if info.name in self.catalogue and self.catalogue[info.name] is not cls:
            raise PluginLoadError(f"two plugins are called {info.name!r}: from {self.sources[info.name]!r} and from {source!r}")
        self.catalogue[info.name] = cls
        self.sources[info.name] = source

    def info(self, name: str) -> PluginInfo:
        return self.catalogue[name].info

    def known(self, name: str) -> None:
        """Raise unless `name` can be switched: NotFoundError with the closest names, or why it is broken."""
        if name in self.catalogue:
            return
        if name in self.broken:
            raise NotFoundError(str(self.broken[name]))
        close = difflib.get_close_matches(name, self.catalogue, n=3)
        hint = (
            f"; did you mean {', '.join(map(repr, close))}?" if close else f"; there are: {', '.join(sorted(self.catalogue))}"
        )
        raise NotFoundError(f"no plugin is called {name!r}{hint}")

    def claimers(self, field: str) -> list[str]:
        """Names of all plugins, on or off, that claim a request field."""
        return sorted(name for name, cls in self.catalogue.items() if field in cls.info.claims)

    # ---- switching (pure) -------------------------------------------------------------------------------------------------------

    def start_switches(self, enable: Iterable[str] = (), disable: Iterable[str] = ()) -> Switches:
        """What is on at start: the defaults, plus `enable`, less `disable`. A default gives way to what was asked for and goes off
        with a reason; two wishes that can't both be met are a ConfigError."""
        wanted, unwanted = list(dict.fromkeys(enable)), set(disable)
        for name in (*wanted, *unwanted):
            try:
                self.known(name)
            except NotFoundError as error:
                raise ConfigError(error.message) from None
        if both := unwanted.intersection(wanted):
            raise ConfigError(f"both enabled and disabled: {', '.join(sorted(both))}")
        reasons: dict[str, str] = dict.fromkeys(sorted(unwanted), "switched off at start")
        on: list[str] = []
        for name in wanted:
            if reason := self.obstacle(name, on):
                raise ConfigError(f"can't enable {name!r}: {reason}")
            on.append(name)
        for name in sorted(self.catalogue):
            if self.info(name).default and name not in unwanted and name not in on:
                if reason := self.obstacle(name, on):
                    reasons[name] = reason
                else:
                    on.append(name)
        while missing := [(n, r) for n in on for r in sorted(self.info(n).requires) if r not in on]:
            name, needed = missing[0]
            if name in wanted:
                raise ConfigError(f"can't enable {name!r}: it needs {needed!r}, which is off (--enable {needed})")
            on.remove(name)
            reasons[name] = f"needs {needed!r}, which is off"
        return Switches(frozenset(on), reasons)

    def change_switches(self, now: Switches, changes: Mapping[str, bool]) -> Switches:
        """`now` with live changes, all or none. NotFoundError for an unknown name, ConflictError with the reason when refused."""
        on = set(now.on)
        reasons = dict(now.reasons)
        for name, wish in changes.items():
            self.known(name)
            info = self.info(name)
            if info.scope == "engine" and wish != (name in on):
                raise ConflictError(
                    f"{name!r} is chosen at start (scope engine): restart with --{'enable' if wish else 'disable'} {name}"
                )
            if wish:
                if (reason := self.no_memory(name, now.on)) is not None:
                    raise ConflictError(f"{name!r} {reason}")
                on.add(name)
                reasons.pop(name, None)
            elif name in on:
                on.discard(name)
                reasons[name] = "switched off live"
        for name in [n for n, wish in changes.items() if wish]:
            if (slot := self.info(name).slot) is None:
                continue
            for other in sorted(on - {name}):
                if self.info(other).slot == slot:
                    if changes.get(other):
                        raise ConflictError(f"{name!r} and {other!r} both want the slot {slot!r}")
                    on.discard(other)
                    reasons[other] = f"its slot {slot!r} is held by {name!r}"
        for name in sorted(on):
            for needed in sorted(self.info(name).requires - on):
                raise ConflictError(f"{name!r} needs {needed!r}: switch both, or {name!r} first")
            if reason := self.obstacle(name, sorted(on - {name})):
                raise ConflictError(f"{name!r} can't be on: {reason}")
        return Switches(frozenset(on), reasons, now.failed - {name for name, wish in changes.items() if wish})

    def obstacle(self, name: str, on: Iterable[str]) -> str | None:
        """Why a plugin can't be on beside these others, or with a model where it is: a device that it doesn't work with, a conflict, or a
        slot that one of them holds."""
        info = self.info(name)
        if self.device not in info.devices:
            return f"it works on {' and '.join(sorted(info.devices))}, and the model is on {self.device}"
        for other in on:
            theirs = self.info(other)
            if other in info.conflicts or name in theirs.conflicts:
                return f"it conflicts with {other!r}"
            if info.slot is not None and theirs.slot == info.slot:
                return f"its slot {info.slot!r} is held by {other!r}"
        return None

    def residents(self, on: Iterable[str] = ()) -> frozenset[str]:
        """Plugins that keep memory which was shared out at start, of `on` and of those that the configuration has on."""
        return frozenset(n for n in {*self.start_switches(*self.at_start).on, *on} if self.info(n).resident)

    def no_memory(self, name: str, on: Iterable[str]) -> str | None:
        """Why a plugin that is off can't come now, if that is because it keeps memory."""
        if not self.info(name).resident or name in self.residents(on):
            return None
        return f"takes memory that is shared out at start: restart with --enable {name}"

    def kernels(self, on: Iterable[str]) -> str:
        """What decides the bits of K/V: the lossy holders of the slot "attention", and the lossy plugins of scope "engine", which are part
        of the model ("": core's own kernels)."""
        lossy = (self.info(name) for name in on if not self.lossless(name))
        return " ".join(sorted(info.name for info in lossy if info.slot in KERNEL_SLOTS or info.scope == "engine"))

    def lossless(self, name: str) -> bool:
        """Whether a plugin changes no bit of an answer here. Attention kernels say so of themselves beside core's on the CPU; on a GPU
        core's are Triton's, and any others another set."""
        info = self.info(name)
        return info.lossless and not (info.slot == "attention" and self.device != "cpu")

    def holder(self, slot: str, on: Iterable[str]) -> str | None:
        """The plugin that is active in a slot; None: core's default."""
        return next((name for name in sorted(on) if self.info(name).slot == slot), None)

    def with_dependents(self, name: str, on: frozenset[str]) -> frozenset[str]:
        """A plugin and all of `on` that can't be on without it."""
        found = {name}
        while more := {other for other in on - found if self.info(other).requires & found}:
            found |= more
        return frozenset(found)

    def needs(self, features: Iterable[str], fields: Iterable[str], name: str) -> bool:
        """Whether a request can't do without a plugin in force for it: it uses a field that the plugin claims; or the plugin claims none,
        and enforces something or is part of the engine."""
        info = self.info(name)
        if name not in features:
            return False
        return not info.claims.isdisjoint(fields) if info.claims else info.enforces or info.scope == "engine"

    # ---- open requests ----------------------------------------------------------------------------------------------------------

    def leaving(
        self, features: frozenset[str], gone: frozenset[str], *, pinned: Iterable[str], fields: Iterable[str]
    ) -> frozenset[str]:
        """Which of the plugins that went off leave a request: lossless ones, unless the client pinned them, the request uses a field that
        they honour, or one that stays requires them. The others stay for as long as the request is open."""
        off = (features & gone).difference(pinned)
        leaves = {name for name in off if self.lossless(name) and self.info(name).claims.isdisjoint(fields)}
        while needed := {other for name in features - leaves for other in self.info(name).requires & leaves}:
            leaves -= needed
        return frozenset(leaves)

    def after_switch(
        self, features: frozenset[str], old: Iterable[str], new: Iterable[str], *, pinned: Iterable[str], fields: Iterable[str]
    ) -> frozenset[str]:
        """The plugins of an open request once `old` became `new`; engine and worker apply this same rule. See `leaving`; lossless ones that
        went on join, unless the client pinned them, or the request lacks what they require or has what they conflict with."""
        was_on, now_on = frozenset(old), frozenset(new)
        staying = features - self.leaving(features, was_on - now_on, pinned=pinned, fields=fields)
        joining = {name for name in (now_on - was_on - staying).difference(pinned) if self.lossless(name)}
        while unfit := {name for name in joining if not self._fits(name, staying | joining)}:
            joining -= unfit
        return staying | joining

    def _fits(self, name: str, others: frozenset[str] | set[str]) -> bool:
        conflicts = self.info(name).conflicts
        return self.info(name).requires <= others and not any(o in conflicts or name in self.info(o).conflicts for o in others)

    # ---- loading ----------------------------------------------------------------------------------------------------------------

    def load(self, names: Iterable[str]) -> list[str]:
        """Make instances of those not loaded yet; returns their names. All or none: PluginLoadError leaves everything as it was."""
        fresh: list[str] = []
        try:
            for name in sorted(set(names) - self.loaded.keys()):
                self._load_one(name)
                fresh.append(name)
        except Exception:
            for name in fresh:
                self._unload_one(name)
            raise
        self._tables.clear()
        return fresh

    def _load_one(self, name: str) -> None:
        cls = self.catalogue[name]
        try:
            settings = msgspec.convert(self._settings.get(name, {}), cls.Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"[plugins.{name}]: {error}", plugin=name) from None
        try:
            plugin = cls(settings, self.role)
        except Exception as error:
            raise PluginLoadError(f"plugin {name!r} can't be started: {type(error).__name__}: {error}", plugin=name) from error
        _refuse_what_cant_be_called(plugin, name)
        try:
            self._manager.register(plugin, name=name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.has_plugin(name):
                self._manager.unregister(name=name)
            raise PluginLoadError(f"plugin {name!r}: {error}", plugin=name) from None
        self.loaded[name] = plugin

    def _unload_one(self, name: str) -> None:
        self._manager.unregister(name=name)
        del self.loaded[name]

    def release_unused(self, in_use: Iterable[str]) -> list[str]:
        """Unload all that nobody uses; returns their names."""
        gone = sorted(self.loaded.keys() - set(in_use))
        for name in gone:
            self._unload_one(name)
        if gone:
            self._tables.clear()
        return gone

    def set_settings(self, name: str, values: Mapping[str, Any], settings: Any) -> None:
        """Have a plugin, loaded now or later, use other settings: as written, and as its `Settings`."""
        self._settings[name] = dict(values)
        if name in self.loaded:
            self.loaded[name].settings = settings

    def check_settings(self) -> None:
        """ConfigError when settings are given for a plugin that does not exist."""
        for name in self._settings:
            if name not in self.catalogue:
                raise ConfigError(f"[plugins.{name}]: no plugin is called {name!r}")

    # ---- resolving --------------------------------------------------------------------------------------------------------------

    def table(self, features: frozenset[str], fields: Iterable[str] | None = None) -> HookTable:
        """Implementations for one set of (loaded) features; with `fields`, for a request that uses these claimed fields."""
        key = (features, None if fields is None else frozenset(fields))
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) >= MAX_TABLES:
                self._tables.clear()
            table = self._tables[key] = HookTable({hook: self._resolve(hook, *key) for hook in HOOK_NAMES})
        return table

    def _resolve(self, hook: str, features: frozenset[str], fields: frozenset[str] | None) -> tuple[Impl, ...]:
        caller = getattr(self._manager.hook, hook)
        impls = []
        for impl in sorted(caller.get_hookimpls(), key=lambda i: (not i.tryfirst, i.trylast, i.plugin_name)):
            info = type(impl.plugin).info
            if info.name not in features:
                continue
            if fields is not None and info.claims and not (info.claims & fields) and hook not in ALL_ITS_REQUESTS:
                continue
            impls.append(Impl(hook, info, _accepting(impl.function, impl.argnames, caller.spec.argnames)))
        return tuple(impls)


def _accepting(function: Callable[..., Any], takes: Iterable[str], given: Iterable[str]) -> Callable[..., Any]:
    names = tuple(takes)
    if set(names) == set(given):
        return function
    return lambda **arguments: function(**{name: arguments[name] for name in names})


def _refuse_what_cant_be_called(plugin: Plugin, name: str) -> None:
    for _, method in inspect.getmembers(plugin, callable):
        options = getattr(method, f"{PROJECT}_impl", None)
        if not options:
            continue
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginLoadError(f"plugin {name!r}: hook wrappers are not supported ({method.__name__})", plugin=name)
        if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
            raise PluginLoadError(f"plugin {name!r}: {method.__name__} must be a plain function, as every hook", plugin=name)


def _import_path(path: str) -> Any:
    module, _, attribute = path.partition(":")
    if not attribute:
        raise PluginLoadError(f"{path!r} is not of the form module:Class")
    return getattr(importlib.import_module(module), attribute)


def make_host(
    role: Role, config: Any, plugins: Iterable[type[Plugin]] = (), kind: Callable[..., PluginHost] = PluginHost
) -> PluginHost:
    """A host with its catalogue filled as `config` says. Nothing is loaded yet. plugins: known beside those found. kind: makes the host."""
    host = kind(role, config.plugins)
    host.discover(config.features.load)
    host.at_start = config.features.enable, config.features.disable
    host.device = device_kind(config.model.device)
    for plugin in plugins:
        host.add(plugin)
    host.check_settings()
    return host
