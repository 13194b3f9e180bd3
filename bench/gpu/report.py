"""The suite's result as Markdown."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .parts import Part
from .reaches import REACHES
from .record import Findings

SHOWN_FAILURES = 40
METHOD = (
    "Times are medians of repeated graph replays between device events (smallest ... largest), over data several times the L2."
)


@dataclass
class Ended:
    """How a part ended."""

    part: Part
    how: str
    """"ended", "failed", "ended at its limit", "not started: no time left"."""
    seconds: float
    limit: float
    tail: str = ""
    """The end of what it printed, when it did not end well."""

    @property
    def well(self) -> bool:
        return self.how == "ended"


@dataclass
class Run:
    command: str
    commit: str
    facts: dict[str, Any]
    interpret: bool
    started: dt.datetime
    findings: Findings = field(default_factory=Findings)
    ended: list[Ended] = field(default_factory=list)
    running: str = ""
    """A part that has not ended yet."""


def markdown(run: Run) -> str:
    lines = [*_head(run), *_parts(run), *_reaches(run), *_checks(run), *_tables(run), *_failures(run)]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """Rows of cells by column; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(_cell(row.get(name, "")) for name in columns) + " |" for row in rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _head(run: Run) -> list[str]:
    facts, what = run.facts, "Triton's interpreter, on the CPU: nothing here is about a GPU"
    if not run.interpret:
        what = (
            f"{facts['card']}: {facts['processors']} multiprocessors, {facts['memory'] / 2**30:.0f} GiB, L2 {facts['l2'] / 2**20:.0f} MiB, "
            f"compute capability {facts['capability']}; driver {facts['driver'] or 'unknown'}, CUDA {facts['cuda']}"
        )
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"# GPU suite, {facts['card'] or 'interpreted'}, {run.started:%Y-%m-%d}",
        "",
        f"    {run.command}",
        "",
        f"{what}. {versions}. Tokenbus at {run.commit}; begun {run.started:%Y-%m-%d %H:%M} UTC.",
        *([] if run.interpret else [METHOD]),
    ]


def _parts(run: Run) -> list[str]:
    rows = [
        {
            "part": end.part.name,
            "how it ended": end.how,
            "seconds": f"{end.seconds:.0f}",
            "limit": f"{end.limit:.0f}",
            "about": end.part.about,
        }
        for end in run.ended
    ]
    if run.running:
        rows.append({"part": run.running, "how it ended": "still running"})
    return ["", *table(rows)] if rows else []


def _reaches(run: Run) -> list[str]:
    if run.interpret:
        return []
    rows = []
    for reach in REACHES:
        measured, met = reach.verdict(run.findings.figures)
        rows.append({"what": reach.what, "reach": reach.reach, "measured": measured, "met": met})
    return ["", "## Reaches", "", *table(rows)]


def _checks(run: Run) -> list[str]:
    checks, failed = run.findings.checks, run.findings.failed
    if not checks:
        return []
    lines = ["", "## Correctness", "", f"{len(checks) - len(failed)} of {len(checks)} checks hold."]
    lines += [f"- **failed**: {name}: {_cell(detail)}" for name, detail in failed[:SHOWN_FAILURES]]
    if len(failed) > SHOWN_FAILURES:
        lines.append(f"- and {len(failed) - SHOWN_FAILURES} more")
    return lines


def _tables(run: Run) -> Iterable[str]:
    for title, rows in run.findings.tables.items():
        yield from ("", f"## {title}", "", *table(rows))
    if run.findings.notes:
        yield from ("", "## Notes", "", *(f"- {_cell(note)}" for note in run.findings.notes))


def _failures(run: Run) -> Iterable[str]:
    for end in run.ended:
        if not end.well and end.tail:
            yield from ("", f"## The end of what {end.part.name} printed", "", "```", end.tail, "```")
