"""The report on a terminal."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence

from ...columns import columns
from .result import Arm, Comparison, Report
from .words import interval, number

WIDTH = 120
EXCLUDED = {
    "client": "client's own switch",
    "claims": "client's own field",
    "tripped": "arm switched off",
    "failed": "switch failed",
}


def terminal(report: Report) -> str:
    lines = [f"{report.experiment}, run {report.run}, split by {report.split}, {span(report.since, report.until)}", ""]
    lines += [line for verdict in report.verdicts for line in _wrap(verdict)]
    lines += [line for warning in report.warnings for line in _wrap(f"! {warning}")]
    lines += ["", *columns([("ARM", "WEIGHT", "REQUESTS", unit_head(report), "LEFT OUT"), *map(arm_cells, report.arms)])]
    lines += ["", f"sample ratio: {ratio_text(report)}"]
    for arm in report.arms[1:]:
        for bucket, rows in by_bucket(report, arm.name).items():
            lines += ["", title(report, arm.name, bucket, rows)]
            if not_enough(rows):
                continue
            lines += [*columns([("MEASURE", report.arms[0].name, arm.name, "CHANGE", ""), *map(cells, rows)])]
    lines += [""] + [line for part in report.method for line in _wrap(part)]
    return "\n".join(lines)


def span(since: float, until: float) -> str:
    show = [time.strftime("%Y-%m-%d %H:%M", time.gmtime(moment)) for moment in (since, until)]
    return f"{show[0]} to {show[1]} UTC"


def unit_head(report: Report) -> str:
    return report.ratio_check.unit.upper()


def ratio_text(report: Report) -> str:
    check = report.ratio_check
    seen = ", ".join(f"{name} {count} (expected {check.expected[name]:g})" for name, count in check.observed.items())
    return f"{check.unit}: {seen}" + (f": {check.text}" if check.text else "")


def left_out(arm: Arm) -> str:
    reasons = {
        "wash-out": arm.washout,
        "in unfinished slices": arm.unfinished,
        "older configuration": arm.older,
    }
    reasons |= {EXCLUDED.get(reason, reason): count for reason, count in arm.excluded.items()}
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count) or "none"


def arm_cells(arm: Arm) -> tuple[str, ...]:
    name = f"{arm.name} (control)" if arm.control else arm.name
    return name, f"{arm.weight:.0%}", str(arm.requests), str(arm.units), left_out(arm)


def by_bucket(report: Report, arm: str) -> dict[str, list[Comparison]]:
    found: dict[str, list[Comparison]] = {}
    for row in report.comparisons:
        if row.arm == arm and row.verdict != "nothing to compare":
            found.setdefault(row.bucket, []).append(row)
    return found


def not_enough(rows: Sequence[Comparison]) -> bool:
    """A bucket without any verdict: its title says that."""
    return rows[0].bucket != "all" and all(row.not_enough for row in rows)


def title(report: Report, arm: str, bucket: str, rows: Sequence[Comparison]) -> str:
    text = f"{arm} beside {report.arms[0].name}" + ("" if bucket == "all" else f", prompts of {bucket} tokens")
    return f"{text}: not enough data ({rows[0].not_enough})" if not_enough(rows) else text


def cells(row: Comparison) -> tuple[str, ...]:
    why = f": {row.not_enough}" if row.not_enough else ""
    star = " *" if row.family == "primary" else ""
    return f"{row.label}, {row.unit}{star}", number(row.control_value), number(row.arm_value), interval(row), row.verdict + why


def _wrap(text: str) -> Iterable[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False)
