"""Verdicts: what is found, what is not claimed, and what is refused for want of data."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from tokenbus.core.experiments.report.ratio_check import check_ratio


def by_measure(report, bucket="all"):
    return {row.measure: row for row in report.comparisons if row.bucket == bucket}


def test_a_slower_arm_is_found_and_said_in_plain_words(report_of, slices):
    report = report_of(slices(40, 40, slower=1.4), primary="ttft_p95")
    row = by_measure(report)["ttft_p95"]
    assert (row.verdict, row.different, row.family) == ("worse", True, "primary")
    assert row.low < 40 < row.high
    assert row.low > 0
    line = report.verdicts[0]
    assert line.startswith(f"B: P95 TTFT +{row.change:.0f} % [+{row.low:.0f}, +{row.high:.0f}]; ")
    assert "no difference seen in" in line
    assert report.paired
    assert not report.warnings


def test_a_faster_arm_is_better(report_of, slices):
    row = by_measure(report_of(slices(40, 40, slower=0.6), primary="ttft_p95"))["ttft_p95"]
    assert row.verdict == "better"
    assert row.high < 0


def test_equal_arms_are_not_called_different(report_of, slices):
    report = report_of(slices(40, 40))
    assert not [row for row in report.comparisons if row.different]
    assert report.verdicts[0].startswith("B: no difference seen in P50 TTFT")
    assert f"P99 TTFT ({by_measure(report)['ttft_p99'].change:+.0f} %"[:12] in report.verdicts[0]


def test_one_look_is_narrower_than_any_number(report_of, slices):
    rows = slices(40, 40)
    widths = {
        looks: (lambda r: r.high - r.low)(by_measure(report_of(rows, looks=looks))["ttft_p95"]) for looks in ("any", "once")
    }
    assert widths["once"] < widths["any"]


def test_every_interval_agrees_with_its_claim(report_of, slices):
    for slower in (1.0, 1.2, 1.5):
        for row in report_of(slices(30, 40, slower=slower), min_requests=50).comparisons:
            if row.low is not None:
                assert row.low <= row.change <= row.high
                assert row.different == (row.low > 0 or row.high < 0)
                assert row.p <= row.p_adjusted


@pytest.mark.parametrize(
    ("blocks", "per_slice", "why"),
    [(19, 60, "19 of 20 clusters"), (30, 20, "600 of 1000 requests"), (25, 39, "975 of 1000 requests")],
)
def test_too_little_is_said(report_of, slices, blocks, per_slice, why):
    row = by_measure(report_of(slices(blocks, per_slice)))["ttft_p99"]
    assert row.verdict == "not enough data"
    assert row.not_enough == why
    assert (row.change, row.low, row.p, row.different) == (None, None, None, False)
    assert row.control_value is not None


def test_nothing_at_all_is_enough(report_of, slices):
    assert report_of(slices(3, 5)).verdicts == ["B: not enough data (15 of 1000 requests)"]


def test_a_tail_of_few_clusters_is_no_evidence(report_of, slices):
    """2 % of the requests took 9 s, all of them in four blocks."""
    rows = [
        replace(r, ttft=9.0) if r.slice in {10, 11, 20, 21, 30, 31, 40, 41} and i % 5 == 0 else r
        for i, r in enumerate(slices(40, 40))
    ]
    row = by_measure(report_of(rows))["ttft_p95"]
    assert row.verdict == "no difference seen"
    rows = [replace(r, ttft=0.1 if r.ttft < 9 else 9.0 + r.arrival % 60) for r in rows]
    row = by_measure(report_of(rows))["ttft_p99"]
    assert row.not_enough == "only 4 clusters reach it, 5 are needed"


def test_only_one_arm(report_of, row):
    assert report_of([row()]).verdicts == ["only arm A has rows: nothing to compare"]


def test_errors_are_compared_by_difference(report_of, slices):
    rows = slices(40, 50)
    draw = np.random.default_rng(1)
    rows = [replace(r, status=500, ttft=None, gaps=[]) if r.arm == "B" and draw.uniform() < 0.08 else r for r in rows]
    row = by_measure(report_of(rows))["errors"]
    assert (row.scale, row.verdict, row.control_value) == ("difference", "worse", 0.0)
    assert row.low < 8 < row.high
    assert "errors +8" in report_of(rows).verdicts[0] or "errors +7" in report_of(rows).verdicts[0]


def test_clients_own_errors_are_not_the_arms(report_of, slices):
    rows = [replace(r, status=400) if r.arm == "B" and i % 5 == 0 else r for i, r in enumerate(slices(30, 40))]
    assert by_measure(report_of(rows))["errors"].arm_value == 0.0


def test_a_few_rare_events_are_not_judged(report_of, slices):
    rows = slices(30, 40)
    at = [i for i, r in enumerate(rows) if r.arm == "B"][:9]
    rows = [replace(r, preemptions=1) if i in at else r for i, r in enumerate(rows)]
    assert by_measure(report_of(rows))["preemptions"].not_enough == "9 of 10 events in both arms together"


def test_none_is_not_zero(report_of, slices):
    """A measure that no row knows is left out, not called equal."""
    report = report_of(slices(30, 40))
    assert by_measure(report)["acceptance"].verdict == "nothing to compare"
    assert "accepted drafts" not in report.verdicts[0]
    known = report_of(slices(30, 40, draft_tokens=10, accepted_tokens=5))
    assert by_measure(known)["acceptance"].control_value == 50.0


def test_buckets_by_prompt_length(report_of, slices):
    report = report_of(slices(40, 60, slower=1.5), buckets=(100, 400), min_requests=50)
    assert list(dict.fromkeys(row.bucket for row in report.comparisons)) == ["all", "1-100", "101-400", "over 400"]
    whole, part = by_measure(report)["ttft_p50"], by_measure(report, "over 400")["ttft_p50"]
    assert part.requests[0] < whole.requests[0]
    assert part.family == "by prompt length"
    assert part.confidence > by_measure(report)["ttft_p99"].confidence


def test_three_arms_share_alpha(report_of, row):
    draw = np.random.default_rng(2)
    arms = draw.choice(list("ABC"), 6000)
    rows = [
        row(arm=a, weight=1 / 3, unit=f"{i:016x}", ttft=float(0.1 * np.exp(draw.normal(0, 0.3)) * (1.5 if a == "C" else 1)))
        for i, a in enumerate(arms)
    ]
    report = report_of(rows)
    found = {r.arm: r for r in report.comparisons if r.measure == "ttft_p99"}
    assert (found["B"].verdict, found["C"].verdict) == ("no difference seen", "worse")
    assert found["B"].confidence == pytest.approx(1 - 0.05 * 0.5 / 2)
    assert [line[0] for line in report.verdicts] == ["B", "C"]


def test_shared_steps_are_said(report_of, row):
    assert any("shared engine steps" in warning for warning in report_of([row(shared_steps=True), row(arm="B")]).warnings)


def units(row, a, b, **more):
    named = [("A", i) for i in range(a)] + [("B", i) for i in range(a, a + b)]
    return [row(arm=arm, unit=f"{i:016x}", **more) for arm, i in named]


def test_the_sample_ratio_is_scipys_chi_square(table_of, row):
    check = check_ratio(table_of(units(row, 540, 460)))
    assert check.p == pytest.approx(stats.chisquare([540, 460]).pvalue)
    assert not check.failed
    assert check.expected == {"A": 500.0, "B": 500.0}


def test_a_wrong_sample_ratio_ends_every_verdict(report_of, row):
    report = report_of(units(row, 700, 500))
    assert report.ratio_check.failed
    assert report.verdicts[0].startswith("B: no verdict, the requests are not divided as they should be")
    assert "700" not in report.verdicts[0]
    assert "weights say" in report.warnings[0]


def test_units_are_tested_not_their_requests(table_of, row):
    """One user of B sends 500 requests: 100 users each is still what it should be."""
    rows = units(row, 100, 100, split="user") + [row(arm="B", unit=f"{150:016x}", split="user")] * 500
    check = check_ratio(table_of(rows))
    assert (check.unit, check.observed, check.failed) == ("users", {"A": 100, "B": 100}, False)


def test_weights_that_change_count_from_then_on(table_of, row):
    rows = units(row, 900, 100, arrival=10.0)
    rows = [replace(r, weight=0.9 if r.arm == "A" else 0.1) for r in rows]
    later = [row(arm="AB"[i % 2], unit=f"{5000 + i:016x}", arrival=20.0) for i in range(400)]
    check = check_ratio(table_of([*rows, *later]))
    assert (check.observed, check.failed) == ({"A": 200, "B": 200}, False)


def test_an_arm_without_rows_fails_the_check(table_of, row):
    check = check_ratio(table_of(units(row, 50, 50, weight=1 / 3)))
    assert check.failed
    assert "33% is missing" in check.text


def test_after_a_guard_rail_the_control_goes_on_alone(report_of, row):
    """B is compared up to its end; the control's later rows are neither a ratio mismatch nor part of the comparison."""
    rows = [row(arm="AB"[i % 2], unit=f"{i:016x}", arrival=float(i)) for i in range(400)]
    rows += [row(unit=f"{1000 + i:016x}", arrival=500.0 + i, ttft=5.0) for i in range(400)]
    rows += [row(arm="B", unit=f"{2000 + i:016x}", arrival=500.0 + i, excluded="tripped", weight=0.0) for i in range(400)]
    report = report_of(rows)
    assert not report.ratio_check.failed
    assert by_measure(report)["ttft_p50"].requests == (200, 200)
    assert any("switched arm B off: 400 of its requests" in warning for warning in report.warnings)


