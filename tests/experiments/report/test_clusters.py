"""Errors by cluster: known answers, a bootstrap done by hand, and how often intervals hold the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tokenbus.core.experiments.report.clusters import (
    Design,
    Sums,
    bootstrap_quantiles,
    difference_error,
    log_ratio_error,
    log_ratio_of_ratios_error,
    quantiles,
)
from tokenbus.core.experiments.report.intervals import multiplier

P = np.array([0.5, 0.95, 0.99])


@pytest.mark.parametrize("count", [1, 2, 99, 100, 1000])
def test_quantiles_are_numpys_inverse_of_the_distribution_function(count):
    values = np.sort(np.random.default_rng(count).lognormal(size=count))
    assert quantiles(values, P) == pytest.approx(np.quantile(values, P, method="inverted_cdf"))


@pytest.mark.parametrize("ties", [False, True])
def test_a_replicate_is_the_quantile_of_the_drawn_clusters(ties):
    """Clusters repeated as often as they were drawn, and the quantile taken of that."""
    draw = np.random.default_rng(1)
    values = draw.integers(0, 9, 90).astype(float) if ties else draw.lognormal(size=90)
    clusters = draw.integers(0, 12, 90)
    weights = Design((12,), paired=False, seed=4, replicates=50).weights[0]
    found = bootstrap_quantiles(values, clusters, weights, P)
    for drawn, replicate in zip(weights, found.replicates, strict=True):
        repeated = np.sort(np.repeat(values, drawn[clusters].astype(int)))
        assert replicate == pytest.approx(quantiles(repeated, P))
    assert found.estimates == pytest.approx(quantiles(np.sort(values), P))


def test_many_values_in_cells_are_as_good():
    """200,000 values, 100 clusters: within a hundredth of a standard error of the exact replicates."""
    draw = np.random.default_rng(2)
    clusters = np.repeat(np.arange(100), 2000)
    values = draw.lognormal(size=200_000) * np.exp(draw.normal(0, 0.2, 100))[clusters]
    weights = Design((100,), paired=False, seed=4, replicates=40).weights[0]
    found = bootstrap_quantiles(values, clusters, weights, P)
    exact = np.array([quantiles(np.sort(np.repeat(values, drawn[clusters].astype(int))), P) for drawn in weights])
    assert (np.abs(found.replicates - exact) <= 0.25 * exact.std(axis=0)).all()
    assert found.replicates.std(axis=0) == pytest.approx(exact.std(axis=0), rel=0.03)


def test_only_wanted_quantiles_are_resampled():
    values, clusters = np.arange(40.0), np.arange(40) % 10
    found = bootstrap_quantiles(values, clusters, Design((10,), False).weights[0], P, np.array([True, False, True]))
    assert np.isnan(found.replicates).all(axis=0).tolist() == [False, True, False]


def test_reach_counts_clusters():
    values = np.array([1.0] * 98 + [50.0, 60.0])
    clusters = np.array([i % 10 for i in range(98)] + [3, 4])
    assert bootstrap_quantiles(values, clusters, Design((10,), False).weights[0], P).reach.tolist() == [10, 10, 2]


def test_the_error_of_a_median_is_the_textbooks():
    """Independent normal values: sqrt(pi / 2) * sigma / sqrt(n)."""
    draw = np.random.default_rng(6)
    values = draw.normal(100, 10, 4000)
    found = bootstrap_quantiles(values, np.arange(4000), Design((4000,), False, replicates=400).weights[0], np.array([0.5]))
    assert found.replicates.std() == pytest.approx(np.sqrt(np.pi / 2) * 10 / np.sqrt(4000), rel=0.2)


def test_a_mean_over_single_rows_has_scipys_standard_errors():
    draw = np.random.default_rng(7)
    a, b = draw.normal(5, 1, 60), draw.normal(6, 2, 60)
    one = np.ones(60)
    unpaired = difference_error(Sums(a, one), Sums(b, one), paired=False)
    assert unpaired == pytest.approx((b.mean() - a.mean()) / stats.ttest_ind(b, a, equal_var=False).statistic)
    paired = difference_error(Sums(a, one), Sums(b, one), paired=True)
    assert paired == pytest.approx((b.mean() - a.mean()) / stats.ttest_rel(b, a).statistic)


def test_a_ratio_has_the_delta_methods_error():
    """var(X/Y) to first order, written out with means, variances and covariance."""
    draw = np.random.default_rng(8)
    under = draw.uniform(10, 100, 80)
    over = under * draw.normal(0.3, 0.05, 80)
    mx, my = over.mean(), under.mean()
    covariance = np.cov(over, under)
    variance = (covariance[0, 0] / my**2 - 2 * mx * covariance[0, 1] / my**3 + mx**2 * covariance[1, 1] / my**4) / 80
    none = Sums(np.full(80, 0.3), np.ones(80))
    assert difference_error(none, Sums(over, under), paired=False) == pytest.approx(np.sqrt(variance))
    assert log_ratio_of_ratios_error(none, Sums(over, under), paired=False) == pytest.approx(np.sqrt(variance) / (mx / my))


def test_rows_of_one_cluster_are_no_new_evidence():
    """Each row written ten times into its cluster: the errors stay as they were."""
    draw = np.random.default_rng(9)
    values, weights = draw.lognormal(size=50), Design((50,), False).weights[0]
    once = bootstrap_quantiles(values, np.arange(50), weights, P)
    often = bootstrap_quantiles(np.repeat(values, 10), np.repeat(np.arange(50), 10), weights, P)
    assert often.replicates.std(axis=0) == pytest.approx(once.replicates.std(axis=0), rel=0.1)


def test_pairs_take_out_what_blocks_have_in_common():
    """A drift ten times the noise: paired by block the error is small, unpaired it is the drift's."""
    draw = np.random.default_rng(10)
    drift = np.repeat(np.exp(draw.normal(0, 0.5, 40)), 30)
    blocks = np.repeat(np.arange(40), 30)
    arms = [drift * np.exp(draw.normal(0, 0.05, 1200)) for _ in range(2)]
    errors = []
    for paired in (True, False):
        design = Design((40, 40), paired)
        both = [bootstrap_quantiles(v, blocks, w, P) for v, w in zip(arms, design.weights, strict=True)]
        errors.append(log_ratio_error(both[0].replicates[:, 0], both[1].replicates[:, 0]))
    assert errors[0] < 0.25 * errors[1]


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_hold_the_truth_as_often_as_they_say(paired):
    """P95 of values in clusters with effects of their own, arm B 10 % slower: 95 % intervals in 300 experiments."""
    draw = np.random.default_rng(11)
    held = 0
    for seed in range(300):
        common = draw.normal(0, 0.3, (2, 40)) if not paired else np.tile(draw.normal(0, 0.3, 40), (2, 1))
        clusters = np.repeat(np.arange(40), 25)
        design = Design((40, 40), paired, seed, replicates=200)
        both = [
            bootstrap_quantiles(
                np.exp(common[i][clusters] + draw.normal(0, 0.5, 1000)) * (1.1 if i else 1.0),
                clusters,
                design.weights[i],
                P[1:2],
            )
            for i in range(2)
        ]
        estimate = np.log(both[1].estimates[0] / both[0].estimates[0])
        error = log_ratio_error(both[0].replicates[:, 0], both[1].replicates[:, 0])
        held += abs(estimate - np.log(1.1)) <= multiplier(0.05, 40, "once") * error
    low, high = stats.binom.ppf([0.001, 0.999], 300, 0.95)
    assert low <= held <= high + 6  # a little too wide is allowed, too narrow is not


def test_weights_are_the_seeds_alone():
    first, again, other = (Design((30, 20), False, seed).weights for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert (first[0] != other[0]).any()
    assert first[0].sum(axis=1).tolist() == [30.0] * len(first[0])
    paired = Design((30, 30), True).weights
    assert paired[0] is paired[1]
