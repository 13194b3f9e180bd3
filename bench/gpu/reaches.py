"""What the kernels and the engine should reach, and whether they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

CONTEXTS = (4096, 8192, 16384, 32768)
"""Tokens of each request in decode attention."""


@dataclass(frozen=True)
class Reach:
    what: str
    reach: str
    names: tuple[str, ...]
    """Figures that must all hold; the worst is shown."""
    bound: float
    at_least: bool
    show: Callable[[float], str]

    def verdict(self, figures: Mapping[str, float]) -> tuple[str, str]:
        """(measured, met or not) as text."""
        found = [figures[name] for name in self.names if name in figures]
        if not found:
            return "not measured", "not measured"
        worst = min(found) if self.at_least else max(found)
        met = worst >= self.bound if self.at_least else worst <= self.bound
        measured = self.show(worst)
        if len(found) > 1:
            measured += f" (best {self.show(max(found) if self.at_least else min(found))})"
        if len(found) < len(self.names):
            measured += f"; {len(found)} of {len(self.names)} measured"
            return measured, "not all measured" if met else "**missed**"
        return measured, "met" if met else "**missed**"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _times(value: float) -> str:
    return f"{value:.2f} x"


def _ms(value: float) -> str:
    return f"{value:.3f} ms"


def _each(name: str) -> tuple[str, ...]:
    return tuple(name.format(context) for context in CONTEXTS)


DECODE = "decode attention, batch 64, context 4k-32k, GQA 8, bf16 KV"
REACHES = (
    Reach(DECODE, "85 % of copy bandwidth", _each("decode.bf16.{}.share"), 0.85, True, _percent),
    Reach(
        DECODE,
        "time at most that of torch's fastest SDPA path on contiguous KV",
        _each("decode.bf16.{}.over_sdpa"),
        1.0,
        False,
        _times,
    ),
    Reach("the same, fp8 KV", "1.7 x the bf16 rate", _each("decode.fp8.{}.speedup"), 1.7, True, _times),
    Reach(
        "prompt attention, causal, head 128, 8k",
        "60 % of the bf16 matmul rate",
        ("prompt.8192.share",),
        0.6,
        True,
        _percent,
    ),
    Reach("one decode step, 8B bf16, batch 1", "85 % of the memory floor", ("step.8B.1.share",), 0.85, True, _percent),
    Reach("one decode step, 8B bf16, batch 32", "80 % of the memory floor", ("step.8B.32.share",), 0.80, True, _percent),
    Reach("host gap between steps, 256 running requests", "under 0.3 ms", ("step.1B.256.gap_ms",), 0.3, False, _ms),
    Reach(
        "determinism switch, 8B bf16, batch 32",
        "costs at most 25 % of decode throughput",
        ("determinism.8B.32.cost",),
        0.25,
        False,
        _percent,
    ),
)