def test_an_uneven_washout_is_said(report_of, slices):
    rows = [replace(r, washout=True) if r.arm == "B" and i % 3 == 0 else r for i, r in enumerate(slices(30, 20))]
    assert any("wash-out" in warning and "A 0%, B 3" in warning for warning in report_of(rows).warnings)


def test_slices_that_are_too_short_are_told(report_of, slices):
    rows = [replace(r, washout=i % 5 < 2) for i, r in enumerate(slices(30, 20))]
    assert any("slices are too short for requests that take up to 0." in warning for warning in report_of(rows).warnings)
    assert not any("too short" in warning for warning in report_of(slices(30, 20)).warnings)


def windows(row, count, slower=1.0, seed=3, per_window=40):
    """Arms that run at the same time, each on an engine of its own; an engine's requests of one window are slow or quick together."""
    draw = np.random.default_rng(seed)
    rows = []
    for window in range(count):
        load = 0.3 * np.sin(window / 5)
        for arm, factor in (("A", 1.0), ("B", slower)):
            mood = load + draw.normal(0, 0.2)
            for _ in range(per_window):
                arrival = 30.0 * window + float(draw.uniform(0, 29))
                ttft = 0.1 * factor * float(np.exp(mood + draw.normal(0, 0.2)))
                rows.append(
                    row(
                        arm=arm, control=arm == "A", own_engine=True, slice=window, unit=f"{len(rows):016x}", arrival=arrival,
                        ended=arrival + 1, ttft=ttft, e2e=ttft + 0.1, prompt_tokens=64,
                    )
                )  # fmt: skip
    return [*rows, row(own_engine=True, slice=count, unit="f" * 16, arrival=30.0 * count, ended=30.0 * count + 1)]


