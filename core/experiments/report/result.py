"""The report as plain data: what `--json` prints, and what the terminal and the page are made from."""

from __future__ import annotations

from typing import Literal

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to judge. All of it belongs fixed before the first look."""

    alpha: float = 0.05
    """Chance that a report on equal arms claims any difference at all."""
    looks: Literal["any", "once"] = "any"
    """any: the report may be read at any time and stopped at; once: it is read once, at a time fixed beforehand, and is
    sharper."""
    primary: str = "ttft_p99"
    """The measure that gets half of alpha for itself."""
    buckets: tuple[int, ...] = (128, 512, 2048)
    """Prompt tokens at which a bucket ends."""
    min_requests: int = 100
    """Of each arm; percentiles need more (P95: 200, P99: 1000)."""
    min_clusters: int = 20
    """Of each arm: users, requests, slices, or blocks of slices."""
    seed: int = 1
    """Of the bootstrap."""


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    control: bool
    weight: float
    config: str
    configs: int
    """Different configurations in this run; only rows of the newest are compared."""
    requests: int
    """Rows compared."""
    units: int
    """Different users, requests, or slices among them."""
    output_tokens: int
    washout: int
    excluded: dict[str, int]
    older: int
    """Rows left out because an arm's configuration has changed since."""
    unfinished: int
    """Rows left out because their slice, or its block, is not complete."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of one arm beside the control's, in one bucket of prompt lengths."""

    arm: str
    measure: str
    label: str
    unit: str
    bucket: str
    """"all", or a range of prompt tokens."""
    family: Literal["primary", "overall", "by prompt length"]
    requests: tuple[int, int]
    """Control's and the arm's, that have the measure."""
    clusters: tuple[int, int]
    control_value: float | None = None
    arm_value: float | None = None
    not_enough: str = ""
    """Why there is no verdict on it; then what follows is None."""
    scale: Literal["relative", "difference"] = "relative"
    change: float | None = None
    """Percent of the control's value; for `difference` in `unit`."""
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """Of the interval from `low` to `high`, corrected for measures and looks: 1 - the level at which Holm's procedure judged
    it."""
    standard_error: float | None = None
    """Of log(arm / control); for `difference` of the difference."""
    p: float | None = None
    p_adjusted: float | None = None
    different: bool = False
    verdict: Literal["better", "worse", "no difference seen", "not enough data", "nothing to compare"] = "not enough data"


class RatioCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Does each arm have the share of units that it should have?"""

    unit: str
    observed: dict[str, int]
    expected: dict[str, float]
    p: float | None = None
    """Of the chi-square test; None where there is nothing to test."""
    failed: bool = False
    text: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    experiment: str
    run: int
    split: str
    shared_steps: bool
    since: float
    """Unix seconds of the first arrival compared; `until` of the last."""
    until: float
    options: Options
    paired: bool
    """Arms are compared within blocks of slices."""
    verdicts: list[str]
    warnings: list[str]
    arms: list[Arm]
    ratio_check: RatioCheck
    comparisons: list[Comparison]
    method: list[str]
