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

    def problem(self, now: float) -> str | None:
        """The limit that is passed, in words; None when all is well, too little is known, or nothing came since the last look."""
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
        first = [end[2] for end in self._ends if end[2] is not None]
        if config.max_p99_ttft is not None and first and (seen := percentile(first, 99)) > config.max_p99_ttft:
            return f"P99 of the time to the first token is {seen:.3f} s over {len(first)} requests; the limit is {config.max_p99_ttft:g} s"
        gaps = [gap for _, gap in self._gaps]
        if config.max_p99_inter_token is not None and gaps and (seen := percentile(gaps, 99)) > config.max_p99_inter_token:
            return (
                f"P99 of inter-token latency is {seen:.3f} s over {len(gaps)} tokens of {count} requests; the limit is "
                f"{config.max_p99_inter_token:g} s"
            )
        return None

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


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank: the smallest value that at least `percent` % of them don't pass. At least one value."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]
