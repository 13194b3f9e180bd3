"""Where a step's time goes, for decode with 1, 8 and 32 requests and for a 2048-token prompt: `scripts/bench profile`.

    python bench/step_profile.py [--only decode1,decode8,decode32,prefill] [--arg "--enable quantization.int8"] [--short]
        [--out FILE] [--json FILE]

A real server, its parts timed from outside (serving/traced.py), is loaded over HTTP; each column has a server of its own. Figures of a
step are medians over the steps with exactly so many requests and no prompt in them (prefill: with nothing but a prompt).
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.report import processor
from serving.servers import MODEL, Variant, served
from serving.traced import __file__ as TRACED
from serving.variants import Peers, versions

Step = dict[str, float]
SKIPPED = 5
"""Matching steps at the beginning that are not counted: first calls, cold caches."""


@dataclass(frozen=True)
class Work:
    workload: str
    requests: int
    prompt: bool = False

    def matches(self, step: Step) -> bool:
        if self.prompt:
            return step["requests"] == 1 and step["prompt_tokens"] >= 1024
        return step["requests"] == self.requests and step["prompt_tokens"] == 0


WORK = {
    "decode1": Work("stream1", 1),
    "decode8": Work("stream8", 8),
    "decode32": Work("stream32", 32),
    "prefill": Work("prefill", 1, prompt=True),
}


def _less(whole: str, *parts: str) -> Callable[[Step], float]:
    return lambda step: step[whole] - sum(step.get(part, 0.0) for part in parts)


def _part(name: str) -> Callable[[Step], float]:
    return lambda step: step.get(name, 0.0)


LOOP = ("schedule", "publish", "execute", "switchboard", "update", "send")
PHASES = ("prepare", "forward", "logits", "sample", "prompt_logprobs")
PARTS: dict[str, Callable[[Step], float]] = {
    "**whole step** (from plan to plan)": _part("period"),
    "schedule": _part("schedule"),
    "publish plan and result": _part("publish"),
    "to the worker and back": _less("execute", "run"),
    "**worker**": _part("run"),
    "- prepare": _part("prepare"),
    "- forward: C": _part("forward_c"),
    "- forward: Python": _less("forward", "forward_c"),
    "- logits: C": _part("logits_c"),
    "- logits: Python": _less("logits", "logits_c"),
    "- sample": _part("sample"),
    "- the rest of the runner": _less("run", *PHASES),
    "update": _part("update"),
    "switchboard": _part("switchboard"),
    "send to front": _part("send"),
    "the rest (take in, event loop)": _less("period", *LOOP),
    "worker idle": _less("period", "run"),
}


@dataclass
class Column:
    """What one workload gave."""

    steps: list[Step]
    front: dict[str, list[float]]
    figures: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.figures["output_tokens"]


def with_periods(steps: dict[int, Step], prompt: bool) -> list[Step]:
    """Steps in order with `period`: until the next step was planned; for prompts, after which nothing may follow, the sum of the parts."""
    found = []
    for number, step in sorted(steps.items()):
        after = steps.get(number + 1)
        if "run" not in step or "planned_at" not in step:
            continue
        if prompt:
            found.append(step | {"period": sum(step.get(part, 0.0) for part in LOOP)})
        elif after is not None and "planned_at" in after and after["requests"] == step["requests"]:
            found.append(step | {"period": after["planned_at"] - step["planned_at"]})
    return found


def profile(work: Work, extra: str, *, short: bool) -> Column:
    with tempfile.TemporaryDirectory() as folder:
        fixed = f"serve --port {{port}} --served-model-name {MODEL} --log-level warning {extra}"
        command = (sys.executable, "-P", TRACED, "front", f"{folder}/trace", *shlex.split(fixed))
        with served(Variant("traced", command, 0)) as server:
            figures = server.load(work.workload, short=short, seed=7)
        engine, front = (json.loads(Path(f"{folder}/trace.{role}").read_text(encoding="utf-8")) for role in ("engine", "front"))
    steps = with_periods({int(number): step for number, step in engine["steps"].items()}, work.prompt)
    matching = [step for step in steps if work.matches(step)]
    return Column(matching[min(SKIPPED, len(matching) // 2) :], front["totals"], figures, engine["missing"] + front["missing"])


def milliseconds(column: Column, part: Callable[[Step], float]) -> str:
    if not column.steps:
        return "-"
    value = statistics.median(map(part, column.steps))
    whole = statistics.median(step["period"] for step in column.steps)
    return f"{1e3 * value:.3f} ({value / whole:.0%})"


def table(columns: dict[str, Column]) -> list[str]:
    names = list(columns)
    lines = ["| ms a step (share) | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {name} | {' | '.join(milliseconds(c, part) for c in columns.values())} |" for name, part in PARTS.items()]
    lines += [f"| steps counted | {' | '.join(str(len(c.steps)) for c in columns.values())} |"]
    rates = [[s["flops"] / s["run"] / 1e12 for s in c.steps] for c in columns.values()]
    reads = [[s["bytes"] / s["run"] / 1e9 for s in c.steps] for c in columns.values()]
    lines += [f"| TFLOP/s of the worker | {' | '.join(f'{statistics.median(r):.3f}' if r else '-' for r in rates)} |"]
    lines += [f"| GB/s of the worker | {' | '.join(f'{statistics.median(r):.1f}' if r else '-' for r in reads)} |"]
    return lines


def front_table(columns: dict[str, Column]) -> list[str]:
    """Of the front process, which shares the cores with the engine: microseconds for each streamed token."""
    streams = {name: column for name, column in columns.items() if not WORK[name].prompt}
    if not streams:
        return []
    lines = ["", "| front, us a token | " + " | ".join(streams) + " |", "|---|" + "---|" * len(streams)]
    for part in dict.fromkeys(part for column in streams.values() for part in column.front):
        cells = [f"{1e6 * column.front.get(part, [0, 0.0])[1] / column.tokens:.1f}" for column in streams.values()]
        lines.append(f"| {part} (wall) | {' | '.join(cells)} |")
    for title, key in (("front process, all (CPU)", "front_cpu_s"), ("engine process, all (CPU)", "other_cpu_s")):
        cells = [f"{1e6 * column.figures[key] / column.tokens:.1f}" for column in streams.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    cells = [f"{1e3 * column.figures['front_cpu_s'] / column.tokens:.3f}" for column in streams.values()]
    return [*lines, f"| **front: CPU seconds per 1000 tokens** | {' | '.join(cells)} |"]


def markdown(columns: dict[str, Column], options: argparse.Namespace) -> str:
    extra = (f" --arg {shlex.quote(options.arg)}" if options.arg else "") + (" --short" if options.short else "")
    head = [
        f"# Where a step's time goes, SmolLM2-135M on a CPU, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"    scripts/bench profile --only {','.join(columns)}{extra}",
        "",
        f"{os.cpu_count()} cores ({processor()}); {', '.join(versions(Peers()))}; load average at the end {os.getloadavg()[0]:.1f}.",
        "",
    ]
    missing = sorted({name for column in columns.values() for name in column.missing})
    tail = [f"\nNot found, and so not timed: {', '.join(missing)}"] if missing else []
    return "\n".join([*head, *table(columns), *front_table(columns), *tail]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(WORK), help="columns, separated by commas")
    parser.add_argument("--arg", default="", help="more arguments for the server")
    parser.add_argument("--short", action="store_true", help="few requests: to see that it works")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path, help="all steps")
    options = parser.parse_args()
    unknown = sorted(set(options.only.split(",")) - set(WORK))
    if unknown:
        raise SystemExit(f"no such columns: {', '.join(unknown)}; there are {', '.join(WORK)}")
    columns = {name: profile(WORK[name], options.arg, short=options.short) for name in options.only.split(",")}
    text = markdown(columns, options)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps({name: vars(column) for name, column in columns.items()}), encoding="utf-8")


if __name__ == "__main__":
    main()
