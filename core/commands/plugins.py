"""`tokenbus plugins`: what there is, what the settings given switch on, and why the rest is off. Loads no plugin."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..columns import columns
from ..config import Config
from ..host import PluginHost, Switches, make_host


def run(arguments: argparse.Namespace, config: Config) -> int:
    host = make_host("front", config)
    switches = host.start_switches(config.features.enable, config.features.disable)
    rows = [_describe(host, switches, name) for name in sorted(host.catalogue)]
    rows += [
        {"name": name, "on": False, "because": error.message, "broken": True} for name, error in sorted(host.broken.items())
    ]
    text = json.dumps({"plugins": rows}, indent=2) if arguments.json else "\n".join(_table(rows))
    sys.stdout.write(text + "\n")
    return 0


def _describe(host: PluginHost, switches: Switches, name: str) -> dict[str, Any]:
    info = host.info(name)
    row: dict[str, Any] = {
        "name": name,
        "on": name in switches.on,
        "summary": info.summary,
        "scope": info.scope,
        "lossless": host.lossless(name),
        "default": info.default,
        "enforces": info.enforces,
        "resumable": info.resumable,
        "resident": info.resident,
        "devices": sorted(info.devices),
        "slot": info.slot,
        "claims": sorted(info.claims),
        "requires": sorted(info.requires),
        "conflicts": sorted(info.conflicts),
        "source": host.sources.get(name, ""),
        "hook_api": ".".join(map(str, info.api_version)),
    }
    if not row["on"]:
        row["because"] = switches.reasons.get(name, "not on by default")
    return row


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("PLUGIN", "STATE", "SCOPE", "LOSSLESS", "WHAT IT DOES")
    body = [
        (
            row["name"],
            "on" if row["on"] else "broken" if row.get("broken") else "off",
            row.get("scope", ""),
            {True: "yes", False: "no", None: ""}[row.get("lossless")],
            row.get("summary", "") + ("" if row["on"] else f" [{row['because']}]"),
        )
        for row in rows
    ]
    return columns([head, *body])
