"""What a run was like, in numbers: latencies by percentile, throughput, preemptions, cache hits."""

from __future__ import annotations

from collections.abc import Sequence

from ..columns import columns
from .simulate import Course

PERCENTILES = (50, 95, 99)
LATENCIES = {"ttft": "time to first token", "itl": "inter-token latency", "e2e": "time to the end"}


def numbers(course: Course) -> dict[str, float]:
    """Seconds of `ttft`, `itl` and `e2e` by percentile ("ttft_p99") over requests that came and ended within the recording; tokens a
    second, counts. A latency of which there is none is left out."""
    whole = [one for one in course.served if not one.partial]
    ended = [one for one in whole if one.ended is not None and one.reason in {"stop", "length"}]
    gaps = [
        (at - before) / count
        for one in whole
        for (before, _), (at, count) in zip(one.emitted, one.emitted[1:], strict=False)
        for _ in range(count)
    ]
    samples = {
        "ttft": [one.emitted[0][0] - one.arrival for one in whole if one.emitted],
        "itl": gaps,
        "e2e": [one.ended - one.arrival for one in ended if one.ended is not None],
    }
    found: dict[str, float] = {}
    for name, values in samples.items():
        for percent in PERCENTILES:
            if values:
                found[f"{name}_p{percent}"] = percentile(values, percent)
    output = sum(count for one in course.served for _, count in one.emitted)
    times = [at for one in course.served for at, _ in one.emitted]
    first = min((one.arrival for one in course.served), default=0.0)
    prompts = sum(one.prompt for one in course.served)
    return found | {
        "requests": len(course.served),
        "ended": len(ended),
        "errors": sum(one.reason == "error" for one in course.served),
        "output_tokens": output,
        "output_tokens_per_second": output / max(max(times) - first, 1e-9) if times else 0.0,
        "steps": course.steps,
        "preemptions": sum(one.preemptions for one in course.served),
        "cached_share": sum(one.cached for one in course.served) / prompts if prompts else 0.0,
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest; of at least one value."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def table(runs: dict[str, dict[str, float]]) -> list[str]:
    """Lines of text: a row for each number, a column for each run."""
    rows: list[tuple[str, ...]] = [("", *runs)]
    names = list(dict.fromkeys(name for run in runs.values() for name in run))
    for name in names:
        latency, _, percent = name.partition("_p")
        label = f"{LATENCIES[latency]}, P{percent}" if latency in LATENCIES else name.replace("_", " ")
        rows.append((label, *(_cell(name, run.get(name)) for run in runs.values())))
    return columns(rows, numbers=True)


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.partition("_p")[0] in LATENCIES:
        return f"{1000 * value:,.1f} ms"
    if name == "cached_share":
        return f"{value:.1%}"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
