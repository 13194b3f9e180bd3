"""Command-line flags made from `core/config.py`: one for each field, its name with dashes; values are checked like the file's.

Order of precedence: defaults, `--config FILE`, flags. `--enable` and `--disable` may be given many times; for one plugin the later wins,
over the file too.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, get_args, get_origin

import msgspec

from . import config as config_module
from .config import Config, from_mapping, load_toml, merge
from .errors import ConfigError

SWITCHES = ("enable", "disable")


class _Switch(argparse.Action):
    """Keeps the order in which --enable and --disable stand."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        wishes = dict(getattr(namespace, "switches", None) or {})
        for name in str(values).split(","):
            wishes.pop(name.strip(), None)
            wishes[name.strip()] = self.dest == "enable"
        namespace.switches = wishes


def sections() -> dict[str, type[msgspec.Struct]]:
    """The tables of the configuration by name, `plugins` excluded."""
    fields = msgspec.structs.fields(Config)
    return {
        field.name: field.type for field in fields if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
    }


def add_settings(
    parser: argparse.ArgumentParser, only: Iterable[str] | None = None, fields: Iterable[str] | None = None
) -> None:
    """Flags for the sections named (all of them by default), of those for the fields named, `--config` and `--plugin-setting`."""
    parser.add_argument("--config", metavar="FILE", help="settings as a TOML file; flags go over it")
    parser.add_argument(
        "--plugin-setting",
        action="append",
        default=[],
        metavar="PLUGIN.NAME=VALUE",
        help="a plugin's own setting; VALUE is TOML, or a plain string",
    )
    parser.set_defaults(switches={})
    chosen = tuple(only) if only is not None else tuple(sections())
    for section, struct in sections().items():
        if section in chosen:
            _add_section(parser, section, struct, None if fields is None else frozenset(fields))


def add_fields(parser: argparse.ArgumentParser, section: str, names: Iterable[str], default: str | None = None) -> None:
    """Flags for some fields of one section, and for nothing else. default: what help says it is, when it isn't the field's own."""
    parser.set_defaults(config=None, plugin_setting=[], switches={})
    for field in msgspec.structs.fields(sections()[section]):
        if field.name in names:
            _add_field(parser, section, sections()[section].__name__, field, default)


def _add_field(
    to: argparse._ActionsContainer, section: str, struct: str, field: msgspec.structs.FieldInfo, default: str | None = None
) -> None:
    many = get_origin(field.type) is tuple
    to.add_argument(
        "--" + field.name.replace("_", "-"),
        dest=f"{section}.{field.name}",
        action="append" if many else "store",
        metavar=field.name.upper(),
        help=_help(struct, field.name, field.default if default is None else default),
    )


def given(arguments: argparse.Namespace, section: str) -> dict[str, Any]:
    """Settings of a section for which a flag was given, checked one by one."""
    return _flags(arguments).get(section, {})


def _add_section(
    parser: argparse.ArgumentParser, section: str, struct: type[msgspec.Struct], fields: frozenset[str] | None
) -> None:
    group = parser.add_argument_group(f"[{section}]")
    for field in msgspec.structs.fields(struct):
        if fields is not None and field.name not in fields:
            continue
        if section == "features" and field.name in SWITCHES:
            text = _help(struct.__name__, field.name)
            group.add_argument(f"--{field.name}", action=_Switch, dest=field.name, metavar="PLUGIN", help=text)
        else:
            _add_field(group, section, struct.__name__, field)


def _help(struct: str, field: str, default: Any = None) -> str:
    text = " ".join(field_docs().get(f"{struct}.{field}", "").split())
    shown = "" if default in (None, (), "") else f" (default: {default})"
    return (text + shown).strip().replace("%", "%%")


@cache
def field_docs() -> dict[str, str]:
    """ "Struct.field" -> the string below it in config.py."""
    docs: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(config_module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, after in itertools.pairwise(node.body):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                docs[f"{node.name}.{field.target.id}"] = str(after.value.value)
    return docs


def make_config(arguments: argparse.Namespace) -> Config:
    """The configuration that file and flags give. ConfigError names the file's path or the flag that is wrong."""
    data: dict[str, Any] = {}
    if arguments.config:
        data = load_toml(arguments.config)
        from_mapping(data, arguments.config)
    flags = _flags(arguments)
    flags["plugins"] = _plugin_settings(arguments.plugin_setting)
    merged = merge(data, flags)
    _apply_switches(merged, arguments.switches)
    return from_mapping(merged, "settings")


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for section, struct in sections().items():
        for field in msgspec.structs.fields(struct):
            text = getattr(arguments, f"{section}.{field.name}", None)
            if text is not None:
                found.setdefault(section, {})[field.name] = _value(text, field)
    return found


def _value(text: str | list[str], field: msgspec.structs.FieldInfo) -> Any:
    if isinstance(text, str) and str in get_args(field.type):
        return text
    try:
        value = msgspec.convert(text, field.type, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--{field.name.replace('_', '-')} {text}: {error}") from None
    return list(value) if isinstance(value, tuple) else value


def _plugin_settings(items: Sequence[str]) -> dict[str, dict[str, Any]]:
    import tomllib

    found: dict[str, dict[str, Any]] = {}
    for item in items:
        path, equals, text = item.partition("=")
        plugin, dot, name = path.strip().rpartition(".")
        if not (equals and dot and plugin and name):
            raise ConfigError(f"--plugin-setting {item}: must be PLUGIN.NAME=VALUE")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):  # not TOML, or a number or nesting that Python doesn't take
            value = text
        found.setdefault(plugin, {})[name] = value
    return found


def _apply_switches(data: dict[str, Any], wishes: dict[str, bool]) -> None:
    if not wishes:
        return
    features = dict(data.get("features") or {})
    for key, wish in (("enable", True), ("disable", False)):
        kept = [name for name in features.get(key, ()) if name not in wishes]
        features[key] = kept + [name for name, wished in wishes.items() if wished is wish]
    data["features"] = features
