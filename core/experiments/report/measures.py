"""What is measured: percentiles of latencies, and ratios of sums. One table, read by everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .clusters import Floats
from .table import Table

Scale = Literal["relative", "difference"]


@dataclass(frozen=True)
class Measure:
    """`scale`: how two arms are compared: as a ratio, or, where 0 is a usual value, by their difference in `unit`."""

    name: str
    label: str
    unit: str
    scale: Scale
    lower_is_better: bool


@dataclass(frozen=True)
class Percentile(Measure):
    """Of "ttft" (one value a request) or "gap" (one value a token after the first)."""

    source: str
    probability: float

    @property
    def requests(self) -> int:
        """Requests that an arm needs at least: 10 beyond the percentile, and never fewer than 100."""
        return max(100, round(10 / (1 - self.probability)))


@dataclass(frozen=True)
class Ratio(Measure):
    """A sum over a sum, times `times`; rows where either is not known are left out."""

    over: str
    under: str
    times: float = 1.0
    slices_only: bool = False
    """It is the arm's own only where no other arm runs at the same time."""
    requests: int = 100


def _percentiles(source: str, label: str) -> tuple[Percentile, ...]:
    kind = "ttft" if source == "ttft" else "itl"
    return tuple(
        Percentile(f"{kind}_p{round(100 * p)}", f"P{round(100 * p)} {label}", "ms", "relative", True, source, p)
        for p in (0.5, 0.95, 0.99)
    )


PERCENTILES = (*_percentiles("ttft", "TTFT"), *_percentiles("gap", "inter-token latency"))
RATIOS = (
    Ratio("stream_speed", "speed of one stream", "tokens/s", "relative", False, "completion_tokens", "stream_ms", 1e3),
    Ratio("throughput", "throughput", "tokens/s", "relative", False, "completion_tokens", "seconds", slices_only=True),
    Ratio("errors", "errors", "% of requests", "difference", True, "failed", "one", 100.0),
    Ratio("acceptance", "accepted drafts", "% of draft tokens", "difference", False, "accepted_tokens", "draft_tokens", 100.0),
    Ratio("cache_hits", "cache hits", "% of prompt tokens", "difference", False, "cached_tokens", "prompt_tokens", 100.0),
    Ratio("preemptions", "preemptions", "per 1000 requests", "difference", True, "preemptions", "one", 1000.0),
    Ratio(
        "allocation_failures", "allocation failures", "per 1000 requests", "difference", True, "allocation_failures", "one", 1000.0
    ),
)  # fmt: skip
MEASURES: dict[str, Measure] = {measure.name: measure for measure in (*PERCENTILES, *RATIOS)}
PRIMARY = "ttft_p99"


def column(table: Table, name: str) -> Floats:
    """A ratio's column: one of the table's, or one that is made from them."""
    if name == "one":
        return np.ones(len(table))
    if name == "seconds":
        return _seconds(table)
    if name == "stream_ms":
        return np.where(table.columns["completion_tokens"] > 0, table.columns["e2e"], np.nan)
    return table.columns[name]


def _seconds(table: Table) -> Floats:
    """Each slice's seconds from its first arrival to its last end, at one row of the slice; 0 at its other rows."""
    found = np.zeros(len(table))
    _, first, inverse = np.unique(table.columns["slice"], return_index=True, return_inverse=True)
    begin = np.full(len(first), np.inf)
    end = np.full(len(first), -np.inf)
    np.minimum.at(begin, inverse, table.columns["arrival"])
    np.maximum.at(end, inverse, table.columns["ended"])
    found[first] = end - begin
    return found
