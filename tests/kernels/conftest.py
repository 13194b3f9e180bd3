from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from tokenbus.core.worker.attention import AttentionBackend, AttentionBatch, AttentionParams
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.kernels.reference import reference_attention
from tokenbus.kernels.torch_ops.attention import quantize


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's thread count; what it was before comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


ONE_BYTE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass
class Case:
    """Some requests' whole Q, K and V, and paged caches to run any part of them through."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    params: AttentionParams
    block_size: int
    dtype: torch.dtype
    backend: AttentionBackend
    stored_as: str = ""
    """As KVLayout.stored."""
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By request: positions [first, end) that see all of each other."""

    @classmethod
    def make(
        cls,
        lengths: list[int],
        *,
        heads: int = 9,
        kv_heads: int = 3,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        softcap: float | None = None,
        stored: str = "",
        seed: int = 0,
    ) -> Case:
        g = torch.Generator().manual_seed(seed)
        q, k, v = ([torch.randn(n, h, dim, generator=g).to(dtype) for n in lengths] for h in (heads, kv_heads, kv_heads))
        params = AttentionParams(1.7 * dim**-0.5, window, softcap)
        return cls(q, k, v, params, block_size, dtype, TorchAttention(), stored)

    def caches(self, blocks: int, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, *self.k[0].shape[1:])
        if self.stored_as:  # a scale of four bytes -1 is NaN, and so is an e4m3 of it
            shape, value = (*shape[:-1], shape[-1] + 4), 0 if fill == 0.0 else -1
            k, v = (torch.full(shape, value, dtype=torch.int8).view(ONE_BYTE[self.stored_as]) for _ in range(2))
            return k, v
        return torch.full(shape, fill, dtype=self.dtype), torch.full(shape, fill, dtype=self.dtype)

    def tables(self, members: list[int], seed: int = 0) -> tuple[list[list[int]], int]:
        """Scattered block tables, and how many blocks a cache needs."""
        counts = [-(-len(self.q[r]) // self.block_size) for r in members]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        tables, taken = [], 0
        for count in counts:
            tables.append(order[taken : taken + count])
            taken += count
        return tables, len(order)

    def run(self, steps: list[dict[int, int]], *, fill: float = 0.0, seed: int = 0) -> list[torch.Tensor]:
        """Each step: {request: new tokens}, in the batch's order. Returns each request's outputs of all steps ([] if it had none)."""
        members = sorted({r for step in steps for r in step})
        tables, blocks = self.tables(members, seed)
        table = dict(zip(members, tables, strict=True))
        k_cache, v_cache = self.caches(blocks, fill)
        done = dict.fromkeys(members, 0)
        out: list[list[torch.Tensor]] = [[] for _ in self.q]
        for step in steps:
            parts = {r: slice(done[r], done[r] + n) for r, n in step.items()}
            batch = self.batch(parts, table)
            q, k, v = (torch.cat([of[r][part] for r, part in parts.items()]) for of in (self.q, self.k, self.v))
            batch.prepared = self.backend.prepare(batch)
            found = self.backend.attend(q, k, v, k_cache, v_cache, batch, self.params)
            for (r, part), rows in zip(parts.items(), found.split(list(step.values())), strict=True):
                out[r].append(rows)
                done[r] = part.stop
        return [torch.cat(rows) if rows else torch.empty(0) for rows in out]

    def batch(self, parts: dict[int, slice], table: dict[int, list[int]]) -> AttentionBatch:
        start, slots = [0], []
        for r, part in parts.items():
            start.append(start[-1] + part.stop - part.start)
            slots += [
                table[r][p // self.block_size] * self.block_size + p % self.block_size for p in range(part.start, part.stop)
            ]
        batch = AttentionBatch(start, [part.stop for part in parts.values()], [table[r] for r in parts], torch.tensor(slots))
        if self.spans:
            batch.reach = torch.tensor([self.end(r, p) for r, part in parts.items() for p in range(part.start, part.stop)])
        return batch

    def end(self, r: int, position: int) -> int:
        """One past the last position that this one sees."""
        return next((end for first, end in self.spans.get(r, ()) if first <= position < end), position + 1)

    def reference(self, r: int) -> torch.Tensor:
        """float32 [tokens, heads, head_dim] of the whole request, from K/V as the cache stores them."""
        n = len(self.q[r])
        k, v = (self.stored(of[r]).unsqueeze(0) for of in (self.k, self.v))
        p = self.params
        return reference_attention(self.q[r], k, v, [0, n], [n], [[0]], p.scale, p.window, p.softcap)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """What the cache makes of x."""
        if not self.stored_as:
            return x.to(self.dtype)
        rows = quantize(x, ONE_BYTE[self.stored_as])
        return rows[..., :-4].float() * rows[..., -4:].contiguous().view(torch.float32)
