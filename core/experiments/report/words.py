"""The report in words: verdicts, warnings, how it was computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from .clusters import REPLICATES
from .compare import BUCKET_SHARE, EVENTS, OVERALL_SHARE, PRIMARY_SHARE, TAIL_CLUSTERS
from .intervals import PLANNED
from .measures import MEASURES
from .ratio_check import unit_name
from .result import Comparison, Options, RatioCheck
from .table import MOST_CLUSTERS, ArmFacts, Table

MOST_WASHED_OUT = 0.3
"""Share of requests beyond which slices are called too short."""


def percent(value: float) -> str:
    """-31, +3.4, 0: digits that are worth reading."""
    if abs(value) >= 10_000:
        return ">10000" if value > 0 else "<-10000"
    text = f"{value:+.0f}" if abs(value) >= 10 else f"{value:+.1f}"
    return "0" if float(text) == 0 else text


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"


def interval(row: Comparison) -> str:
    """-31 % [-38, -22], or with `scale` difference +0.4 [+0.1, +0.7] % of requests."""
    if row.change is None or row.low is None or row.high is None:
        return ""
    if row.scale == "relative":
        return f"{percent(row.change)} % [{percent(row.low)}, {percent(row.high)}]"
    change, low, high = (f"{value:+.2g}" if value else "0" for value in (row.change, row.low, row.high))
    return f"{change} [{low}, {high}] {row.unit}"


def name_of(row: Comparison) -> str:
    return row.label if row.bucket == "all" else f"{row.label} at {row.bucket} prompt tokens"


def verdicts(table: Table, comparisons: Sequence[Comparison], ratio: RatioCheck) -> list[str]:
    """One line for each arm beside the control."""
    control, *others = table.arms
    if not others:
        return [f"only arm {control.name} has rows: nothing to compare"]
    return [_verdict(arm.name, [row for row in comparisons if row.arm == arm.name], ratio) for arm in others]


def _verdict(arm: str, rows: list[Comparison], ratio: RatioCheck) -> str:
    if ratio.failed:
        return f"{arm}: no verdict, the {ratio.unit} are not divided as they should be: {ratio.text}"
    judged = [row for row in rows if row.change is not None]
    if not judged:
        return f"{arm}: not enough data ({_first_reason(rows)})"
    parts = [f"{name_of(row)} {interval(row)}" for row in _notable(judged)]
    same = [row for row in judged if not row.different and row.bucket == "all"]
    if same:
        parts.append(f"no difference seen in {_list(_same(same))}")
    short = [row for row in rows if row.not_enough and row.bucket == "all"]
    if short:
        parts.append(f"not enough data for {_list(_short(short))}")
    return f"{arm}: {'; '.join(parts)}"


def _first_reason(rows: Iterable[Comparison]) -> str:
    ordered = sorted(rows, key=lambda row: (row.bucket != "all", row.family != "primary"))
    return next((row.not_enough for row in ordered if row.not_enough), "no row of it can be compared")


def _notable(rows: list[Comparison]) -> list[Comparison]:
    """The different ones: the primary first, then overall, then by prompt length those that say more than "all" does."""
    different = [row for row in rows if row.different]
    overall = {(row.measure, row.verdict) for row in different if row.bucket == "all"}
    shown = [row for row in different if row.bucket == "all" or (row.measure, row.verdict) not in overall]
    order = ("primary", "overall", "by prompt length")
    return sorted(shown, key=lambda row: order.index(row.family))


def _same(rows: list[Comparison]) -> list[str]:
    """The primary's interval is said: "no difference seen" with a wide one is not "the same"."""
    return [
        f"{name_of(row)} ({interval(row) or 'always the same'})" if row.family == "primary" else name_of(row) for row in rows
    ]


def _short(rows: list[Comparison]) -> list[str]:
    return [f"{name_of(row)} ({row.not_enough})" if row.family == "primary" else name_of(row) for row in rows]


def _list(names: list[str]) -> str:
    """At least one of them."""
    return ", ".join(names[:-1]) + (f" and {names[-1]}" if len(names) > 1 else names[-1])


