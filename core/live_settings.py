"""Settings that can change while the server runs: which they are, what values they take, and what a change makes of the configuration.

A setting is called by its place: "scheduler.token_budget", "plugins.chunked_prefill.slow_down". How it applies:

    live        between two steps, all of a change or none; it outlives an engine's restart, not the server's
    restart     `tokenbus serve` again, with the flag

Live are those of `LIVE`, and those that a plugin lists in `PluginInfo.live_settings`. Pure functions: front and engine both use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .config import Config
from .errors import ConflictError, FieldError, NotFoundError
from .host import PluginHost

LIVE: dict[str, str] = {
    "scheduler.token_budget": "from the next step on; decodes that are running go on, also when they are more than that",
    "scheduler.encoder_budget": "from the next step on",
    "scheduler.encoder_slice_ms": "from the next step on",
    "scheduler.max_running": "requests that run go on; no other joins while they are as many or more",
    "scheduler.max_waiting": "requests that wait go on waiting; no other is taken while they are as many or more",
    "server.log_level": "in the front and in the engine process",
}
"""Core's, and what a change means for what is there already."""
SECRET = ("key", "secret", "password", "token")
"""What names of settings end with whose values are shown only as set or not."""
MOST_OPEN = 65_536
"""Requests that may be open at once after a live change: the way to the engine is sized for them."""


class Setting(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One setting as it is shown."""

    value: Any
    default: Any
    schema: dict[str, Any]
    """Its type and bounds, as a JSON schema."""
    applies: str
    """live or restart."""
    note: str | None = None
    """What a live change means for what is there already."""


def all_settings(config: Config, host: PluginHost) -> dict[str, Setting]:
    """Every setting by name, with the values of `config` (the present ones)."""
    return {name: _describe(host, name, field, value) for name, field, value in _walk(config, host)}


def live_values(config: Config, host: PluginHost) -> dict[str, Any]:
    """The present values of those that can change live."""
    return {name: value for name, _, value in _walk(config, host) if _is_live(host, name)}


def check(config: Config, host: PluginHost, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The new values, of the right types. NotFoundError for a name that is none, ConflictError for a setting that needs a restart,
    FieldError (naming "settings.NAME") for a value that it can't have."""
    names = [name for name, _, _ in _walk(config, host)]
    for name in changes:
        if name in names and not _is_live(host, name):
            live = ", ".join(other for other in names if _is_live(host, other))
            raise ConflictError(f"{name!r} can't change live: restart the server with it. Those that can: {live}")
    values = typed(config, host, changes)
    scheduler = with_values(config, values).scheduler
    if values and scheduler.max_running + scheduler.max_waiting > max(
        MOST_OPEN, config.scheduler.max_running + config.scheduler.max_waiting
    ):
        raise ConflictError(f"max_running and max_waiting together can't be raised above {MOST_OPEN} live: restart the server")
    return values


def typed(config: Config, host: PluginHost, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The new values, of the right types, live or not. Raises NotFoundError and FieldError as `check` does."""
    fields = {name: field for name, field, _ in _walk(config, host)}
    values: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=3)
            hint = f"; did you mean {', '.join(map(repr, close))}?" if close else "; GET /v1/tokenbus/settings lists them"
            raise NotFoundError(f"there is no setting {name!r}{hint}")
        try:
            values[name] = msgspec.convert(value, fields[name].type, strict=True)
        except msgspec.ValidationError as error:
            raise FieldError(f"settings.{name}", str(error)[0].lower() + str(error)[1:]) from None
    try:
        _plugin_settings(with_values(config, values), host, values)
    except msgspec.ValidationError as error:
        raise FieldError("settings", str(error)) from None
    return values


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with checked values in place."""
    plugins = {name: dict(settings) for name, settings in config.plugins.items()}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, rest = name.partition(".")
        if section == "plugins":
            plugin, _, field = rest.rpartition(".")
            plugins.setdefault(plugin, {})[field] = value
        else:
            sections.setdefault(section, {})[rest] = value
    replaced = {section: msgspec.structs.replace(getattr(config, section), **new) for section, new in sections.items()}
    return msgspec.structs.replace(config, plugins=plugins, **replaced)


def apply_to_plugins(config: Config, host: PluginHost, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Have the host's plugins, loaded now or later, use the new values; the settings of those concerned, as written."""
    settings = _plugin_settings(config, host, values)
    for plugin, made in settings.items():
        host.set_settings(plugin, config.plugins[plugin], made)
    return {plugin: config.plugins[plugin] for plugin in settings}


def _plugin_settings(config: Config, host: PluginHost, values: Mapping[str, Any]) -> dict[str, msgspec.Struct]:
    """The settings objects of the plugins that `values` concern. msgspec.ValidationError when a plugin's values don't go together."""
    names = {name.removeprefix("plugins.").rpartition(".")[0] for name in values if name.startswith("plugins.")}
    return {name: msgspec.convert(config.plugins[name], host.catalogue[name].Settings) for name in sorted(names)}


def _walk(config: Config, host: PluginHost) -> Iterator[tuple[str, msgspec.structs.FieldInfo, Any]]:
    for section in config.__struct_fields__:
        if section in {"plugins", "experiments"}:
            continue
        table = getattr(config, section)
        for field in msgspec.structs.fields(table):
            yield f"{section}.{field.name}", field, getattr(table, field.name)
    for plugin in sorted(host.catalogue):
        given = config.plugins.get(plugin, {})
        for field in msgspec.structs.fields(host.catalogue[plugin].Settings):
            yield f"plugins.{plugin}.{field.name}", field, given.get(field.encode_name, _default(field))


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None if field.default is msgspec.NODEFAULT else field.default


def _is_live(host: PluginHost, name: str) -> bool:
    if not name.startswith("plugins."):
        return name in LIVE
    plugin, _, field = name.removeprefix("plugins.").rpartition(".")
    return field in host.info(plugin).live_settings


def _describe(host: PluginHost, name: str, field: msgspec.structs.FieldInfo, value: Any) -> Setting:
    if name.endswith(SECRET):
        value = "set" if value else None
    return Setting(
        value=msgspec.to_builtins(value, enc_hook=repr),
        default=msgspec.to_builtins(_default(field), enc_hook=repr),
        schema=_schema(field.type),
        applies="live" if _is_live(host, name) else "restart",
        note=LIVE.get(name),
    )


def _schema(kind: Any) -> dict[str, Any]:
    try:
        return msgspec.json.schema(kind)
    except TypeError:  # a plugin's own type, which JSON has no word for
        return {}
