"""How long a step takes, fitted from recorded steps.

seconds = sum of coefficient * feature, all coefficients >= 0 (so nothing that was hardly seen becomes a gain), over

    the step itself, rows that decode, drafts, prompt tokens, prompt chunks, rows that are sampled,
    K/V read, attention of prompt chunks (tokens times context), tokens of pictures and sounds that are encoded (their time is taken as it
    was recorded, where it was: it may have been spent in other steps than the one that runs them),
    rows beyond 4, 8, 16 ... 128 and rows up to as many (weights are what a small step waits for: the time for one more row changes)

by least squares over relative errors, with what is far off weighing less (Huber). Between two steps passes `overhead`: what the engine does
meanwhile, fitted the same way over the number of requests.

What the fit leaves over is mostly the machine: other processes, clock speed. `noise_at` gives it back by time of day: the ratio of real to
fitted seconds of the recorded step of the same kind that was nearest in time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from .history import StepRecord

BENDS = (4, 8, 16, 32, 64, 128)
"""Rows at which the time for one more may change."""
FEATURES = (
    "step", "decodes", "drafts", "prompt tokens", "chunks", "sampled rows", "K/V read", "chunk attention",
    "media tokens",
    *(f"rows beyond {bend}" for bend in BENDS), *(f"rows up to {bend}" for bend in BENDS),
)  # fmt: skip
ROUNDS = 8
"""Of reweighting."""
MEDIA = FEATURES.index("media tokens")
HUBER = 1.5
"""Times the typical error beyond which a step weighs less."""


class Run(NamedTuple):
    """One request's part of a step."""

    computed: int
    """Tokens whose K/V was there before."""
    n: int
    """Tokens run, drafts included."""
    drafts: int
    samples: bool
    prompt: bool
    """It runs prompt tokens, or recomputes."""
    media: int = 0
    """Tokens of the pictures and sounds that are encoded for it."""


def _encoding(steps: Sequence[StepRecord]) -> float | None:
    """Seconds for each token of a picture or sound, over all that was encoded; None where it was not recorded how long that took."""
    if any(one.step.encode_us is None for one in steps):
        return None
    tokens = sum(run.media for one in steps for run in one.runs)
    return sum(1e-6 * (one.step.encode_us or 0) for one in steps) / tokens if tokens else 0.0


def features(runs: Sequence[Run]) -> list[float]:
    """One value for each of FEATURES."""
    rows = sum(run.n for run in runs)
    drafts = sum(run.drafts for run in runs)
    decodes = [run for run in runs if not run.prompt]
    chunks = [run for run in runs if run.prompt]
    return [
        1.0,
        len(decodes),
        drafts,
        sum(run.n for run in chunks),
        len(chunks),
        sum(run.samples for run in runs) + drafts,
        sum(run.computed for run in runs),
        sum(run.n * (run.computed + run.n / 2) for run in chunks),
        sum(run.media for run in runs),
        *(max(0, rows - bend) for bend in BENDS),
        *(min(rows, bend) for bend in BENDS),
    ]


@dataclass
class Fit:
    """How well the fit describes the recorded steps, by relative error of a step's seconds."""

    steps: int
    median_error: float
    p90_error: float


class StepTimes:
    """`seconds` of a step, `overhead` after it. Made from recorded steps; at least one is needed."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        import numpy as np

        per_media_token = _encoding(steps)
        steps = [one for one in steps if one.runs]  # the others only encoded
        if not steps:
            raise ValueError("no step was recorded")
        table = np.array([features(one.runs) for one in steps])
        seconds = np.array([one.step.seconds for one in steps])
        if per_media_token is not None:
            table[:, MEDIA] = 0.0
            seconds -= np.array([1e-6 * (one.step.encode_us or 0) for one in steps])
        seconds = np.maximum(seconds, 1e-7)
        self._coefficients = fit(table, seconds)
        if per_media_token is not None:
            self._coefficients[MEDIA] = per_media_token
        fitted = np.maximum(table @ self._coefficients, 1e-7)
        self.least = float(seconds.min())
        errors = np.abs(fitted - seconds) / seconds
        self.fit = Fit(
            len(steps),
            float(np.median(errors)),
            float(np.quantile(errors, 0.9)),
        )
        self.most_rows = int(max(sum(run.n for run in one.runs) for one in steps))
        """Of a recorded step: beyond them the fit is a guess."""
        self._noise: dict[bool, tuple[list[float], list[float]]] = {}
        for chunked in (False, True):
            kind = [i for i, one in enumerate(steps) if any(run.prompt for run in one.runs) is chunked]
            self._noise[chunked] = [steps[i].step.at for i in kind], [float(seconds[i] / fitted[i]) for i in kind]
        self._overhead = self._fit_overhead(steps)

    def _fit_overhead(self, steps: Sequence[StepRecord]) -> np.ndarray:
        import numpy as np

        gaps = [
            (1.0, len(one.runs), max(0.0, after.step.at - one.step.at - one.step.seconds))
            for one, after in itertools.pairwise(steps)
            if one.open_after and after.step.step_id == one.step.step_id + 1
        ]
        if not gaps:
            return np.zeros(2)
        table = np.array(gaps)
        return nonnegative_least_squares(table[:, :2], table[:, 2])

    def seconds(self, runs: Sequence[Run], at: float | None = None) -> float:
        """Of a step; with the noise of the time `at`."""
        import numpy as np

        plain = max(float(np.dot(self._coefficients, features(runs))), 0.5 * self.least)
        return plain if at is None else plain * self.noise_at(at, any(run.prompt for run in runs))

    def noise_at(self, at: float, chunked: bool) -> float:
        times, ratios = self._noise[chunked] if self._noise[chunked][0] else self._noise[not chunked]
        place = bisect_left(times, at)
        if place == len(times) or (place and at - times[place - 1] <= times[place] - at):
            place -= 1
        return ratios[place]

    def overhead(self, requests: int) -> float:
        """Seconds from a step's result to the next plan."""
        return float(self._overhead[0] + self._overhead[1] * requests)


def fit(table: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients >= 0 with small errors of table @ coefficients, relative to it, few outliers aside; all seconds together come out as
    they were. (Relative to what was measured, slow steps would count for less than fast ones, and all would come out too short.)"""
    import numpy as np

    weights, fitted = np.ones(len(seconds)), np.full(len(seconds), float(np.median(seconds)))
    coefficients = np.zeros(table.shape[1])
    for _ in range(ROUNDS):
        scale = weights / fitted
        coefficients = nonnegative_least_squares(table * scale[:, None], seconds * scale)
        fitted = np.maximum(table @ coefficients, 0.1 * seconds.min())
        errors = np.abs(fitted - seconds) / fitted
        typical = max(float(np.median(errors)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, HUBER * typical / np.maximum(errors, 1e-12)))
    return coefficients * (seconds.sum() / max(float((table @ coefficients).sum()), 1e-12))


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0 that minimises |a x - b| (Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23), columns scaled first."""
    import numpy as np

    norms = np.linalg.norm(a, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    a = a / scale
    x = np.zeros(a.shape[1])
    active = np.zeros(a.shape[1], dtype=bool)
    for _ in range(3 * a.shape[1]):
        gradient = a.T @ (b - a @ x)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= 1e-12 * np.linalg.norm(b):
            break
        active[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[active] = np.linalg.lstsq(a[:, active], b, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                x = trial
                break
            steps = x[negative] / np.maximum(x[negative] - trial[negative], 1e-300)
            x = x + float(steps.min()) * (trial - x)
            active &= x > 1e-15
    return x / scale
