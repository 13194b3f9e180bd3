"""Guard rails: an arm's recent requests against its limits. Plain objects; the caller owns the clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from .config import GuardConfig

MOST_SAMPLES = 8192
"""Requests that a window holds; older ones leave."""
MOST_GAPS = 32768


class Window:
    """What ended lately in one arm. Times in seconds; `now` never goes back by more than rounding."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._ends: deque[tuple[float, bool, float | None]] = deque(maxlen=MOST_SAMPLES)
        """When, whether it failed, time to the first token."""
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MOST_GAPS)
        self._fresh = False

    def note(self, now: float, *, failed: bool, ttft: float | None, gaps: Iterable[float]) -> None:
        self._ends.append((now, failed, ttft))
        self._gaps.extend((now, gap) for gap in gaps)
        self._fresh = True

    def problem(self, now: float, control: Window | None = None) -> str | None:
        """The limit that is passed, in words; None when all is well, too little is known, or nothing came since the last look.

        control: the control's window, for limits that go by it."""
        if not self._fresh:
            return None
        self._fresh = False
        self._forget(now)
        config, count = self._config, len(self._ends)
        if count < config.min_samples:
            return None
        failed = sum(end[1] for end in self._ends)
        if config.max_error_rate is not None and failed > config.max_error_rate * count:
            return f"{failed} of {count} requests failed; the limit is {config.max_error_rate:.2%}"
        theirs = ([], []) if control is None else control.samples(now)
        first, gaps = self.samples(now)
        return _passed(
            "the time to the first token", first, theirs[0], config.max_p99_ttft, config.max_p99_ttft_ratio, f"{len(first)} requests"
        ) or _passed(
            "inter-token latency", gaps, theirs[1], config.max_p99_inter_token, config.max_p99_inter_token_ratio,
            f"{len(gaps)} tokens of {count} requests",
        )  # fmt: skip

    def samples(self, now: float) -> tuple[list[float], list[float]]:
        """Times to the first token and inter-token latencies; both empty while fewer than `min_samples` requests are known."""
        self._forget(now)
        if len(self._ends) < self._config.min_samples:
            return [], []
        return [end[2] for end in self._ends if end[2] is not None], [gap for _, gap in self._gaps]

    def summary(self, now: float) -> dict[str, float | int | None]:
        """Of the window: requests, failed ones, P50 and P99 of the time to the first token (s)."""
        self._forget(now)
        first = [end[2] for end in self._ends if end[2] is not None]
        return {
            "requests": len(self._ends),
            "failed": sum(end[1] for end in self._ends),
            "p50_ttft": percentile(first, 50) if first else None,
            "p99_ttft": percentile(first, 99) if first else None,
        }

    def _forget(self, now: float) -> None:
        oldest = now - self._config.window
        while self._ends and self._ends[0][0] < oldest:
            self._ends.popleft()
        while self._gaps and self._gaps[0][0] < oldest:
            self._gaps.popleft()


def _passed(what: str, seen: list[float], control: list[float], most: float | None, ratio: float | None, of: str) -> str | None:
    """What is said of the P99 of `seen` when it is above `most` seconds, or above `ratio` times that of `control`."""
    if not seen:
        return None
    p99 = percentile(seen, 99)
    if most is not None and p99 > most:
        return f"P99 of {what} is {p99:.3f} s over {of}; the limit is {most:g} s"
    if ratio is not None and control and p99 > ratio * (theirs := percentile(control, 99)):
        return f"P99 of {what} is {p99:.3f} s over {of}, that of the control {theirs:.3f} s; the limit is {ratio:g} times that"
    return None


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` % of them don't pass. At least one value."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
