"""Multipliers and p-values against scipy and closed forms; Holm's procedure against its published example and its
definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tokenbus.core.experiments.report.intervals import PLANNED, holm, multiplier, p_value, rho_squared


@pytest.mark.parametrize("clusters", [5, 20, 300])
@pytest.mark.parametrize("alpha", [0.05, 0.001])
def test_one_look_is_the_ordinary_interval(alpha, clusters):
    assert multiplier(alpha, clusters, "once") == pytest.approx(stats.t.isf(alpha / 2, clusters - 1))
    assert p_value(2.3, clusters, "once") == pytest.approx(2 * stats.t.sf(2.3, clusters - 1))


def test_the_confidence_sequence_is_the_published_boundary():
    """With clusters without number Student's t is the normal distribution and the formula is left as it was published."""
    n, alpha = 1e9, 0.05
    x = n * rho_squared()
    radius = math.sqrt(
        2 * (n * rho_squared() + 1) / (n**2 * rho_squared()) * math.log(math.sqrt(n * rho_squared() + 1) / alpha)
    )
    assert multiplier(alpha, n, "any") / math.sqrt(n) == pytest.approx(radius, rel=1e-4)
    assert x > 1


def test_it_is_tightest_where_planned():
    """The width c(n)/sqrt(n) is least, relative to the best rho for that n, at PLANNED: another rho is wider there."""

    def width(rho2: float) -> float:
        x = PLANNED * rho2
        return math.sqrt(2 * (x + 1) / x * math.log(math.sqrt(x + 1) / 0.05))

    best = min(width(rho_squared() * factor) for factor in np.geomspace(0.1, 10, 401))
    assert width(rho_squared()) == pytest.approx(best, rel=1e-3)


@settings(deadline=None)
@given(
    alpha=st.floats(1e-4, 0.2),
    clusters=st.integers(5, 2000),
    looks=st.sampled_from(["any", "once"]),
)
def test_an_interval_excludes_zero_just_where_p_is_below_alpha(alpha, clusters, looks):
    edge = multiplier(alpha, clusters, looks)
    assert p_value(edge, clusters, looks) == pytest.approx(alpha, rel=1e-3)
    assert p_value(-edge * 1.01, clusters, looks) < alpha < p_value(edge * 0.99, clusters, looks)


def test_looking_again_and_again_needs_the_confidence_sequence():
    """Means of equal groups, read after each of 480 clusters: the ordinary interval excludes the truth far too often, the
    sequence doesn't."""
    draw = np.random.default_rng(5)
    sums = np.cumsum(draw.normal(size=(400, 500)), axis=1)
    squares = np.cumsum(np.square(np.diff(sums, prepend=0, axis=1)), axis=1)
    crossed = {"any": np.zeros(400, dtype=bool), "once": np.zeros(400, dtype=bool)}
    for n in range(20, 500):
        mean = sums[:, n - 1] / n
        error = np.sqrt((squares[:, n - 1] / n - mean**2) / (n - 1))
        for looks in crossed:
            crossed[looks] |= np.abs(mean) > multiplier(0.05, n, looks) * error
    assert crossed["any"].mean() <= 0.05
    assert crossed["once"].mean() > 0.2


def test_holm_on_a_worked_example():
    """Four tests: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04, which may not be below the one before."""
    adjusted, levels = holm([0.01, 0.04, 0.03, 0.005], 0.05)
    assert adjusted == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert levels == pytest.approx([0.05 / 3, 0.025, 0.025, 0.0125])


@settings(deadline=None)
@given(p=st.lists(st.floats(0, 1), min_size=1, max_size=12), alpha=st.floats(0.001, 0.2))
def test_holm_by_its_definition(p, alpha):
    adjusted, levels = holm(p, alpha)
    rejected = set()
    for step, index in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[index] * (len(p) - step) > alpha:
            break
        rejected.add(index)
    assert {i for i, one in enumerate(adjusted) if one <= alpha} == rejected
    assert all((p[i] <= levels[i] * (1 + 1e-12)) == (i in rejected) for i in range(len(p)))
    assert sorted(range(len(p)), key=lambda i: p[i]) == sorted(range(len(p)), key=lambda i: (adjusted[i], p[i]))


def test_holm_of_nothing():
    assert holm([], 0.05) == ([], [])
