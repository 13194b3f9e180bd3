"""How sure: multipliers of a standard error, p-values, Holm's correction. Distributions are scipy's.

An estimate is judged by z = estimate / standard error, where the standard error comes from clusters. Few clusters make that
standard error itself uncertain, so z is read from Student's t with `clusters - 1` degrees of freedom (`_normal`, `_student`).

Repeated looks: by default a result may be looked at after every request and be stopped at because of what it shows. The
boundary is that of an asymptotic confidence sequence: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit
theory and asymptotic confidence sequences", Annals of Statistics 52 (2024), the Gaussian mixture one, with n counted in clusters:

    c(n)^2 = 2 (x + 1) / x * log(sqrt(x + 1) / alpha),    x = n * rho^2

where rho makes the sequence tightest at PLANNED clusters (fixed beforehand: it must not depend on the data). "once" is the
ordinary two-sided interval, right for one look whose time was fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Looks = Literal["any", "once"]
PLANNED = 50
"""Clusters of each arm at which the confidence sequence is tightest."""
TIGHT_AT = 0.05
"""The alpha for which that holds; rho may not differ between the levels that Holm's correction compares."""


def rho_squared() -> float:
    part = -2 * math.log(TIGHT_AT)
    return (part + math.log(part + 1)) / PLANNED


def multiplier(alpha: float, clusters: float, looks: Looks) -> float:
    """How many standard errors an interval of confidence `1 - alpha` reaches to each side. `clusters` is at least 2."""
    from scipy.stats import norm

    if looks == "once":
        return _student(float(norm.isf(alpha / 2)), clusters)
    x = clusters * rho_squared()
    return _student(math.sqrt(2 * (x + 1) / x * math.log(math.sqrt(x + 1) / alpha)), clusters)


def p_value(statistic: float, clusters: float, looks: Looks) -> float:
    """The smallest alpha whose interval excludes 0, at most 1; for looks "any" it is valid whenever one stops."""
    from scipy.stats import norm

    z = _normal(abs(statistic), clusters)
    if looks == "once":
        return float(2 * norm.sf(z))
    x = clusters * rho_squared()
    return min(1.0, math.sqrt(x + 1) * math.exp(-z * z * x / (2 * (x + 1))))


def _student(z: float, clusters: float) -> float:
    """The quantile of Student's t that leaves as much in the tail as z does of the normal distribution."""
    from scipy.stats import norm, t

    return float(t.isf(norm.sf(z), clusters - 1))


def _normal(statistic: float, clusters: float) -> float:
    from scipy.stats import norm, t

    return float(norm.isf(t.sf(statistic, clusters - 1)))


def holm(p_values: Sequence[float], alpha: float) -> tuple[list[float], list[float]]:
    """Holm's step-down correction over one family: (adjusted p-values, the level at which each hypothesis was judged).

    Rejected is what has an adjusted p of at most `alpha`. A level is alpha over the number of hypotheses that were still open
    at its step; those that were not rejected get the level of the step that ended it. An interval of confidence 1 - level
    excludes 0 exactly where Holm rejects.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, levels = [1.0] * len(order), [alpha] * len(order)
    highest, open_at_end = 0.0, len(order)
    for step, index in enumerate(order):
        still_open = len(order) - step
        highest = max(highest, min(1.0, still_open * p_values[index]))
        adjusted[index] = highest
        if highest <= alpha:
            open_at_end = still_open - 1
            levels[index] = alpha / still_open
        else:
            levels[index] = alpha / open_at_end
    return adjusted, levels
