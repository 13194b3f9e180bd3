"""A model with a paged cache of its own, to run pieces of sequences: what a side model is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..models.base import CausalModel, KVCache
from .attention import AttentionBackend, KVLayout
from .batch import Piece, ragged

__all__ = ["PagedModel", "Piece", "make_cache"]

ALIGNMENT = 64
"""Bytes; a cache line and an AVX-512 register."""


class PagedModel:
    def __init__(self, model: CausalModel, block_size: int, attention: Callable[[KVLayout], AttentionBackend]) -> None:
        self.model = model
        self.layout = model.kv_layout(block_size)
        self._attention = attention(self.layout)
        self._kv: KVCache | None = None

    def allocate(self, num_blocks: int) -> None:
        self._kv = make_cache(self.layout, num_blocks)

    def forward(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, list[int]]:
        """Run at least one piece. Hidden states [T, hidden_size] of all tokens, and where each piece's begin; then their end."""
        assert self._kv is not None
        batch = ragged(pieces, self.layout)
        batch.attention.prepared = self._attention.prepare(batch.attention)
        return self.model.forward(batch, self._kv, self._attention), batch.attention.query_start


def make_cache(layout: KVLayout, num_blocks: int) -> KVCache:
    """Zeros, whose pages the operating system provides as they are first written."""
    shapes = layout.shapes(num_blocks)
    return KVCache([_zeros(s, layout) for s in shapes], [_zeros(s, layout) for s in shapes])


def _zeros(shape: tuple[int, ...], layout: KVLayout) -> torch.Tensor:
    dtype = layout.cache_dtype
    if layout.device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=layout.device)
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)  # calloc: lazily
    offset = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[offset : offset + size]).view(dtype).view(shape)
