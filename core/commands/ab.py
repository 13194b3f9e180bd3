"""`tokenbus ab`: experiments of a running server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..columns import columns
from ..config import Config
from ..experiments import report
from .remote import ask

PATH = "/v1/tokenbus/experiments"


def run(arguments: argparse.Namespace, config: Config) -> int:
    if arguments.verb == "report":
        return report.main(arguments)
    if arguments.verb == "list":
        state = ask(arguments, config, PATH)["experiments"]
        sys.stdout.write((json.dumps(state, indent=2) if arguments.json else _table(state)) + "\n")
        return 0
    body: dict[str, Any] = {"action": arguments.verb, "name": arguments.name}
    if getattr(arguments, "traffic", None) is not None:
        body["traffic"] = arguments.traffic
    state = ask(arguments, config, PATH, body)["experiments"]
    sys.stdout.write(_table({arguments.name: state[arguments.name]}) + "\n")
    return 0


def _table(state: dict[str, Any]) -> str:
    if not state:
        return "no experiments: they are set up in tokenbus.toml, as [experiments.NAME]"
    return "\n\n".join("\n".join(_lines(name, entry)) for name, entry in state.items())


def _lines(name: str, entry: dict[str, Any]) -> list[str]:
    head = f"{name}: {entry['status']}"
    if entry["run"]:
        head += f" (run {entry['run']}), split by {entry['split']}, {entry['traffic']:.0%} of traffic"
    if entry["engines"] == "own":
        head += ", engines of their own"
    lines = [head]
    if "slice" in entry:
        now = entry["slice"]
        lines.append(f"  slice {now['index']}: {now['arm']}, ends in {now['ends_in']:.1f} s")
    rows: list[tuple[str, ...]] = [("ARM", "SHARE", "COUNTED", "WASH-OUT", "EXCLUDED", "FAILED", "SWITCHES")]
    for arm, seen in entry["arms"].items():
        switches = ", ".join(f"{plugin} {'on' if wish else 'off'}" for plugin, wish in seen["features"].items())
        switches = (
            ", ".join([*filter(None, [switches]), *(f"{name}={value}" for name, value in seen["settings"].items())]) or "none"
        )
        mark = " (control)" if arm == entry["control"] else ""
        off = f"; off: {seen['off']}" if "off" in seen else ""
        excluded = sum(seen["excluded"].values())
        numbers = (f"{seen['share']:.0%}", *(str(n) for n in (seen["counted"], seen["washout"], excluded, seen["failed"])))
        if (engine := seen.get("engine")) is not None and engine["state"] != "ready":
            off += f"; its engine: {engine['state']}"
        rows.append((arm + mark, *numbers, switches + off))
    lines += ["  " + line for line in columns(rows)]
    for key, label in (("reason", "stopped because"), ("failing", "can't switch"), ("rows_problem", "rows can't be written")):
        if key in entry:
            lines.append(f"  {label}: {entry[key]}")
    if entry["unrecorded"]:
        lines.append(f"  {entry['unrecorded']} requests were left out: no room for their rows")
    return lines
