"""Requests whose Q, K and V go through paged caches in any division into steps, and the float32 reference of what comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenbus.kernels.reference import reference_attention
from tokenbus.kernels.torch_ops.attention import quantize
from tokenbus.kernels.triton.attention import INTERPRETED, AttentionPlan, paged_attention
from tokenbus.kernels.triton.kv_write import write_kv

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FP8 = torch.float8_e4m3fn
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
"""With TRITON_INTERPRET=0 these tests run on a GPU: see conftest.py."""
SMALL = {"block_m": 64, "tile": 32, "split": 64, "num_warps": 4, "num_stages": 2}
"""Several tiles and splits for short contexts."""


def seeded(seed: int) -> torch.Generator:
    """Of numbers where the kernels run."""
    return torch.Generator(DEVICE).manual_seed(seed)


def quantize_fp8(x: torch.Tensor) -> torch.Tensor:
    """What `write_kv` makes of finite rows in a float8_e4m3fn cache."""
    x = x.float()
    scale = x.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale < torch.finfo(F32).tiny, 0, scale)
    codes = (x * torch.where(scale > 0, 1 / scale, 0)).clamp(-448, 448).to(FP8)
    return torch.cat([codes.view(torch.int8), scale.view(torch.int8)], dim=-1).view(FP8)


def widen(rows: torch.Tensor) -> torch.Tensor:
    """float32 of one-byte rows."""
    return rows[..., :-4].float() * rows[..., -4:].contiguous().view(F32)


@dataclass
class Case:
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    block_size: int
    cache_dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None

    @classmethod
    def make(
        cls,
        lengths: list[int],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = F32,
        cache_dtype: torch.dtype | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Case:
        g = torch.Generator().manual_seed(0)
        q, k, v = ([torch.randn(n, h, dim, generator=g).to(dtype) for n in lengths] for h in (heads, kv_heads, kv_heads))
        if cache_dtype in (BF16, F16):  # conversion to these is not what is tested, and not exact in the interpreter
            k, v = ([rows.to(cache_dtype).to(dtype) for rows in of] for of in (k, v))
        return cls(q, k, v, block_size, cache_dtype or dtype, 1.7 * dim**-0.5, window, softcap)

    def caches(self, blocks: int, fill: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, *self.k[0].shape[1:])
        if self.cache_dtype.itemsize == 1:  # -1 everywhere: NaN scales
            value = 0 if fill == 0.0 else -1
            made = [torch.full((*shape[:-1], shape[-1] + 4), value, dtype=torch.int8).view(self.cache_dtype) for _ in "kv"]
        else:
            made = [torch.full(shape, fill, dtype=self.cache_dtype) for _ in "kv"]
        k_cache, v_cache = (cache.to(DEVICE) for cache in made)
        return k_cache, v_cache

    def run(
        self,
        steps: list[dict[int, int]],
        *,
        fill: float = 0.0,
        seed: int = 0,
        config: Mapping[str, int] | None = SMALL,
        invariant: bool = True,
        known: Mapping[int, int] | None = None,
    ) -> list[torch.Tensor]:
        """Each step: {request: new tokens}, in the batch's order. Each request's outputs of all steps; empty if it had none. known: its
        first tokens that are in the caches beforehand."""
        counts = [-(-len(rows) // self.block_size) for rows in self.q]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        tables = [[order.pop() for _ in range(count)] for count in counts]
        k_cache, v_cache = self.caches(sum(counts) + 3, fill)
        done = [(known or {}).get(r, 0) for r in range(len(self.q))]
        for r, count in (known or {}).items():
            write_kv(
                *(of[r][:count].to(DEVICE) for of in (self.k, self.v)), k_cache, v_cache, self.slots({r: slice(count)}, tables)
            )
        out: list[list[torch.Tensor]] = [[] for _ in self.q]
        for step in steps:
            parts = {r: slice(done[r], done[r] + n) for r, n in step.items()}
            q, k, v = (torch.cat([of[r][part] for r, part in parts.items()]).to(DEVICE) for of in (self.q, self.k, self.v))
            write_kv(k, v, k_cache, v_cache, self.slots(parts, tables))
            starts = torch.tensor([0, *step.values()]).cumsum(0).tolist()
            plan = AttentionPlan(starts, [p.stop for p in parts.values()], [tables[r] for r in parts], DEVICE)
            longest = max(step.values())
            found = paged_attention(
                q, k_cache, v_cache, plan, self.scale, self.window, self.softcap, config, invariant=invariant, longest=longest
            )
            for (r, part), rows in zip(parts.items(), found.split(list(step.values())), strict=True):
                out[r].append(rows.cpu())
                done[r] = part.stop
        return [torch.cat(rows) if rows else torch.empty(0) for rows in out]

    def slots(self, parts: Mapping[int, slice], tables: list[list[int]]) -> torch.Tensor:
        size = self.block_size
        places = [
            tables[r][p // size] * size + p % size for r, part in parts.items() for p in range(part.start or 0, part.stop)
        ]
        return torch.tensor(places, device=DEVICE)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """float32 of what the cache makes of x."""
        if self.cache_dtype == torch.int8:
            return widen(quantize(x))
        return widen(quantize_fp8(x)) if self.cache_dtype == FP8 else x.to(self.cache_dtype).float()

    def reference(self, r: int) -> torch.Tensor:
        n = len(self.q[r])
        k, v = (self.stored(of[r])[None] for of in (self.k, self.v))
        return reference_attention(self.q[r], k, v, [0, n], [n], [[0]], self.scale, self.window, self.softcap)


def same(found: list[Any], expected: list[Any]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
