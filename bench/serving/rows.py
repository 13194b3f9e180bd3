"""What is compared with what: the lines of the table, and how one is judged."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

Samples = dict[str, dict[str, list[dict[str, Any]]]]
"""variant -> workload -> one dict of figures for each round."""


@dataclass(frozen=True)
class Line:
    """Our figure over something else's. `against`: another variant (the same figure there); "read" or "bf16" (the machine's limit);
    "own:FIGURE" (another figure of the same run); "" (the figure is judged by itself)."""

    row: str
    work: str
    precision: str
    variant: str
    workload: str
    figure: str
    against: str = ""
    reach: float | None = None
    """Bound of the ratio; None: shown, not judged."""
    at_least: bool = False
    """Whether `reach` is a lower bound."""


ONE = "one stream, 128/128"
PROMPT = "one 2048-token prompt"
LONG = "4 streams decode, a 3000-token prompt arrives"
LINES = (
    Line("single", ONE, "bf16", "ours-bf16", "single", "median_tpot_ms", "vllm-bf16", 1 / 2.5),
    Line("single", ONE, "bf16", "ours-bf16", "single", "median_tpot_ms", "llama-bf16", 1.0),
    Line("single", ONE, "bf16", "ours-bf16", "single", "read_gb_s", "read", 0.85, at_least=True),
    Line("q8_0", ONE, "Q8_0", "ours-q8_0", "single", "median_tpot_ms", "llama-q8_0", 0.55),
    Line("q8_0", ONE, "Q8_0", "ours-q8_0", "single", "read_gb_s", "read"),
    Line("q4_1", ONE, "Q4_1", "ours-q4_1", "single", "median_tpot_ms", "llama-q4_1", 0.55),
    Line("q4_1", ONE, "Q4_1", "ours-q4_1", "single", "read_gb_s", "read"),
    Line("c8", "8 streams, 128/128", "bf16", "ours-bf16", "c8", "output_tok_s", "vllm-bf16", 2.1, at_least=True),
    Line("c32", "32 streams, 256/64", "bf16", "ours-bf16", "c32", "output_tok_s", "vllm-bf16", 1.35, at_least=True),
    Line("int8", "32 streams, 256/64", "int8", "ours-int8", "c32", "output_tok_s", "vllm-bf16", 2.2, at_least=True),
    Line(
        "prefill", f"{PROMPT}, by TTFT over HTTP", "bf16", "ours-bf16", "prefill", "http_tflop_s", "bf16", 0.85, at_least=True
    ),
    Line("prefill", f"{PROMPT}, the engine's forward", "bf16", "ours-bf16", "prefill", "forward_tflop_s", "bf16"),
    Line("prefill", f"{PROMPT}, the linear kernels alone", "bf16", "kernels", "prefill", "kernel_tflop_s", "bf16"),
    Line("interference", LONG, "bf16", "ours-bf16", "interference", "worst_gap_ms", "own:median_gap_ms", 5.0),
    Line("interference", LONG, "bf16", "ours-bf16", "interference", "long_ttft_s", "own:long_ttft_alone_s", 1.5),
    Line(
        "prefix",
        "w5: 1024 shared + 32 own, 32 out",
        "bf16",
        "ours-bf16",
        "prefix",
        "output_tok_s",
        "vllm-bf16",
        2.0,
        at_least=True,
    ),
    Line("ready", "ready after start, model cached", "bf16", "ours-bf16", "start", "ready_s", "", 3.0),
    Line("ready", "ready after start, model cached", "bf16", "ours-bf16", "start", "ready_s", "vllm-bf16"),
    Line("ready", "ready after start, model cached", "bf16", "ours-bf16", "start", "ready_s", "llama-bf16"),
    Line("memory", "peak PSS, 8 streams, context 4096", "bf16", "ours-memory", "context", "pss_mb", "own:allowed_mb", 1.0),
    Line("streaming", "front's CPU per streamed token, 1 stream", "bf16", "ours-bf16", "stream1", "front_us_per_token"),
    Line("streaming", "front's CPU per streamed token, 8 streams", "bf16", "ours-bf16", "stream8", "front_us_per_token"),
    Line("streaming", "front's CPU per streamed token, 32 streams", "bf16", "ours-bf16", "stream32", "front_us_per_token"),
    Line("more", "8 streams, 128/128", "bf16", "ours-bf16", "c8", "output_tok_s", "llama-bf16-c8"),
    Line("more", "32 streams, 256/64", "bf16", "ours-bf16", "c32", "output_tok_s", "llama-bf16-c32"),
    Line("more", "w5: 1024 shared + 32 own, 32 out", "bf16", "ours-bf16", "prefix", "output_tok_s", "llama-bf16-c8"),
    Line(
        "more", "front's CPU per streamed token, 8 streams", "bf16", "ours-bf16", "stream8", "front_us_per_token", "vllm-bf16"
    ),
    Line("more", LONG, "bf16", "ours-bf16", "interference", "worst_over_median", "vllm-bf16"),
    Line("more", LONG, "bf16", "ours-bf16", "interference", "worst_over_median", "llama-bf16-c8"),
)
ROWS = tuple(dict.fromkeys(line.row for line in LINES))


def is_variant(against: str) -> bool:
    return bool(against) and against not in {"read", "bf16"} and not against.startswith("own:")


def needed(lines: list[Line]) -> dict[str, list[str]]:
    """Variant -> its workloads, in the order of the lines."""
    found: dict[str, list[str]] = {}
    for line in lines:
        for variant in (line.variant, *([line.against] if is_variant(line.against) else [])):
            workloads = found.setdefault(variant, [])
            if line.workload != "start" and line.workload not in workloads:
                workloads.append(line.workload)
    return found


@dataclass(frozen=True)
class Verdict:
    ours: list[float]
    other: list[float]
    ratio: float | None
    """Of the medians; for a figure that is judged by itself the figure."""
    reached: bool | None
    """None when it is not judged or can't be."""


def judge(line: Line, samples: Samples, limits: dict[str, list[float]]) -> Verdict:
    """limits: "read" in bytes per second, "bf16" in FLOP/s, each as often as measured."""
    runs = samples.get(line.variant, {}).get(line.workload, [])
    ours = [run[line.figure] for run in runs if line.figure in run]
    if is_variant(line.against):
        other = [run[line.figure] for run in samples.get(line.against, {}).get(line.workload, []) if line.figure in run]
    elif line.against.startswith("own:"):
        other = [run[line.against[4:]] for run in runs if line.against[4:] in run]
    elif line.against:
        other = [value / (1e9 if line.against == "read" else 1e12) for value in limits[line.against]]
    else:
        other = [1.0]
    if not ours or not other:
        return Verdict(ours, other, None, None)
    ratio = statistics.median(ours) / statistics.median(other)
    reached = None if line.reach is None else (ratio >= line.reach if line.at_least else ratio <= line.reach)
    return Verdict(ours, other if line.against else [], ratio, reached)
