"""The sample-ratio check: does each arm have as many units as its weight says? If not, something decides who is counted, and no
comparison means what it seems to.

Where a unit (a user, a request) draws its arm, the test is chi-square on units, never on their requests. Time slices are dealt
out, not drawn: there each block must hold every arm once, and nothing is left to test; arms' numbers of requests may differ.
The limit for p is the customary one for a check that is read again and again: Fabijan et al., "Diagnosing sample ratio mismatch
in online controlled experiments" (KDD 2019).
"""

from __future__ import annotations

import numpy as np

from .result import RatioCheck
from .table import Table

LIMIT = 0.0005
LEAST_EXPECTED = 5
"""Units that each arm should have for the test to be one."""
UNITS = {"request": "requests", "slice": "slices", "user": "users", "key": "keys"}


def unit_name(split: str) -> str:
    return UNITS.get(split, f"values of {split.partition(':')[2]}" if split.startswith("header:") else "units")


def check_ratio(table: Table) -> RatioCheck:
    name = unit_name(table.split)
    names = [arm.name for arm in table.arms]
    counted, weights = _counted(table)
    observed = dict(zip(names, map(int, counted), strict=True))
    total, expected_share = counted.sum(), weights / weights.sum() if weights.sum() > 0 else weights
    expected = dict(zip(names, (float(round(one, 1)) for one in total * expected_share), strict=True))
    known = RatioCheck(unit=name, observed=observed, expected=expected)
    if len(names) < 2 or total == 0:
        return known
    if table.by_slice:
        return _replace(known, False, None, "slices are dealt out in turn, so there is nothing to test")
    if abs(weights.sum() - 1) > 0.01:
        missing = 1 - weights.sum()
        return _replace(
            known, True, None, f"the arms seen have weights of {weights.sum():.2f} together: {missing:.0%} is missing"
        )
    if (total * expected_share).min() < LEAST_EXPECTED:
        return _replace(known, False, None, f"too few {name} to test")
    from scipy.stats import chisquare

    p = float(chisquare(counted, total * expected_share).pvalue)
    text = "as expected" if p >= LIMIT else f"not as the weights say (chi-square, p = {p:.2g})"
    return _replace(known, p < LIMIT, p, text)


def _replace(known: RatioCheck, failed: bool, p: float | None, text: str) -> RatioCheck:
    return RatioCheck(unit=known.unit, observed=known.observed, expected=known.expected, p=p, failed=failed, text=text)


def _counted(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """(different units of each arm, weights), from when the weights last changed until an arm was switched off."""
    weights, arrival = table.columns["weight"], table.columns["arrival"]
    until = min(arm.until for arm in table.arms)
    since = -np.inf
    last = np.zeros(len(table.arms))
    for i in range(len(table.arms)):
        own = table.arm == i
        if own.any():
            at = arrival[own]
            last[i] = weights[own][np.argmax(at)]
            changed = at[weights[own] != last[i]]
            since = max(since, float(changed.max()) if len(changed) else -np.inf)
    unit = table.columns["unit"]
    counted = [len(np.unique(unit[(table.arm == i) & (arrival > since) & (arrival < until)])) for i in range(len(table.arms))]
    return np.array(counted), last
