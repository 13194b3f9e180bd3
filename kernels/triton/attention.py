"""Paged attention in Triton: decode steps, prompt chunks, drafts to verify and any mixture of them in one launch.

How a row (a token's query head) is computed, whatever batch it is in:

    tiles     positions in tiles of `tile`, counted from position 0 of the request: an online softmax in float32, tile by tile
    splits    every `split` positions, counted from 0, it begins afresh: (maximum, sum, weighted values)
    result    the splits' results merged in order, in float32

A program goes through all splits of its rows and merges them itself, or, where that leaves the device idle (few queries, long contexts),
through one split, and a second kernel merges what was left in memory: the same operations on the same numbers. What a row must not see
has score -inf, weight 0, and changes no bit of its state; so tiles and splits are left out where no row of a program sees them, and masks
where all see everything. The rows of a program are the query heads of one KV head of neighbouring tokens (GQA, MQA): `block_m` rows, always
that many.

So with one tiling for every batch (`invariant`) a row depends on its own position and the K/V stored up to it alone, bit by bit, given
that the device's matrix product treats the rows of a tile alike. In the interpreter tests show it; on a device it is not yet measured. Nor
is any speed. Otherwise there is a tiling for decode steps and one for prompts, and a program that goes through several splits does so
without beginning afresh: it keeps one state instead of two.

What the compiler makes of this for sm_90 (Triton 3.6 and 3.9, bfloat16, head_dim 128), as tests/kernels_triton/test_compile_attention.py
checks where it can:

    loads     K, V and Q in 16-byte pieces, K and V asynchronously into shared memory while the tile before is computed; block tables one
              stage earlier. With fewer than 3 stages a table is waited for before its tile can be asked for. A stage more of K and V
              takes 2 stages more here: 5, 7
    products  query tiles of 64 rows and more: wgmma; of 16 and 32: mma.sync. The loop without masks has about 3/4 of the instructions of
              the one with masks
    one byte  codes are widened in registers, e4m3 by way of float32: straight to bfloat16 would take one slow conversion for each value
    spills    none in any loop over tiles. The invariant tiling holds two states of 64 rows and keeps up to 300 bytes of a thread's
              scalars in local memory between splits; the others nothing

K/V that is NaN or infinite reaches only its own request; in it, V of two or four bytes also rows shortly before, whose weight for it is 0.
Nothing behind a request's last position is used, so blocks need not be cleared.

One-byte caches, [blocks, block_size, kv_heads, head_dim + 4], hold head_dim values and one float32 that they are multiplied with for each
token and head: int8 (scale max |x| / 127) or float8_e4m3fn (scale max |x| / 448), as the tensor's dtype says. In memory a block is all its
values, [block_size, kv_heads, head_dim], then all its scales, [block_size, kv_heads]: so values are read in whole 16 bytes, where rows with
scales at their ends would be aligned to 4. `kv_write.py` writes it, `values_and_scales` shows it; nobody else reads what it has written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import triton
import triton.language as tl

from . import configs
from .attention_kernels import attention_kernel, merge_kernel
from .attention_plan import AttentionPlan
from .launch import INTERPRETED, Launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONE_BYTE = (torch.int8, torch.float8_e4m3fn)
"""Caches with rows of head_dim + SCALE_BYTES."""
SCALE_BYTES = 4
MAX_HEAD_DIM = 256
SMALLEST_DOT = 16
"""Of rows, columns and depth of a matrix product on tensor cores."""
INVARIANT, DECODE, PROMPT = "attention_invariant", "attention_decode", "attention_prompt"
"""Names of the tilings in the tables of configs.py."""
DECODE_ROWS = 32
"""Rows (tokens x the group's heads) of the longest query up to which a batch is one of decode steps, or of short drafts."""
APART_FROM = 64
"""Rows of a query tile from which on tiles of positions that need no mask are gone through in a loop of their own."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a batch is cut into tiles. Results depend on it: in their last bits, and on these alone."""

    block_m: int
    """Rows of a query tile; at least the group."""
    tile: int
    """Positions looked at together."""
    split: int
    """Positions after which the softmax begins afresh; a multiple of `tile`."""
    num_warps: int
    num_stages: int
    flat: bool = False
    """A program goes through its splits as one: they are where its work may be divided, and do not begin afresh. Not invariant."""

    @classmethod
    def choose(
        cls,
        head_dim: int,
        group: int,
        dtype: torch.dtype,
        config: Mapping[str, int] | None = None,
        *,
        one_byte: bool = False,
        longest: int | None = None,
        invariant: bool = True,
    ) -> Tiling:
        """The stored tiling (configs.py), with `config`'s entries in its place. one_byte: of the cache. invariant: one for all batches;
        otherwise one for a batch whose longest query has `longest` tokens (None: many). Raises ValueError for unknown or impossible
        entries."""
        rows = None if longest is None else longest * group
        shape = {"head_dim": head_dim, "bits": 8 * dtype.itemsize, "kv_bits": 8 if one_byte else 8 * dtype.itemsize}
        if invariant:
            values = configs.config(INVARIANT, **shape)
        else:
            decode = rows is not None and rows <= DECODE_ROWS
            values = configs.config(DECODE if decode else PROMPT, **shape, **({} if rows is None else {"m": rows}))
        if unknown := (config or {}).keys() - values.keys():
            raise ValueError(
                f"no such entry of an attention config: {', '.join(sorted(unknown))}; there are {', '.join(values)}"
            )
        values |= config or {}
        values["block_m"] = max(values["block_m"], triton.next_power_of_2(group))
        tiling = cls(**values, flat=not invariant)
        powers = (tiling.block_m, tiling.tile, tiling.num_warps)
        if any(n < 1 or n & (n - 1) for n in powers) or min(tiling.block_m, tiling.tile) < SMALLEST_DOT:
            raise ValueError(f"block_m, tile (both at least {SMALLEST_DOT}) and num_warps must be powers of two: {tiling}")
        if tiling.split < 1 or tiling.split % tiling.tile or tiling.num_stages < 1:
            raise ValueError(f"split must be a multiple of tile, and num_stages at least 1: {tiling}")
        return tiling


@lru_cache(maxsize=1024)
def stored_tiling(
    head_dim: int, group: int, dtype: torch.dtype, *, one_byte: bool = False, longest: int | None = None, invariant: bool = True
) -> Tiling:
    """`Tiling.choose` without a config."""
    return Tiling.choose(head_dim, group, dtype, one_byte=one_byte, longest=longest, invariant=invariant)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    config: Mapping[str, int] | None = None,
    *,
    invariant: bool = True,
    longest: int | None = None,
) -> torch.Tensor:
    """Causal attention of q over paged caches that hold the new tokens' K/V already.

    q: [T, heads, head_dim], float32, bfloat16 or float16, head_dim at most 256, rows and heads strided as they like. Caches: [blocks,
    block_size, kv_heads, head_dim] of q's dtype (of any of the three under float32 queries), strides as they like, but a row's values
    behind each other; or [..., head_dim + 4] of int8 or float8_e4m3fn, blocks contiguous; any block_size. heads is a multiple of
    kv_heads; head h reads KV head h // (heads // kv_heads). window: position i sees j with i - window < j <= i. softcap: scores become
    softcap * tanh(scores / softcap). scale: above 0. config: entries of Tiling to use instead of the stored ones; other tiles, splits or
    rows give other last bits.

    invariant: the tiling is the same for every batch. Otherwise it is one for decode steps or one for prompts, as the longest query of the
    batch has it: `longest` tokens, which None leaves at many. Known, it also keeps what is left in memory for merging small.

    Returns a new [T, heads, head_dim] in q's dtype; scores, softmax and sums are float32, products take q's dtype (with float32: IEEE, no
    TF32). Raises ValueError for arguments that don't fit each other, or are where the kernels can't run.
    """
    _check(q, k_cache, v_cache, plan, scale, window, softcap)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    group = q.shape[1] // k_cache.shape[2]
    choose = stored_tiling if config is None else partial(Tiling.choose, config=config)
    one_byte = k_cache.dtype in ONE_BYTE
    tiling = choose(q.shape[2], group, q.dtype, one_byte=one_byte, longest=longest, invariant=invariant)
    for launch in launches(out, q, k_cache, v_cache, plan, scale, window, softcap, tiling, longest):
        launch.run(q.device)
    return out


