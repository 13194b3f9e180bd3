"""What the machine can do, measured in a fraction of a second: the yardstick for bytes and operations per step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class MachineLimits:
    read_bytes_per_second: float
    """CPU: best of a few sums over a tensor much larger than the caches. GPU: of a few copies of one, bytes read and bytes written."""
    flops_per_second: float
    """Best of a few square matrix products in the given dtype (2 n^3 operations each)."""


def measure_limits(
    dtype: torch.dtype, device: torch.device = CPU, *, megabytes: int = 96, size: int = 512, repeats: int = 3
) -> MachineLimits:
    """Takes about 50 ms on two cores. Uses torch's current thread count; other load on the machine lowers the figures. A GPU is measured
    with sizes of its own, which take `GPU_BYTES` of its memory for a moment."""
    if device.type == "cuda":
        return _measure_gpu(dtype, device, repeats)
    data = torch.ones(megabytes * 1024 * 1024 // 4)
    seconds = min(_timed(data.sum) for _ in range(repeats))
    a = torch.ones(size, size, dtype=dtype)
    product = min(_timed(lambda: a @ a) for _ in range(repeats + 1))
    return MachineLimits(data.numel() * 4 / seconds, 2 * size**3 / product)


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return max(time.perf_counter() - started, 1e-9)


COPIED = 512 * 1024 * 1024
"""Bytes; several times what a GPU caches."""
PRODUCT = {torch.float32: 2048}
"""Rows and columns of the matrices by dtype: enough for every multiprocessor. Others: 4096."""
GPU_BYTES = 2 * COPIED


def _measure_gpu(dtype: torch.dtype, device: torch.device, repeats: int) -> MachineLimits:
    """Less than 50 ms on a card of these days. Random numbers: some cards run faster on zeros."""
    found = MachineLimits(_copied(device, repeats), _multiplied(dtype, device, repeats))
    torch.cuda.empty_cache()  # the pool for K/V is sized by what is free
    return found


def _copied(device: torch.device, repeats: int) -> float:
    """Bytes a second."""
    source = torch.randint(0, 256, (COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _best(lambda: target.copy_(source), repeats)


def _multiplied(dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    """Operations a second."""
    size = PRODUCT.get(dtype, 4096)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), repeats)


def _best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` calls, by the GPU's own clock; one more before warms up."""
    call()
    seconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000)
    return max(min(seconds), 1e-9)
