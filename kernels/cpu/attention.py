"""Paged attention in C++ (src/attention.h) on torch tensors."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_size_t, c_void_p

import torch

from . import lib

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
KV_DTYPES = {**DTYPES, torch.int8: 16}
"""Of caches (attention.h)."""


class Batch(ctypes.Structure):
    """tb_batch."""

    _fields_ = (
        ("tokens", c_int),
        ("requests", c_int),
        ("block_size", c_int),
        ("slots", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("table_start", c_void_p),
        ("blocks", c_void_p),
    )


class Heads(ctypes.Structure):
    """tb_heads."""

    _fields_ = (
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("dtype", c_int),
        ("kv_dtype", c_int),
        ("window", c_int),
        ("scale", c_float),
        ("softcap", c_float),
    )


SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "tb_write_kv": (
        (POINTER(Heads), POINTER(Batch), c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p),
        None,
    ),
    "tb_attention": ((POINTER(Heads), POINTER(Batch), c_void_p, c_size_t, c_void_p, c_void_p, c_void_p), None),
    "tb_kv_paired": ((POINTER(Heads), c_int), c_int),
}


class FlatBatch:
    """One step's ragged batch as the library reads it. `struct.block_size` is set by who knows the cache."""

    __slots__ = ("_kept", "struct")

    def __init__(
        self,
        query_start: Sequence[int],
        context_len: Sequence[int],
        block_tables: Sequence[list[int]],
        slots: torch.Tensor,
    ) -> None:
        """As in core's AttentionBatch."""
        starts, blocks = array("i"), array("i")
        for table in block_tables:
            starts.append(len(blocks))
            blocks.fromlist(table)
        lists = [array("i", query_start), array("i", context_len), starts, blocks]
        slots = slots.contiguous()
        self._kept = (lists, slots)
        addresses = [numbers.buffer_info()[0] for numbers in lists]
        self.struct = Batch(slots.shape[0], len(context_len), 0, slots.data_ptr(), *addresses)


def functions() -> ctypes.CDLL:
    """The library with this module's functions declared. Raises RuntimeError when there is none."""
    library = lib.load()
    if library is None:
        raise RuntimeError(f"the CPU kernels are not available: {lib.unavailable_reason()}")
    if library.c.tb_attention.argtypes is None:
        library.declare(SIGNATURES)
    return library.c


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: FlatBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write k, v [T, kv_heads, head_dim] to the batch's slots, then attend causally with q [T, heads, head_dim].

    float32 or bfloat16, q, k and v of one dtype; caches [blocks, block_size, kv_heads, head_dim], contiguous, of either; or int8
    [blocks, block_size, kv_heads, head_dim + 4], rows of int8 and one float32 to multiply them with. Within a block the order may be
    another (`read_kv`). window: position i sees j with i - window < j <= i. softcap: scores become softcap * tanh(scores / softcap).
    Returns a new [T, heads, head_dim] in q's dtype; sums are float32. A row depends on its own position and the K/V stored up to it,
    bit by bit.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    tokens, heads, dim = q.shape
    shape = Heads(
        heads,
        k.shape[1],
        dim,
        DTYPES[q.dtype],
        KV_DTYPES[k_cache.dtype],
        window or 0,
        scale,
        softcap or 0.0,
    )
    out = torch.empty(tokens, heads, dim, dtype=q.dtype)
    batch.struct.block_size = k_cache.shape[1]
    caches = k_cache.data_ptr(), v_cache.data_ptr()
    c = functions()
    c.tb_write_kv(shape, batch.struct, k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0), *caches)
    c.tb_attention(shape, batch.struct, q.data_ptr(), q.stride(0), *caches, out.data_ptr())
    return out


def read_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [blocks, block_size, kv_heads, row], rows of a token's head, of caches that were written with q of `dtype` at the
    instruction set in use. The caches themselves if they are in this order, else copies (tb_kv_paired in src/attention.h)."""
    blocks, size, heads, dim = k_cache.shape
    shape = Heads(heads, heads, dim, DTYPES[dtype], KV_DTYPES[k_cache.dtype], 0, 1.0, 0.0)
    if not functions().tb_kv_paired(shape, size):
        return k_cache, v_cache
    group = 16  # TB_PAIRED_GROUP of src/attention.h
    k = k_cache.view(blocks, heads, size // group, dim // 2, group, 2).permute(0, 2, 4, 1, 3, 5)
    v = v_cache.view(blocks, heads, size // 2, dim, 2).permute(0, 2, 4, 1, 3)
    return k.reshape(k_cache.shape), v.reshape(v_cache.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] with a token's heads behind each other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) >= 0 else x.contiguous()
