"""How a part tells what it finds: a JSON object a line, written when it is known, so that a part that is ended has told what it had.

{"kind": "row", "table": "...", "cells": {...}}         for people
{"kind": "figure", "name": "...", "value": 1.5}         for the reaches, and for parts that run later
{"kind": "check", "name": "...", "ok": true, "detail": "..."}
{"kind": "note", "text": "..."}
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Record:
    """A part's side. path None: lines are printed only. known: figures of earlier parts."""

    def __init__(self, path: Path | None, known: dict[str, float] | None = None, seconds: float = 3600.0) -> None:
        """seconds: that there are for the part."""
        self._path = path
        self.known = known or {}
        self.failed = 0
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until the part is ended."""
        return self._end - time.monotonic()

    def attempt(self, name: str, call: Callable[[], object], needs: float = 0.0) -> None:
        """Call it. What it raises is a check that does not hold, and the part goes on. needs: seconds without which it isn't begun."""
        if self.left < needs:
            self.note(f"no time was left for {name}")
            return
        try:
            call()
        except Exception as error:
            traceback.print_exc()
            self.check(name, ok=False, detail=f"{type(error).__name__}: {error}"[:500])

    def row(self, table: str, **cells: object) -> None:
        shown = {name: cell if isinstance(cell, str) else f"{cell}" for name, cell in cells.items()}
        self._write({"kind": "row", "table": table, "cells": shown})
        print(f"{table}: " + ", ".join(f"{name} {cell}" for name, cell in shown.items()), flush=True)

    def figure(self, name: str, value: float) -> None:
        """Not told when it is NaN or infinite: then it counts as not measured."""
        if math.isfinite(value):
            self.known[name] = value
            self._write({"kind": "figure", "name": name, "value": value})

    def check(self, name: str, ok: bool, detail: str = "") -> None:
        self.failed += not ok
        self._write({"kind": "check", "name": name, "ok": ok, "detail": detail})
        print(f"{'ok    ' if ok else 'FAILED'} {name}{f': {detail}' if detail else ''}", flush=True)

    def note(self, text: str) -> None:
        self._write({"kind": "note", "text": text})
        print(text, flush=True)

    def _write(self, line: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


@dataclass
class Findings:
    """The suite's side: what parts have told."""

    tables: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    checks: list[tuple[str, bool, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[str, str]]:
        return [(name, detail) for name, ok, detail in self.checks if not ok]

    def read(self, path: Path) -> None:
        """Add what the file holds; a line that was cut off is left out."""
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            match line["kind"]:
                case "row":
                    self.tables.setdefault(line["table"], []).append(line["cells"])
                case "figure":
                    self.figures[line["name"]] = line["value"]
                case "check":
                    self.checks.append((line["name"], line["ok"], line["detail"]))
                case "note":
                    self.notes.append(line["text"])


def part_options(about: str | None) -> argparse.ArgumentParser:
    """What every part understands."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, help="file for what is found, a line of JSON each; default: only printed")
    parser.add_argument("--known", type=Path, help="figures of earlier parts, as JSON")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that there is")
    parser.add_argument("--interpret", action="store_true", help="tiny, in Triton's interpreter on the CPU")
    return parser


def make_record(options: argparse.Namespace) -> Record:
    known = json.loads(options.known.read_text(encoding="utf-8")) if options.known else {}
    return Record(options.record, known, options.seconds)


def finish(record: Record) -> None:
    """Ends the process: status 1 when a check failed."""
    sys.exit(1 if record.failed else 0)
