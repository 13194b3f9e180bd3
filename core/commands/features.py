"""`tokenbus features`: a running server's switches, shown or changed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..columns import columns
from ..config import Config
from ..errors import FieldError
from .remote import ask, split_changes

WORDS = {"on": True, "true": True, "off": False, "false": False}


def run(arguments: argparse.Namespace, config: Config) -> int:
    changes = split_changes(arguments.changes)
    for name, word in changes.items():
        if word not in WORDS:
            raise FieldError(name, f"must be on or off, got {word!r}")
    body = {"features": {name: WORDS[word] for name, word in changes.items()}} if changes else None
    answer = ask(arguments, config, "/v1/tokenbus/features", body)
    text = json.dumps(answer, indent=2) if arguments.json else _text(answer)
    sys.stdout.write(text + "\n")
    return 0


def _text(answer: dict[str, Any]) -> str:
    rows = [("PLUGIN", "STATE", "SCOPE", "SLOT", "LOSSLESS", "BECAUSE")]
    rows += [
        (
            name,
            "on" if entry["on"] else "off",
            entry["scope"],
            entry.get("slot", ""),
            "yes" if entry["lossless"] else "no",
            entry.get("failed") or entry.get("because", ""),
        )
        for name, entry in answer["features"].items()
    ]
    slots = "\n".join(f"slot {slot}: {holder}" for slot, holder in answer["slots"].items())
    return "\n".join([*columns(rows), "", slots])
