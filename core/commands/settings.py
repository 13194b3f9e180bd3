"""`tokenbus settings`: a running server's settings, shown or changed live."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..columns import columns
from ..config import Config
from .remote import ask, split_changes


def run(arguments: argparse.Namespace, config: Config) -> int:
    path = "/v1/tokenbus/settings"
    state = ask(arguments, config, path)
    if changes := split_changes(arguments.changes):
        settings = {name: _value(text, state["settings"].get(name)) for name, text in changes.items()}
        state = ask(arguments, config, path, {"settings": settings})
    text = json.dumps(state, indent=2) if arguments.json else _text(state["settings"])
    sys.stdout.write(text + "\n")
    return 0


def _value(text: str, setting: dict[str, Any] | None) -> Any:
    """As the setting's type wants it: a text stays one; anything else is JSON. What is wrong is the server's to say."""
    if setting is not None and isinstance(setting["default"], str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(settings: dict[str, Any]) -> str:
    rows = [("SETTING", "VALUE", "APPLIES", "TAKES")]
    rows += [
        (name, json.dumps(entry["value"], ensure_ascii=False), entry["applies"], _takes(entry["schema"]))
        for name, entry in sorted(settings.items(), key=lambda item: (item[1]["applies"] != "live", item[0]))
    ]
    return "\n".join(columns(rows))


def _takes(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "anyOf" in schema:
        return " or ".join(_takes(part) for part in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    bounds = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
    return " ".join([schema.get("type", "any"), *(f"{sign} {schema[key]}" for key, sign in bounds if key in schema)])