def test_engines_of_their_own_are_compared_by_time_windows(report_of, table_of, row):
    rows = windows(row, 60, slower=1.5)
    table = table_of(rows)
    assert (table.design.paired, table.design.sizes, len(table)) == (True, (60, 60), 60 * 80)
    report = report_of(rows, primary="ttft_p50", looks="once")
    found = by_measure(report)
    assert (found["ttft_p50"].verdict, found["ttft_p50"].clusters) == ("worse", (60, 60))
    assert found["ttft_p50"].low < 50 < found["ttft_p50"].high
    assert "throughput" not in found, "the split decides it, not the arm"
    assert report.ratio_check.observed == {"A": 2400, "B": 2400}
    assert report.method[0].startswith("Clusters: time windows")
    assert not any("shared" in warning for warning in report.warnings)


def test_requests_of_one_engine_are_not_taken_for_independent(report_of, row):
    """Equal arms: by requests, far more than alpha of these reports would see a difference."""
    options = {"primary": "ttft_p50", "looks": "once", "alpha": 0.1, "buckets": ()}
    made = [by_measure(report_of(windows(row, 25, seed=seed, per_window=30), **options))["ttft_p50"] for seed in range(40)]
    assert sum(one.different for one in made) <= stats.binom.ppf(0.999, 40, 0.1)
    alone = [
        by_measure(
            report_of([replace(r, own_engine=False, slice=None) for r in windows(row, 25, seed=seed, per_window=30)], **options)
        )
        for seed in range(10)
    ]
    assert sum(one["ttft_p50"].different for one in alone) >= 4, "the data are what the design is for"


def test_false_alarms_of_whole_reports_are_rare(report_of, slices):
    """40 pairs of equal arms, every measure of every bucket: no more than alpha of them are called different in anything. (More
    of it, with repeated looks: bench/ab_power.py.)"""
    made = [
        report_of(slices(21, 12, seed=seed), alpha=0.2, looks="once", min_requests=20, buckets=(500,)) for seed in range(40)
    ]
    assert all(len([row for row in report.comparisons if row.p is not None]) >= 8 for report in made)
    alarms = sum(any(row.different for row in report.comparisons) for report in made)
    assert alarms <= stats.binom.ppf(0.999, 40, 0.2)


def test_values_that_never_vary(report_of, row):
    """All gaps alike: nothing to estimate an error from, and nothing that differs; with another value in B a difference for sure."""
    rows = [row(arm="AB"[i % 2], unit=f"{i:016x}", ttft=0.1, gaps=[20.0, 20.0]) for i in range(600)]
    found = by_measure(report_of(rows))["itl_p50"]
    assert (found.verdict, found.change, found.not_enough) == ("no difference seen", 0.0, "")
    found = by_measure(report_of([replace(r, gaps=[30.0]) if r.arm == "B" else r for r in rows]))["itl_p50"]
    assert (found.verdict, found.change, found.low) == ("worse", pytest.approx(50), pytest.approx(50))


def test_nothing_but_what_is_left_out(report_of, row):
    rows = [row(washout=True), row(arm="B", excluded="failed"), row(arm="B", excluded="failed")]
    report = report_of(rows)
    assert {found.verdict for found in report.comparisons} == {"nothing to compare"}
    assert report.verdicts == ["B: not enough data (no row of it can be compared)"]
    assert [(arm.name, arm.requests, arm.washout) for arm in report.arms] == [("A", 0, 1), ("B", 0, 0)]