def launches(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    tiling: Tiling,
    longest: int | None = None,
) -> list[Launch]:
    """What `paged_attention` runs, in order, to fill `out`; arguments as there, checked already."""
    query = q if q.stride(2) == 1 else q.contiguous()
    _, heads, head_dim = q.shape
    block_size, kv_heads = k_cache.shape[1:3]
    group = heads // kv_heads
    work = plan.work(tiling.block_m // group, tiling.split, window, kv_heads)
    width = max(SMALLEST_DOT, triton.next_power_of_2(head_dim))
    rows = (work.slots, kv_heads, tiling.block_m if longest is None else min(tiling.block_m, longest * group))
    maxima, sums, values = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in (rows, rows, (*rows, width)))
    shape = {"GROUP": group, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "D_PAD": width, "BLOCK_M": tiling.block_m}
    target = {"out": out, "out_stride_t": out.stride(0), "out_stride_h": out.stride(1)}
    parts = {"part_m": maxima, "part_l": sums, "part_acc": values, "part_rows": rows[2]}
    (k, k_scales), (v, v_scales) = values_and_scales(k_cache), values_and_scales(v_cache)
    attend = {
        **target, **parts, **shape, **strides("k", k, k_scales), **strides("v", v, v_scales),
        "q": query, "q_stride_t": query.stride(0), "q_stride_h": query.stride(1), "tables": plan.tables, "items": work.items,
        "k_cache": k, "v_cache": v, "k_scales": k_scales, "v_scales": v_scales,
        "scale": scale if softcap is not None else scale * math.log2(math.e), "softcap": softcap or 1.0, "window": window or 0,
        "BLOCK_SIZE": block_size, "TILE": tiling.tile, "SPLIT": tiling.split, "FLAT": tiling.flat,
        "APART": window is None and tiling.block_m >= APART_FROM, "ALIKE": k.stride()[:3] == v.stride()[:3],
        "HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None,
        "QUANTIZED": k_cache.dtype in ONE_BYTE, "FP8": k_cache.dtype == torch.float8_e4m3fn, "DOT": dot_type(q.dtype),
    }  # fmt: skip
    options = {"num_warps": tiling.num_warps, "enable_fp_fusion": False}
    found = [Launch(attention_kernel, (len(work.items) * kv_heads,), attend, {**options, "num_stages": tiling.num_stages})]
    if work.slots:
        merging = {**target, **parts, **shape, "jobs": work.jobs}
        found.append(Launch(merge_kernel, (len(work.jobs) * kv_heads,), merging, options))
    return found


