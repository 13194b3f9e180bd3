"""Paged caches of random K and V, as a server's look after a while: a request's blocks lie anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenbus.kernels.triton.attention import ONE_BYTE, SCALE_BYTES
from tokenbus.kernels.triton.attention_plan import AttentionPlan
from tokenbus.kernels.triton.kv_write import write_kv

CHUNK = 1 << 17
"""Tokens written at a time."""


@dataclass
class Paged:
    k: torch.Tensor
    v: torch.Tensor
    tables: list[list[int]]
    """Blocks of each request."""
    lengths: list[int]

    @property
    def block_size(self) -> int:
        return self.k.shape[1]

    @property
    def read_bytes(self) -> int:
        """Of K and V (and scales) that attention over all positions reads."""
        return 2 * sum(self.lengths) * self.k.shape[2] * self.k.shape[3] * self.k.itemsize

    def drop(self) -> None:
        """Free K and V."""
        self.k = self.v = self.k.new_empty(0)

    def plan(self, new: Sequence[int]) -> AttentionPlan:
        """The step in which the last new[r] tokens of request r are its queries."""
        starts = [0]
        for count in new:
            starts.append(starts[-1] + count)
        return AttentionPlan(starts, self.lengths, self.tables, self.k.device)

    def slots(self, request: int) -> torch.Tensor:
        """int64 [length]: where a request's tokens are."""
        table = torch.tensor(self.tables[request], device=self.k.device)
        size = self.block_size
        return (table[:, None] * size + torch.arange(size, device=self.k.device)).flatten()[: self.lengths[request]]


def filled(
    lengths: Sequence[int],
    kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    stored: torch.dtype | None = None,
    device: str = "cuda",
    seed: int = 0,
) -> Paged:
    """Caches with normal numbers in all of the requests' tokens, written by the kernel that is to be measured with them."""
    stored = stored or dtype
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    tables, taken = [], 0
    for count in counts:
        tables.append(order[taken : taken + count])
        taken += count
    one_byte = stored in ONE_BYTE
    shape = (sum(counts), block_size, kv_heads, head_dim + SCALE_BYTES * one_byte)
    k, v = (torch.zeros(shape, dtype=torch.int8 if one_byte else stored, device=device).view(stored) for _ in "kv")
    made = Paged(k, v, tables, list(lengths))
    generator = torch.Generator(device).manual_seed(seed)
    slots = torch.cat([made.slots(r) for r in range(len(lengths))])
    for some in slots.split(CHUNK):
        rows = [torch.randn(len(some), kv_heads, head_dim, device=device, generator=generator).to(dtype) for _ in "kv"]
        write_kv(rows[0], rows[1], k, v, some)
    return made
