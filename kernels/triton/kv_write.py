"""Writes new tokens' K and V to their slots in paged caches; into one-byte caches with a scale per token and head, from that alone.

One-byte caches: see attention.py. int8 as kernels/torch_ops/attention.py `quantize` has it, bit by bit; float8_e4m3fn with the same
idea: values x / scale with scale = max |x| / 448 (the format's largest number), rounded to the nearest one, even if in the middle. Rounding
is spelled out in integers: so it is the same on every device, and in the interpreter, whose own conversion is not exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import configs
from .attention import DTYPES, MAX_HEAD_DIM, check_caches, check_place, strides, values_and_scales
from .launch import Launch


@triton.jit
def to_integers(x):
    """Float32 below 2^22 to the nearest integer, float32; even if in the middle: where floats are 1 apart, the sum is rounded so."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def to_e4m3(x):
    """Codes of float8 e4m3 as int32, of float32 |x| <= 448."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    rounded = size + 0x7FFFF + ((size >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    tiny = to_integers(tl.abs(x) * 512.0).to(tl.int32)
    return tl.where(tl.abs(x) < 0.015625, tiny, normal) | ((bits >> 24) & 0x80)


@triton.jit
def store_rows(
    source, cache, scales, from_at, to_at, scale_at, valid, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, FORMAT: tl.constexpr
):
    """Rows at `from_at` of source to `to_at` of cache, int64. FORMAT: 0 as they are, 1 int8, 2 e4m3."""
    dims = tl.arange(0, D_PAD)
    keep = valid[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(source + from_at[:, None] + dims[None, :], mask=keep, other=0.0)
    if FORMAT == 0:
        tl.store(cache + to_at[:, None] + dims[None, :], x.to(cache.dtype.element_ty), mask=keep)
    else:
        x = x.to(tl.float32)
        finite = tl.abs(x) <= 3.4028234663852886e38
        whole = tl.min(finite.to(tl.int32), 1)[:, None] > 0  # pyright: ignore[reportCallIssue, reportArgumentType] - a tensor
        x = tl.where(whole, x, 0.0)
        largest = tl.max(tl.abs(x), 1)
        scale = tl.div_rn(largest, 127.0 if FORMAT == 1 else 448.0)
        scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, tl.where(scale > 0.0, scale, 1.0)), 0.0)
        x = x * inverse[:, None]
        codes = to_integers(x).to(tl.int32) if FORMAT == 1 else to_e4m3(tl.minimum(tl.maximum(x, -448.0), 448.0))
        tl.store(cache + to_at[:, None] + dims[None, :], codes.to(tl.int8), mask=keep)
        tl.store(scales + scale_at[:, None], tl.where(whole, scale[:, None], float("nan")), mask=valid[:, None])


@triton.jit(do_not_specialize=["rows"])
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    slots,
    rows,
    k_from_t,
    k_from_h,
    v_from_t,
    v_from_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    k_scale_stride_b,
    v_scale_stride_b,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """ROWS rows: row r is KV head r % HEADS of token r // HEADS. A negative slot is not written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot = tl.load(slots + token, mask=row < rows, other=-1)
    valid = slot >= 0
    slot = tl.where(valid, slot, 0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    k_to = block * k_stride_b + offset * k_stride_t + head * k_stride_h
    v_to = block * v_stride_b + offset * v_stride_t + head * v_stride_h
    k_from = token * k_from_t + head * k_from_h
    v_from = token * v_from_t + head * v_from_h
    scale_to = offset * HEADS + head
    store_rows(k, k_cache, k_scales, k_from, k_to, block * k_scale_stride_b + scale_to, valid, HEAD_DIM, D_PAD, FORMAT)
    store_rows(v, v_cache, v_scales, v_from, v_to, block * v_scale_stride_b + scale_to, valid, HEAD_DIM, D_PAD, FORMAT)


def write_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store k, v [T, kv_heads, head_dim] in the caches at `slots`.

    k, v: float32, bfloat16 or float16, one dtype, rows and heads strided as they like. Caches as in `paged_attention`. slots: int64 [T] on
    the same device: block * block_size + offset, all different; a token with a negative one is left out. A row with a NaN or an infinity
    gets NaN as its scale in a one-byte cache, and zeros; one too small for a scale, zeros and 0. Raises ValueError for arguments that
    don't fit each other, or are where the kernels can't run."""
    _check(k, v, k_cache, v_cache, slots)
    if k.numel():
        writing(k, v, k_cache, v_cache, slots).run(k.device)


def writing(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> Launch:
    """What `write_kv` runs; arguments as there, checked already. Without fusion: products are rounded before anything is added."""
    tokens, heads, head_dim = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    (to_k, k_scales), (to_v, v_scales) = values_and_scales(k_cache), values_and_scales(v_cache)
    use = configs.config("kv_write", heads=heads, head_dim=head_dim)
    arguments = {
        **strides("k", to_k, k_scales), **strides("v", to_v, v_scales),
        "k": k, "v": v, "k_cache": to_k, "v_cache": to_v, "k_scales": k_scales, "v_scales": v_scales,
        "slots": slots.contiguous(), "rows": tokens * heads,
        "k_from_t": k.stride(0), "k_from_h": k.stride(1), "v_from_t": v.stride(0), "v_from_h": v.stride(1),
        "HEADS": heads, "HEAD_DIM": head_dim, "D_PAD": triton.next_power_of_2(head_dim), "BLOCK_SIZE": k_cache.shape[1],
        "ROWS": use["ROWS"],
        "FORMAT": {torch.int8: 1, torch.float8_e4m3fn: 2}.get(k_cache.dtype, 0),
    }  # fmt: skip
    options = {"num_warps": use["num_warps"], "enable_fp_fusion": False}
    return Launch(kv_write_kernel, (-(-tokens * heads // use["ROWS"]),), arguments, options)


def _check(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> None:
    check_place(k)
    if k.dim() != 3 or k.shape != v.shape or k.dtype != v.dtype or k.dtype not in DTYPES or k.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"k and v must be alike, [T, kv_heads, head_dim <= {MAX_HEAD_DIM}] in float32, bfloat16 or float16: "
            f"{k.dtype} {list(k.shape)} and {v.dtype} {list(v.shape)}"
        )
    check_caches(k_cache, v_cache, k.shape[2], k.dtype)
    if k.shape[1] != k_cache.shape[2]:
        raise ValueError(f"k has {k.shape[1]} heads, the cache {k_cache.shape[2]}")
    if slots.shape != k.shape[:1] or slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64 [{k.shape[0]}], not {slots.dtype} {list(slots.shape)}")
