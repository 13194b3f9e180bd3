"""Rotary tables: cos and sin of every position, the same bits however many positions are asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .config import RopeConfig

ROWS = 64
"""Positions computed together. A piece of a fixed size that one thread computes: no result depends on the table's length."""


def inverse_frequencies(rope: RopeConfig) -> torch.Tensor:
    """float32 [dim // 2], after scaling. llama3: https://arxiv.org/abs/2407.21783 and its reference code's smooth interpolation."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    base = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "factors":
        return base / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if rope.kind == "llama3":
        return _llama3(base, rope)
    return base


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_len / (2 * math.pi / base)
    """How often each frequency turns within the original context."""
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * base / rope.factor + smooth * base
    return torch.where(
        turns < rope.low_freq_factor, base / rope.factor, torch.where(turns > rope.high_freq_factor, base, between)
    )


def mrope_axes(rope: RopeConfig) -> list[int]:
    """By frequency: the axis (0 time, 1 height, 2 width) it turns with. https://arxiv.org/abs/2409.12191; interleaved:
    https://arxiv.org/abs/2511.21631"""
    if not rope.interleaved:
        return [axis for axis, size in enumerate(rope.sections) for _ in range(size)]
    half = rope.dim // 2
    return [i % 3 if i < 3 * rope.sections[i % 3] else 0 for i in range(half)]


class RopeTable:
    """cos and sin by position, grown as needed. Angles are rounded to float32 (as transformers does), cos and sin are exact to it."""

    def __init__(self, frequencies: torch.Tensor, device: torch.device, scale: float = 1.0) -> None:
        self._frequencies = frequencies.to("cpu", torch.float32)
        self._scale = scale
        self._table = torch.empty(2, 0, len(frequencies), device=device)

    def rows(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin, float32 [T, dim // 2], of int64 positions [T], all below `length`."""
        table = self.table(length)
        return table[0, positions], table[1, positions]

    def rows_by_axis(self, places: torch.Tensor, axes: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rows`, of places int64 [3, T]; axes int64 [dim // 2] says which of the three each frequency turns with."""
        table = self.table(length)
        at, column = places[axes].T, torch.arange(len(axes), device=axes.device)
        return table[0, at, column], table[1, at, column]

    def table(self, length: int) -> torch.Tensor:
        """float32 [2, n, dim // 2], n >= length: cos and sin of every position, contiguous. Not to be written."""
        if length > self._table.shape[1]:
            self._grow(length)
        return self._table

    def _grow(self, length: int) -> None:
        old = self._table.shape[1]
        new = -(-max(length, 2 * old) // ROWS) * ROWS
        pieces = [self._piece(start) for start in range(old, new, ROWS)]
        self._table = torch.cat([self._table, torch.cat(pieces, dim=1).to(self._table.device)], dim=1)

    def _piece(self, start: int) -> torch.Tensor:
        angles = torch.arange(start, start + ROWS).float()[:, None] * self._frequencies
        exact = angles.double()
        return (torch.stack([exact.cos(), exact.sin()]) * self._scale).float()
