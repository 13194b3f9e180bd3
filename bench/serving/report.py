"""The results as Markdown."""

from __future__ import annotations

import datetime as dt
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .rows import Line, Samples, judge
from .servers import Variant

HIDDEN = {"metrics", "requests", "output_tokens", "seconds", "front_cpu_s", "other_cpu_s"}
LIMITS = {"read": ("read bandwidth", 1e9, "GB/s"), "loop": ("register-only bf16 loop", 1e12, "TFLOP/s"),
          "matmul": ("torch bf16 matmul", 1e12, "TFLOP/s"), "bf16": ("the better of the two bf16 rates", 1e12, "TFLOP/s")}  # fmt: skip


@dataclass
class Run:
    """Everything one invocation found."""

    command: str
    versions: list[str]
    variants: dict[str, Variant]
    lines: list[Line]
    rounds: int
    short: bool
    samples: Samples = field(default_factory=dict)
    limits: list[dict[str, float]] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    """Load averages before each server's start."""
    failures: dict[str, str] = field(default_factory=dict)

    def limit(self, name: str) -> list[float]:
        if name != "bf16":
            return [limits[name] for limits in self.limits]
        better = max(("loop", "matmul"), key=lambda name: statistics.median(self.limit(name)))
        return self.limit(better)


def markdown(run: Run) -> str:
    return "\n".join([*_head(run), *_table(run), *_figures(run), *_commands(run)]) + "\n"


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _head(run: Run) -> list[str]:
    kind = "**Short runs: they show that it works, the numbers mean nothing.** " if run.short else ""
    lines = [
        f"# Serving SmolLM2-135M on a CPU, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"    scripts/bench {run.command}",
        "",
        f"{kind}{os.cpu_count()} cores ({processor()}); {', '.join(run.versions)}; {run.rounds} rounds, servers in turn.",
        f"Load average before the starts: {min(run.loads, default=0):.1f} ... {max(run.loads, default=0):.1f}.",
        "Figures are medians over the rounds (smallest ... largest).",
        "",
        "| limit, measured before each server | median | range |",
        "|---|---|---|",
    ]
    for name, (title, unit, suffix) in LIMITS.items():
        values = [value / unit for value in run.limit(name)]
        lines.append(f"| {title} | {statistics.median(values):.3g} {suffix} | {min(values):.3g} ... {max(values):.3g} |")
    return lines


def _table(run: Run) -> list[str]:
    lines = [
        "",
        "| work | precision | figure | ours | against | its | ratio | reach | reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    limits = {name: run.limit(name) for name in ("read", "bf16")}
    for line in run.lines:
        verdict = judge(line, run.samples, limits)
        reach = "" if line.reach is None else f"{'at least' if line.at_least else 'at most'} {line.reach:.3g}"
        reached = {None: "not measured" if line.reach is not None else "", True: "yes", False: "**no**"}[verdict.reached]
        ratio = "" if verdict.ratio is None or (not line.against and line.reach is None) else f"{verdict.ratio:.3g}"
        cells = [line.work, line.precision, line.figure, spread(verdict.ours), line.against.removeprefix("own:")]
        lines.append("| " + " | ".join([*cells, spread(verdict.other), ratio, reach, reached]) + " |")
    lines += [f"\n{text}." for text in run.failures.values()]
    return lines


def _figures(run: Run) -> list[str]:
    lines = ["", "Everything that was measured:", "", "| server | workload | figures |", "|---|---|---|"]
    for variant, workloads in run.samples.items():
        for workload, runs in workloads.items():
            if not runs:
                lines.append(f"| {variant} | {workload} | failed |")
                continue
            names = [name for name in runs[0] if name not in HIDDEN and any(one.get(name) for one in runs)]
            texts = [f"{name} {spread(one[name] for one in runs if name in one)}" for name in names]
            lines.append(f"| {variant} | {workload} | {'; '.join(texts)} |")
    return lines


def _commands(run: Run) -> list[str]:
    lines = ["", "Servers:", ""]
    return lines + [f"    {name}: {variant.shown}" for name, variant in run.variants.items()]


def spread(values: Iterable[float]) -> str:
    """Median (smallest ... largest)."""
    found = list(values)
    if not found:
        return "-"
    middle = f"{statistics.median(found):.4g}"
    return middle if len(found) == 1 else f"{middle} ({min(found):.4g} ... {max(found):.4g})"
