"""Device time of a call: replays of a CUDA graph between two events, so that what the host does in between is not in it."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

REPLAY_SECONDS = 2e-3
"""That a replay takes at least: events and the graph's start are then less than a percent of it."""
LEAST, MOST = 7, 200
"""Replays."""


@dataclass(frozen=True)
class Times:
    """Seconds of one call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def shown(self, unit: float = 1e-6) -> str:
        """Median (smallest ... largest), in microseconds unless told."""
        return f"{self.median / unit:.4g} ({min(self.samples) / unit:.4g} ... {max(self.samples) / unit:.4g})"


def measure(call: Callable[[int], Any], copies: int = 1, seconds: float = 0.3) -> Times:
    """Time of call(i), i going round `copies` sets of inputs, which together are several times the L2, or one that is by itself.

    It is called before, so that what is compiled at the first call isn't timed. On a CPU: its wall-clock time. seconds: about how long
    to measure."""
    if not torch.cuda.is_available():
        return Times(tuple(_wall(call, copies) for _ in range(LEAST)))
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    rough = _wall(call, copies)
    calls = copies * max(1, math.ceil(REPLAY_SECONDS / (rough * copies)))
    graph = _captured(call, copies, calls)
    repeats = min(MOST, max(LEAST, round(seconds / (rough * calls))))
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(2):
        graph.replay()
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return Times(tuple(a.elapsed_time(b) / 1e3 / calls for a, b in itertools.pairwise(marks)))


def _wall(call: Callable[[int], Any], copies: int) -> float:
    began = time.perf_counter()
    for i in range(copies):
        call(i)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / copies


def _captured(call: Callable[[int], Any], copies: int, calls: int) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries set themselves up on the stream of their first call
        for i in range(copies):
            call(i)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i % copies)
    return graph


def copies_for(nbytes: int) -> int:
    """How many sets of inputs of so many bytes are four times the L2."""
    if not torch.cuda.is_available():
        return 1
    return max(1, math.ceil(4 * torch.cuda.get_device_properties(0).L2_cache_size / nbytes))
