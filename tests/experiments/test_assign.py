"""Who gets which arm: fixed for ever, uniform, and never changed by a ramp."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.core.experiments.assign import arm_of, fraction, slice_arm, slice_at, takes_part, unit_of

VALUES = [f"user-{i}" for i in range(20_000)]
CHI2_19 = 43.82
"""0.999 quantile of chi-square with 19 degrees of freedom."""

GOLDEN = (0.05819330833181979, 0.95098376264986, 0.2746182728079497)
GOLDEN_SLICES = ["a", "b", "b", "a", "a", "b", "b", "a"]


def chi_square(counts, expected):
    return sum((count - expected) ** 2 / expected for count in counts)


def test_numbers_are_the_same_in_every_version():
    """Whoever changes these moves every user of every running experiment to another arm."""
    assert fraction("cache", "", "arm", "alice") == pytest.approx(GOLDEN[0], abs=1e-12)
    assert fraction("cache", "", "traffic", "alice") == pytest.approx(GOLDEN[1], abs=1e-12)
    assert fraction("cache", "2026", "arm", "alice") == pytest.approx(GOLDEN[2], abs=1e-12)
    assert [slice_arm("cache", "", 1, i, {"a": 1, "b": 1}) for i in range(8)] == GOLDEN_SLICES


@pytest.mark.parametrize("salt", ["", "one", "two"])
@pytest.mark.parametrize("purpose", ["arm", "traffic"])
def test_numbers_are_uniform(salt, purpose):
    bins = Counter(int(fraction("x", salt, purpose, value) * 20) for value in VALUES)
    assert set(bins) == set(range(20))
    assert chi_square(bins.values(), len(VALUES) / 20) < CHI2_19


def test_taking_part_says_nothing_about_the_arm():
    table = Counter(
        (int(fraction("x", "s", "arm", value) * 4), int(fraction("x", "s", "traffic", value) * 4)) for value in VALUES
    )
    assert chi_square([table[pair] for pair in itertools.product(range(4), repeat=2)], len(VALUES) / 16) < 37.7  # 15 degrees


def test_experiments_deal_independently():
    table = Counter((fraction("a", "", "arm", v) < 0.5, fraction("b", "", "arm", v) < 0.5) for v in VALUES)
    assert chi_square(table.values(), len(VALUES) / 4) < 16.27  # 3 degrees


def test_arms_have_their_shares():
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    counts = Counter(arm_of("x", "s", value, shares) for value in VALUES)
    assert sum((counts[arm] - n) ** 2 / n for arm, share in shares.items() for n in [share * len(VALUES)]) < 13.82  # 2 degrees


def test_shares_that_sum_to_less_than_one_by_rounding_leave_nobody_out():
    shares = dict.fromkeys("abcdefg", 0.9999999 / 7)
    assert {arm_of("x", "", value, shares) for value in VALUES} == set("abcdefg")


@given(st.text(), st.text(max_size=8), st.floats(0, 1), st.floats(0, 1))
def test_a_ramp_up_never_sends_anybody_away(value, salt, one, other):
    low, high = sorted((one, other))
    assert takes_part("x", salt, value, low) <= takes_part("x", salt, value, high)
    assert takes_part("x", salt, value, 1.0)
    assert not takes_part("x", salt, value, 0.0)


def test_a_share_of_traffic_is_that_share_of_units():
    count = sum(takes_part("x", "s", value, 0.1) for value in VALUES)
    assert abs(count - 2000) < 3.3 * (20_000 * 0.1 * 0.9) ** 0.5


def test_another_salt_deals_anew():
    same = sum((fraction("x", "1", "arm", v) < 0.5) == (fraction("x", "2", "arm", v) < 0.5) for v in VALUES)
    assert abs(same - 10_000) < 3.3 * 5000**0.5


def test_units_hide_their_value_and_differ_by_secret_and_experiment():
    units = {unit_of(secret, name, "alice") for secret in (b"1" * 32, b"2" * 32) for name in ("x", "y")}
    assert len(units) == 4
    assert all(len(unit) == 16 and "alice" not in unit for unit in units)
    assert unit_of(b"1" * 32, "x", "alice") in units


def test_any_text_can_be_a_value():
    assert 0 <= fraction("x", "\ud800", "arm", "\udcff\0") < 1
    assert unit_of(b"k", "x", "\udcff")


@given(st.integers(0, 500), st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=2), st.integers(1, 5))
def test_every_block_has_each_arm_as_often_as_its_weight(block, counts, run):
    size = sum(counts.values())
    arms = Counter(slice_arm("x", "s", run, block * size + i, counts) for i in range(size))
    assert arms == counts


def test_the_order_within_blocks_is_random_and_another_in_each_run():
    counts = {"a": 1, "b": 1}
    first = [slice_arm("x", "", 1, 2 * block, counts) for block in range(4000)]
    assert chi_square(Counter(first).values(), 2000) < 10.83  # 1 degree
    follows = Counter(itertools.pairwise(first))
    assert chi_square(follows.values(), 3999 / 4) < 16.27  # 3 degrees
    assert first != [slice_arm("x", "", 2, 2 * block, counts) for block in range(4000)]


def test_slices_are_counted_from_the_start():
    assert [slice_at(now, 100.0, 10.0) for now in (100.0, 109.999, 110.0, 135.0)] == [0, 0, 1, 3]
    assert slice_at(50.0, 100.0, 10.0) == 0, "a clock that went back"
