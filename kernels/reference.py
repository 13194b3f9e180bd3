"""The plain float32 reference of paged attention, which tests compare every backend with. Slow, and free of tricks."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    query_start: Sequence[int],
    context_len: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of q [T, heads, head_dim] over caches [blocks, block_size, kv_heads, head_dim] that hold the new tokens too.

    Request r's rows are query_start[r] : query_start[r + 1], its last new token stands at context_len[r] - 1; row i sees the stored
    positions j <= i, with a window only j > i - window. softcap: scores become softcap * tanh(scores / softcap) before the mask.
    Returns float32 [T, heads, head_dim]. One softmax over the whole row; head h reads KV head h // (heads // kv_heads).
    """
    heads, kv_heads = q.shape[1], k_cache.shape[2]
    out = torch.empty(q.shape, dtype=torch.float32)
    for r, length in enumerate(context_len):
        rows = slice(query_start[r], query_start[r + 1])
        k, v = (gather(cache, block_tables[r], length) for cache in (k_cache, v_cache))
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(length - (rows.stop - rows.start), length)[:, None]
        j = torch.arange(length)[None]
        visible = j <= i if window is None else (j <= i) & (j > i - window)
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def gather(cache: torch.Tensor, table: Sequence[int], length: int) -> torch.Tensor:
    """float32 [length, kv_heads, head_dim]: one request's K or V, in order."""
    return cache[list(table)].flatten(0, 1)[:length].float()
