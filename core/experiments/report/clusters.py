"""Uncertainty by cluster: the cluster bootstrap for quantiles, the delta method for ratios of sums.

Rows of one cluster (a user, a time slice) depend on each other, so clusters are what is resampled, never rows. A `Design` says
which clusters there are. Paired: each cluster is a block of time slices that holds every arm once, or a time window in which
every arm's own engine ran; a block is resampled with all its arms, so that what drifts over the day cancels. Otherwise each arm
has clusters of its own, resampled apart.

Sources: Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 8 for clusters and pairs; Deng, Knoblich, Lu,
"Applying the delta method in metric analytics" (KDD 2018) for ratios and for quantiles of clustered values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
REPLICATES = 1000
CELLS = 128
"""Most cells around one quantile; neighbouring values are counted together where there are more."""
WINDOW = 8.0
"""Half the width of the range that cells cover, in standard errors of the quantile's rank."""


@dataclass(frozen=True)
class Design:
    """`sizes[arm]`: number of clusters; paired designs have one number. Random weights come from `seed` alone."""

    sizes: tuple[int, ...]
    paired: bool
    seed: int = 1
    replicates: int = REPLICATES

    def clusters(self, control: int, arm: int) -> float:
        """Clusters that a comparison rests on: blocks, or the smaller arm's."""
        return min(self.sizes[control], self.sizes[arm])

    @cached_property
    def weights(self) -> tuple[Floats, ...]:
        """For each arm `[replicates, clusters]`: how often each cluster was drawn; one and the same array where arms are
        paired."""
        draw = np.random.default_rng(self.seed)

        def of(size: int) -> Floats:
            return draw.multinomial(size, np.full(size, 1 / size), self.replicates).astype(np.float64)

        return (of(self.sizes[0]),) * len(self.sizes) if self.paired else tuple(of(size) for size in self.sizes)


def quantiles(ordered: Floats, probabilities: Floats) -> Floats:
    """Smallest values with at least that share of all at or below them (the inverse of the empirical distribution function)."""
    ranks = np.ceil(np.asarray(probabilities) * len(ordered) - 1e-9).astype(np.int64) - 1
    return ordered[np.clip(ranks, 0, len(ordered) - 1)]


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of one arm's values."""

    estimates: Floats
    """[probabilities]"""
    replicates: Floats
    """[replicates, probabilities]; NaN for those that were not wanted."""
    reach: Indices
    """[probabilities]: clusters that have a value as large as the estimate."""


def bootstrap_quantiles(
    values: Floats, clusters: Indices, weights: Floats, probabilities: Floats, wanted: NDArray[np.bool_] | None = None
) -> Quantiles:
    """`clusters[i]`, below `weights.shape[1]`, is where `values[i]` belongs. There is at least one value. `wanted`, one for
    each of `probabilities`, says of which replicates are needed.

    A replicate weighs each value by how often its cluster was drawn. To make that a matrix product, the values around a
    quantile are counted in cells by cluster; the first cell has all below it. In samples of a few hundred a cell is a single
    value, so that replicates are exact.
    """
    size = weights.shape[1]
    ordered = np.sort(values)
    estimates = quantiles(ordered, probabilities)
    reach = np.array([len(np.unique(clusters[values >= estimate])) for estimate in estimates], dtype=np.int64)
    replicates = np.full((len(weights), len(estimates)), np.nan)
    totals = weights @ np.bincount(clusters, minlength=size)
    for i in range(len(estimates)) if wanted is None else np.flatnonzero(wanted):
        scores = np.bincount(clusters, weights=(values <= estimates[i]) - probabilities[i], minlength=size)
        edges = np.unique(ordered[_ranks(len(values), probabilities[i], float(np.sqrt(scores @ scores)))])
        cells = np.searchsorted(edges, values, side="left")
        inside = cells < len(edges)
        places = clusters[inside] * len(edges) + cells[inside]
        counts = np.bincount(places, minlength=size * len(edges)).reshape(size, len(edges))
        below = np.cumsum(weights @ counts, axis=1)
        found = (below < probabilities[i] * totals[:, None] - 1e-9).sum(axis=1)
        replicates[:, i] = edges[np.minimum(found, len(edges) - 1)]
    return Quantiles(estimates, replicates, reach)


def _ranks(total: int, probability: float, error: float) -> Indices:
    """Ranks of the values that end a cell: WINDOW times the standard error of the quantile's rank to each side."""
    half = int(WINDOW * error) + 20
    middle = int(probability * total)
    low, high = max(0, middle - half), min(total - 1, middle + half)
    return np.unique(np.linspace(low, high, min(CELLS, high - low + 1)).astype(np.int64))


def log_ratio_error(control: Floats, arm: Floats) -> float:
    """Standard error of log(arm / control) from replicates `[replicates]` of both."""
    return float(np.std(np.log(arm) - np.log(control), ddof=1))


@dataclass(frozen=True)
class Sums:
    """A ratio of sums in one arm, by cluster: `over[c] / under[c]` summed up."""

    over: Floats
    under: Floats

    @property
    def ratio(self) -> float:
        return float(self.over.sum() / self.under.sum())

    def scores(self) -> Floats:
        """First-order effect of each cluster on the ratio."""
        return (self.over - self.ratio * self.under) / self.under.sum()


def difference_error(control: Sums, arm: Sums, *, paired: bool) -> float:
    """Standard error of the difference of two ratios."""
    return _error(control.scores(), arm.scores(), paired=paired)


def log_ratio_of_ratios_error(control: Sums, arm: Sums, *, paired: bool) -> float:
    """Standard error of log(arm's ratio / control's ratio); both are above 0."""
    return _error(control.scores() / control.ratio, arm.scores() / arm.ratio, paired=paired)


def _error(control: Floats, arm: Floats, *, paired: bool) -> float:
    if paired:
        return _spread(arm - control)
    return float(np.hypot(_spread(control), _spread(arm)))


def _spread(scores: Floats) -> float:
    count = len(scores)
    return float(np.sqrt(count / (count - 1) * np.square(scores - scores.mean()).sum()))