def values_and_scales(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a one-byte cache: its values, int8 [blocks, block_size, kv_heads, head_dim] (bits of e4m3, maybe), and its scales, float32
    [blocks, block_size, kv_heads]; views. Another cache comes twice."""
    if cache.dtype not in ONE_BYTE:
        return cache, cache
    blocks, size, heads, row = cache.shape
    head_dim, flat = row - SCALE_BYTES, cache.view(torch.int8)
    values = flat.as_strided((blocks, size, heads, head_dim), (cache.stride(0), heads * head_dim, head_dim, 1))
    floats = flat.view(torch.float32)
    first = floats.storage_offset() + size * heads * head_dim // SCALE_BYTES
    return values, floats.as_strided((blocks, size, heads), (floats.stride(0), heads, 1), first)


def strides(name: str, values: torch.Tensor, scales: torch.Tensor) -> dict[str, int]:
    """Of blocks, tokens and heads, as the kernels call them; of scales only those of blocks (theirs of tokens is the number of heads)."""
    found = {f"{name}_stride_{axis}": values.stride(i) for i, axis in enumerate("bth")}
    return {**found, f"{name}_scale_stride_b": scales.stride(0)}


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Of the operands of matrix products."""
    if INTERPRETED:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def check_place(x: torch.Tensor) -> None:
    """Raises ValueError when kernels can't run where x is."""
    if x.device.type != "cuda" and not INTERPRETED:
        raise ValueError(
            f"Triton kernels need tensors on a GPU, or TRITON_INTERPRET=1 in the environment; these are on {x.device}"
        )


def check_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Raises ValueError when the caches are none for rows of head_dim of `dtype`."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(f"caches must be alike, [blocks, block_size, kv_heads, row]: {_of(k_cache)} and {_of(v_cache)}")
    one_byte = k_cache.dtype in ONE_BYTE
    if not one_byte and k_cache.dtype != dtype and not (dtype == torch.float32 and k_cache.dtype in DTYPES):
        raise ValueError(
            f"caches of {k_cache.dtype} don't serve {dtype}: they must be of the same dtype, int8 or float8_e4m3fn"
        )
    if k_cache.shape[3] != head_dim + SCALE_BYTES * one_byte or (one_byte and head_dim % SCALE_BYTES):
        rule = " + 4, head_dim a multiple of 4" if one_byte else ""
        raise ValueError(f"rows of {_of(k_cache)} must be head_dim{rule}; head_dim is {head_dim}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("the values of a cache's row must lie behind each other")
    if one_byte and not all(cache[:1].is_contiguous() for cache in (k_cache, v_cache)):
        raise ValueError(f"the blocks of a cache of {k_cache.dtype} must be contiguous")


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    check_place(q)
    if q.dim() != 3 or q.dtype not in DTYPES or q.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"q must be [T, heads, head_dim <= {MAX_HEAD_DIM}] in float32, bfloat16 or float16: {_of(q)}")
    check_caches(k_cache, v_cache, q.shape[2], q.dtype)
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads can't share {k_cache.shape[2]} KV heads")
    if q.shape[0] != plan.tokens:
        raise ValueError(f"q has {q.shape[0]} rows, the plan {plan.tokens}")
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"window ({window}) must be at least 1 and softcap ({softcap}) above 0, or None")
    if not scale > 0:
        raise ValueError(f"scale ({scale}) must be above 0")


def _of(x: torch.Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"
