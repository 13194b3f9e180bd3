"""Row functions of a decoder (src/elementwise.h) for use from torch code, and the largest logits of a row without a sort."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_void_p

import torch

from . import lib

SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "tb_rms_norm": ((c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float), None),
    "tb_rms_norm_add": ((c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_float), None),
    "tb_rope": ((c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_int), None),
    "tb_glu": ((c_int, c_int, c_void_p, c_void_p, c_void_p, c_int, c_int), None),
    "tb_softcap": ((c_void_p, c_float, c_void_p, c_int, c_int), None),
    "tb_embed": ((c_int, c_void_p, c_void_p, c_float, c_void_p, c_int, c_int), None),
    "tb_top_k": ((c_void_p, c_int, c_int, c_int, c_void_p, c_void_p), None),
}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def functions() -> ctypes.CDLL:
    """The library with this module's functions declared. Raises RuntimeError when there is none."""
    library = lib.load()
    if library is None:
        raise RuntimeError(f"the CPU kernels are not available: {lib.unavailable_reason()}")
    if library.c.tb_top_k.argtypes is None:
        library.declare(SIGNATURES)
    return library.c


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, rounded once to x's dtype. weight: float32."""
    x = x.contiguous()
    y = torch.empty_like(x)
    n = x.shape[-1]
    functions().tb_rms_norm(DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // n, n, eps)
    return y


def rms_norm_add(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """residual + rms_norm(x), rounded once. All [..., n]."""
    x, y = x.contiguous(), residual.clone(memory_format=torch.contiguous_format)
    n = x.shape[-1]
    functions().tb_rms_norm_add(DTYPES[x.dtype], x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // n, n, eps)
    return y


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, heads, head_dim] by cos, sin float32 [T, r / 2]: halves of the first r dimensions against each other."""
    y = x.clone(memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape
    half = cos.shape[-1]
    cos, sin = cos.contiguous(), sin.contiguous()
    functions().tb_rope(DTYPES[x.dtype], y.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, dim, half)
    return y


def gated(activation: str, gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """activation(gate) * up of float32 [T, n], rounded once to dtype. activation: a name in ACTIVATIONS."""
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate, dtype=dtype)
    rows, n = gate.shape
    functions().tb_glu(ACTIVATIONS[activation], DTYPES[dtype], gate.data_ptr(), up.data_ptr(), y.data_ptr(), rows, n)
    return y


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap) of float32 [T, n]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    functions().tb_softcap(x.data_ptr(), cap, y.data_ptr(), *x.shape)
    return y


def embed(table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """table[ids] * scale. table: [vocabulary, n], contiguous; ids: int64 [T], each below vocabulary (not checked)."""
    ids = ids.contiguous()
    y = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
    functions().tb_embed(
        DTYPES[table.dtype], table.data_ptr(), ids.data_ptr(), scale, y.data_ptr(), len(ids), table.shape[1]
    )  # fmt: skip
    return y


def top_k(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of float32 [T, n] and their int32 indices, descending, the lower index first among equals.

    NaN counts as -infinity. 1 <= k <= n."""
    if not 1 <= k <= x.shape[1]:
        raise ValueError(f"k is {k}, for rows of {x.shape[1]}")
    x = x.contiguous()
    values, indices = torch.empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int32)
    functions().tb_top_k(x.data_ptr(), *x.shape, k, values.data_ptr(), indices.data_ptr())
    return values, indices
