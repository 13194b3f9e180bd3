"""Every measure of every arm beside the control's: estimates, errors by cluster, then one correction over all of them.

Of alpha, PRIMARY_SHARE goes to the primary measure, OVERALL_SHARE to the other measures of all requests, the rest to
percentiles by prompt length, each divided by the number of arms beside the control; within a family Holm's procedure applies.
So the chance that a report on equal arms claims anything is at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from .clusters import (
    Floats,
    Indices,
    Quantiles,
    Sums,
    bootstrap_quantiles,
    difference_error,
    log_ratio_error,
    log_ratio_of_ratios_error,
)
from .intervals import holm, multiplier, p_value
from .measures import MEASURES, PERCENTILES, RATIOS, Measure, Percentile, Ratio, column
from .result import Comparison, Options
from .table import Table

Family = Literal["primary", "overall", "by prompt length"]
PRIMARY_SHARE, OVERALL_SHARE, BUCKET_SHARE = 0.5, 0.3, 0.2
TAIL_CLUSTERS = 5
"""A percentile is judged when at least this many clusters of each arm reach it."""
EVENTS = 10
"""A difference of rare events is judged when both arms together had this many."""


LEAST = 1e-6
"""ms: shorter latencies count as this, because ratios are made of them."""


@dataclass(frozen=True)
class Draft:
    """A comparison before the correction: `estimate` over `error`, on the scale on which the interval is made."""

    comparison: Comparison
    estimate: float = 0.0
    error: float = 0.0
    clusters: float = 0.0


def compare(table: Table, options: Options) -> list[Comparison]:
    """Comparisons in the order of the table of measures, arm by arm; those by prompt length last."""
    drafts: list[Draft] = []
    buckets = bucket_masks(table, options)
    for arm in range(1, len(table.arms)):
        drafts += _one_arm(table, options, arm, buckets)
    return _correct(drafts, options, len(table.arms) - 1)


def bucket_masks(table: Table, options: Options) -> dict[str, NDArray[np.bool_]]:
    """Name -> rows. "all" comes first; where all prompts fall into one bucket, it is the only one."""
    prompts = table.columns["prompt_tokens"]
    edges = [0, *options.buckets]
    found = {"all": np.ones(len(table), dtype=bool)}
    for low, high in zip(edges, [*edges[1:], None], strict=True):
        name = f"{low + 1}-{high}" if high is not None else f"over {low}"
        mask = (prompts > low) if high is None else (prompts > low) & (prompts <= high)
        if mask.any():
            found[name] = mask
    return found if len(found) > 2 else {"all": found["all"]}


def _one_arm(table: Table, options: Options, arm: int, buckets: dict[str, NDArray[np.bool_]]) -> list[Draft]:
    drafts: list[Draft] = []
    while_on = table.columns["arrival"] < table.arms[arm].until
    for bucket, rows in buckets.items():
        mask = rows & while_on
        for source in ("ttft", "gap"):
            chosen = [measure for measure in PERCENTILES if measure.source == source]
            drafts += _percentiles(table, options, arm, bucket, mask, chosen)
        if bucket == "all":
            ratios = [one for one in RATIOS if table.by_slice or not one.slices_only]
            drafts += [_ratio(table, options, arm, mask, ratio) for ratio in ratios]
    return drafts


def _family(measure: Measure, bucket: str, options: Options) -> Family:
    if bucket != "all":
        return "by prompt length"
    return "primary" if measure.name == options.primary else "overall"


def _known(table: Table, options: Options, arm: int, measure: Measure, bucket: str, rows: Sequence[Indices]) -> Comparison:
    """What there is to say before anything is estimated. rows: the control's and the arm's that have the measure."""
    control, treated = (len(np.unique(table.cluster[one])) for one in rows)
    return Comparison(
        arm=table.arms[arm].name,
        measure=measure.name,
        label=measure.label,
        unit=measure.unit,
        bucket=bucket,
        family=_family(measure, bucket, options),
        scale=measure.scale,
        requests=(len(rows[0]), len(rows[1])),
        clusters=(control, treated),
    )


def _too_few(known: Comparison, options: Options, requests: int) -> str:
    """Why there is no verdict, or ""."""
    wanted = max(requests, options.min_requests)
    if min(known.requests) < wanted:
        return f"{min(known.requests)} of {wanted} requests"
    if min(known.clusters) < options.min_clusters:
        return f"{min(known.clusters)} of {options.min_clusters} clusters"
    return ""


def _values(table: Table, source: str, mask: NDArray[np.bool_], arm: int) -> tuple[Floats, Indices, Indices]:
    """(values, their clusters, the rows that have any)."""
    if source == "ttft":
        rows = np.flatnonzero(mask & (table.arm == arm) & np.isfinite(table.columns["ttft"]))
        return table.columns["ttft"][rows], table.cluster[rows], rows
    chosen = (mask & (table.arm == arm))[table.gap_row]
    of = table.gap_row[chosen]
    return table.gaps[chosen], table.cluster[of], np.unique(of)


def _percentiles(
    table: Table, options: Options, arm: int, bucket: str, mask: NDArray[np.bool_], measures: list[Percentile]
) -> list[Draft]:
    """Of one source; nothing where an arm has no value at all."""
    found = [_values(table, measures[0].source, mask, which) for which in (0, arm)]
    if not all(len(rows) for _, _, rows in found):
        return []
    known = [_known(table, options, arm, measure, bucket, [rows for _, _, rows in found]) for measure in measures]
    reasons = [_too_few(one, options, measure.requests) for one, measure in zip(known, measures, strict=True)]
    probabilities = np.array([measure.probability for measure in measures])
    enough = np.array([not reason for reason in reasons])
    both = [
        bootstrap_quantiles(np.maximum(values, LEAST), clusters, table.design.weights[which], probabilities, enough)
        for which, (values, clusters, _) in zip((0, arm), found, strict=True)
    ]
    return [_percentile(table, arm, i, both, one, reason) for i, (one, reason) in enumerate(zip(known, reasons, strict=True))]


def _percentile(table: Table, arm: int, i: int, both: list[Quantiles], known: Comparison, why: str) -> Draft:
    control, treated = (float(one.estimates[i]) for one in both)
    if not why and (tail := min(int(one.reach[i]) for one in both)) < TAIL_CLUSTERS:
        why = f"only {tail} clusters reach it, {TAIL_CLUSTERS} are needed"
    known = replace(known, control_value=control, arm_value=treated, not_enough=why)
    if why:
        return Draft(known)
    error = log_ratio_error(both[0].replicates[:, i], both[1].replicates[:, i])
    return _draft(known, math.log(treated / control), error, table.design.clusters(0, arm))


def _draft(known: Comparison, estimate: float, error: float, clusters: float) -> Draft:
    if estimate == 0 and error == 0:  # every value is the same
        return Draft(replace(known, verdict="no difference seen", change=0.0))
    return Draft(known, estimate, error, clusters)


def _sums(table: Table, ratio: Ratio, mask: NDArray[np.bool_], arm: int) -> tuple[Sums, Indices]:
    over, under = column(table, ratio.over), column(table, ratio.under)
    rows = np.flatnonzero(mask & (table.arm == arm) & np.isfinite(over) & np.isfinite(under))
    size = table.design.sizes[arm]
    by = table.cluster[rows]
    tops, bottoms = (np.bincount(by, weights=values[rows], minlength=size).astype(np.float64) for values in (over, under))
    return Sums(ratio.times * tops, bottoms), rows


def _ratio(table: Table, options: Options, arm: int, mask: NDArray[np.bool_], ratio: Ratio) -> Draft:
    (control, rows), (treated, arm_rows) = (_sums(table, ratio, mask, which) for which in (0, arm))
    known = _known(table, options, arm, ratio, "all", (rows, arm_rows))
    if min(control.under.sum(), treated.under.sum()) <= 0:
        return Draft(replace(known, verdict="nothing to compare"))
    known = replace(
        known, control_value=control.ratio, arm_value=treated.ratio, not_enough=_too_few(known, options, ratio.requests)
    )
    if known.not_enough:
        return Draft(known)
    clusters = table.design.clusters(0, arm)
    if ratio.scale == "relative":
        if min(control.ratio, treated.ratio) <= 0:
            return Draft(replace(known, verdict="nothing to compare"))
        error = log_ratio_of_ratios_error(control, treated, paired=table.design.paired)
        return _draft(known, math.log(treated.ratio / control.ratio), error, clusters)
    events = (control.over.sum() + treated.over.sum()) / ratio.times
    if events == 0:
        return Draft(replace(known, verdict="no difference seen", change=0.0))
    if events < EVENTS:
        return Draft(replace(known, not_enough=f"{events:.0f} of {EVENTS} events in both arms together"))
    error = difference_error(control, treated, paired=table.design.paired)
    floor = math.hypot(*(_least_error(one, ratio.times) for one in (control, treated)))
    return _draft(known, treated.ratio - control.ratio, max(error, floor), clusters)


def _least_error(sums: Sums, times: float) -> float:
    """An arm without any event isn't known to have none: one more success and failure, as Agresti and Caffo (2000) add."""
    count = float(sums.under.sum())
    rate = (float(sums.over.sum()) / times + 1) / (count + 2)
    return times * math.sqrt(max(rate * (1 - rate), 0.0) / (count + 2))


