"""What the machine can do, measured in a fraction of a second: the yardstick for bytes and operations per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MachineLimits:
    read_bytes_per_second: float
    """Best of a few sums over a tensor much larger than the caches."""
    flops_per_second: float
    """Best of a few square matrix products in the given dtype (2 n^3 operations each)."""


def measure_limits(dtype: torch.dtype, *, megabytes: int = 96, size: int = 512, repeats: int = 3) -> MachineLimits:
    """Takes about 50 ms on two cores. Uses torch's current thread count; other load on the machine lowers the figures."""
    data = torch.ones(megabytes * 1024 * 1024 // 4)
    seconds = min(_timed(data.sum) for _ in range(repeats))
    a = torch.ones(size, size, dtype=dtype)
    product = min(_timed(lambda: a @ a) for _ in range(repeats + 1))
    return MachineLimits(data.numel() * 4 / seconds, 2 * size**3 / product)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, 1e-9)