def warnings(table: Table, ratio: RatioCheck) -> list[str]:
    found: list[str] = []
    if ratio.failed:
        found.append(
            f"{ratio.unit} are not divided as the weights say: {ratio.text}. Find out why before you believe any number."
        )
    if table.shared_steps:
        found.append(
            "The arms shared engine steps: what one arm costs, the other's requests felt too. Differences between arms that change "
            "everybody's step time look smaller than they are; split by slice to see them."
        )
    if table.by_slice and not table.design.paired and len(table.arms) > 1:
        found.append(
            "The slices don't come in blocks of one slice an arm, so they are compared unpaired: drift makes intervals wider."
        )
    if table.by_slice:
        found += _washed_out(table)
    for arm in table.arms:
        found += _arm_warnings(arm)
    return [*found, *_uneven(table)]


def _washed_out(table: Table) -> list[str]:
    """Slices that are too short for the requests in them."""
    washed, compared = sum(arm.washout for arm in table.arms), len(table)
    if not compared or washed <= MOST_WASHED_OUT * (washed + compared):
        return []
    slowest = float(np.quantile(table.columns["e2e"], 0.99)) / 1e3
    text = (
        f"{washed} of {washed + compared} requests fell into wash-out or ended after their slice, and are left out: the slices are too "
        f"short for requests that take up to {number(slowest)} s (P99 of those compared). What is slow is left out more often, so "
        "differences look smaller than they are: make slice_seconds larger."
    )
    return [text]


def _arm_warnings(arm: ArmFacts) -> list[str]:
    found: list[str] = []
    if arm.configs > 1:
        found.append(
            f"Arm {arm.name} had {arm.configs} configurations in this run; only rows since the last change are compared."
        )
    if tripped := arm.excluded["tripped"]:
        found.append(
            f"A guard rail or a rollback switched arm {arm.name} off: {tripped} of its requests ran as control and are left out. "
            "It is compared up to then."
        )
    if failed := arm.excluded["failed"]:
        found.append(f"The switches of arm {arm.name} could not be applied for {failed} requests, which are left out.")
    return found


def _uneven(table: Table) -> list[str]:
    """Reasons for leaving rows out that hit one arm more than another."""
    counts = np.bincount(table.arm, minlength=len(table.arms))
    shares = {
        "wash-out": [arm.washout / max(1, arm.washout + count) for arm, count in zip(table.arms, counts, strict=True)],
        "what their clients chose": [
            _chosen(arm) / max(1, _chosen(arm) + count) for arm, count in zip(table.arms, counts, strict=True)
        ],
    }
    return [
        f"Rows left out because of {why} are not alike: "
        + ", ".join(f"{arm.name} {share:.0%}" for arm, share in zip(table.arms, values, strict=True))
        + ". Those left out may differ from the others."
        for why, values in shares.items()
        if max(values) - min(values) > 0.1
    ]


def _chosen(arm: ArmFacts) -> int:
    return arm.excluded["client"] + arm.excluded["claims"]


def method(table: Table, options: Options) -> list[str]:
    resampled = f"{unit_name(table.split)} within each arm"
    if table.own_engines:
        resampled = "time windows, each with all arms' requests"
    elif table.design.paired:
        resampled = "blocks of one slice of each arm"
    clusters = (
        f"Clusters: {resampled}. Percentiles: cluster bootstrap of the log ratio, {REPLICATES} replicates, seed {options.seed}. "
        f"Ratios of sums: delta method. More than {MOST_CLUSTERS} units of an arm are put together by hash."
    )
    looks = (
        "Intervals and p-values hold however often the report is looked at: asymptotic confidence sequences (Waudby-Smith et "
        f"al., Annals of Statistics 2024), tightest at {PLANNED} clusters."
        if options.looks == "any"
        else "Intervals and p-values hold for one look, at a time fixed beforehand (Student's t)."
    )
    alpha = (
        f"On equal arms the whole report claims a difference in at most {100 * options.alpha:g} % of experiments: "
        f"{PRIMARY_SHARE:.0%} of that is for the primary measure ({MEASURES[options.primary].label}), {OVERALL_SHARE:.0%} for the "
        f"other measures, {BUCKET_SHARE:.0%} for percentiles by prompt length, with Holm's procedure in each. An interval has the "
        "confidence of the step at which it was judged, so it excludes 0 just where a difference is claimed."
    )
    enough = (
        f'"Not enough data": fewer than {options.min_requests} requests (P95: 200, P99: 1000) or {options.min_clusters} clusters '
        f"in an arm, fewer than {TAIL_CLUSTERS} clusters that reach a percentile, or fewer than {EVENTS} rare events."
    )
    whose = "Latencies are of requests that had a first token; errors are 5xx and 429, not the clients' own."
    return [clusters, looks, alpha, enough, whose]