def _correct(drafts: list[Draft], options: Options, arms: int) -> list[Comparison]:
    shares = {"primary": PRIMARY_SHARE, "overall": OVERALL_SHARE, "by prompt length": BUCKET_SHARE}
    done = {index: draft.comparison for index, draft in enumerate(drafts)}
    families: dict[tuple[str, str], list[int]] = {}
    for index, draft in enumerate(drafts):
        if draft.error > 0 or draft.estimate != 0:
            families.setdefault((draft.comparison.arm, draft.comparison.family), []).append(index)
    for (_, family), members in families.items():
        level = options.alpha * shares[family] / arms
        p = [p_value(_statistic(drafts[i]), drafts[i].clusters, options.looks) for i in members]
        adjusted, levels = holm(p, level)
        for i, raw, corrected, own in zip(members, p, adjusted, levels, strict=True):
            done[i] = _judge(drafts[i], options, raw, corrected, own, rejected=corrected <= level)
    return [done[index] for index in range(len(drafts))]


def _statistic(draft: Draft) -> float:
    return draft.estimate / draft.error if draft.error > 0 else math.inf


def _judge(draft: Draft, options: Options, p: float, adjusted: float, level: float, *, rejected: bool) -> Comparison:
    half = multiplier(level, draft.clusters, options.looks) * draft.error
    ends = (draft.estimate, draft.estimate - half, draft.estimate + half)
    known = draft.comparison
    if known.scale == "relative":
        ends = tuple(100 * math.expm1(min(end, 50.0)) for end in ends)
    lower = MEASURES[known.measure].lower_is_better
    verdict = ("better" if (ends[0] < 0) is lower else "worse") if rejected else "no difference seen"
    return replace(
        known,
        change=ends[0],
        low=ends[1],
        high=ends[2],
        confidence=1 - level,
        standard_error=draft.error,
        p=p,
        p_adjusted=adjusted,
        different=rejected,
        verdict=verdict,
    )
