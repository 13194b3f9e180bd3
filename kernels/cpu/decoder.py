"""A whole step of a dense decoder in one call (src/decoder.h)."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_void_p
from dataclasses import dataclass
from typing import Literal

import torch

from . import lib
from .attention import DTYPES, KV_DTYPES, Batch, FlatBatch
from .elementwise import ACTIVATIONS
from .linear import CpuLinear


@dataclass(frozen=True)
class FusedLayer:
    """One layer's weights. Norms: float32 [n], 1 added where the family says so."""

    qkv: CpuLinear
    out: CpuLinear
    gate: CpuLinear
    up: CpuLinear
    down: CpuLinear
    before_attention: torch.Tensor
    before_mlp: torch.Tensor
    after_attention: torch.Tensor | None = None
    """Before the result is added to the residual stream."""
    after_mlp: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int | None = None
    rope: int | None = None
    """Which of a step's tables of angles; None: no rotation."""


@dataclass(frozen=True)
class FusedShape:
    dtype: torch.dtype
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    attention_scale: float
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float | None = None


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("before_attention", "after_attention", "before_mlp", "after_mlp", "q_norm", "k_norm")),
        ("window", c_int),
        ("rope", c_int),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, c_int) for name in ("dtype", "layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        ("activation", c_int),
        *((name, c_float) for name in ("norm_eps", "attention_scale", "attention_softcap", "logit_softcap", "embed_scale")),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", c_void_p),
        ("layer", POINTER(_Layer)),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("batch", Batch),
        *((name, c_void_p) for name in ("token_ids", "positions", "k", "v", "cos", "sin", "half")),
    )


SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "tb_decoder_create": ((POINTER(_Config),), c_void_p),
    "tb_decoder_free": ((c_void_p,), None),
    "tb_decoder_set_kv": ((c_void_p, c_int), None),
    "tb_decoder_step": ((c_void_p, POINTER(_Step), c_void_p), c_int),
    "tb_decoder_logits": ((c_void_p, c_void_p, c_int, c_void_p), None),
}


class FusedDecoder:
    """Holds the library's decoder and everything that it points to. One step at a time."""

    def __init__(
        self,
        shape: FusedShape,
        layers: Sequence[FusedLayer],
        embedding: torch.Tensor | None,
        norm: torch.Tensor,
        head: CpuLinear,
    ) -> None:
        """embedding: [vocabulary, hidden] of shape.dtype, contiguous; None: the head's rows. norm: float32 [hidden].

        Raises ValueError for gate and up whose outputs aren't at the same place and for weights that don't fit `shape` (steps don't look
        again), RuntimeError without a library."""
        library = lib.load()
        if library is None:
            raise RuntimeError(f"the CPU kernels are not available: {lib.unavailable_reason()}")
        if any(not linear.aligned for layer in layers for linear in (layer.gate, layer.up)):
            raise ValueError("types of gate or up change within 32 outputs: their columns would not stand beside each other")
        _check_sizes(shape, layers, embedding, norm, head)
        library.declare(SIGNATURES)
        self._c = library.c
        self._kept = (list(layers), embedding, norm, head)
        self._shape = shape
        self._vocabulary = head.out_features
        self._count = len(layers)
        self.steps = 0
        """Steps run so far."""
        self._caches: tuple[weakref.ref[torch.Tensor], ctypes.Array, ctypes.Array] | None = None
        structs = (_Layer * len(layers))(*(_layer(layer) for layer in layers))
        config = _Config(
            DTYPES[shape.dtype],
            len(layers),
            shape.hidden,
            shape.intermediate,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            ACTIVATIONS[shape.activation],
            shape.norm_eps,
            shape.attention_scale,
            shape.attention_softcap or 0.0,
            shape.logit_softcap or 0.0,
            1.0 if shape.embed_scale is None else shape.embed_scale,
            None if embedding is None else embedding.data_ptr(),
            norm.data_ptr(),
            head.handle,
            structs,
        )
        handle = self._c.tb_decoder_create(config)
        if not handle:
            raise MemoryError("no memory for the decoder")
        self._handle = handle
        weakref.finalize(self, self._c.tb_decoder_free, handle)

    def step(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: FlatBatch,
        k: Sequence[torch.Tensor],
        v: Sequence[torch.Tensor],
        angles: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Run int64 token_ids [T] at positions [T]; write their K/V into k, v, a layer each, [blocks, block_size, kv_heads, head_dim]
        of the model's dtype, or int8 with head_dim + 4 in all layers (core's KVLayout).

        angles: float32 [2, n, half] each, cos and sin of all positions, contiguous. Returns normalised hidden states [T, hidden]. A
        row's bits depend on its request's tokens up to it only. Token ids and blocks must be in range: they are not checked.
        """
        batch.struct.block_size = k[0].shape[1]
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        kept = (*self._pointers_to(k, v), *self._pointers_to_angles(angles))
        step = _Step(batch.struct, token_ids.data_ptr(), positions.data_ptr(), *(ctypes.addressof(numbers) for numbers in kept))
        hidden = torch.empty(token_ids.shape[0], self._shape.hidden, dtype=self._shape.dtype)
        if self._c.tb_decoder_step(self._handle, step, hidden.data_ptr()):
            raise MemoryError(f"no memory for a step of {token_ids.shape[0]} tokens")
        self.steps += 1
        return hidden

    def _pointers_to(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> tuple[ctypes.Array, ctypes.Array]:
        """The caches' addresses, found anew when their tensors are others than at the last step."""
        if self._caches is None or self._caches[0]() is not k[0]:
            addresses = [(c_void_p * self._count)(*(cache.data_ptr() for cache in caches)) for caches in (k, v)]
            self._caches = (weakref.ref(k[0]), addresses[0], addresses[1])
            self._c.tb_decoder_set_kv(self._handle, KV_DTYPES[k[0].dtype])
        return self._caches[1:]

    def _pointers_to_angles(self, angles: Sequence[torch.Tensor]) -> tuple[ctypes.Array, ctypes.Array, ctypes.Array]:
        """cos and sin of each table, and how many there are of a position."""
        tables = [(table.data_ptr(), table.shape[1], table.shape[2]) for table in angles]
        cos = (c_void_p * len(tables))(*(address for address, _, _ in tables))
        sin = (c_void_p * len(tables))(*(address + 4 * rows * half for address, rows, half in tables))
        return cos, sin, (c_int32 * len(tables))(*(half for _, _, half in tables))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden], R >= 1. Returns float32 [R, vocabulary], soft-capped."""
        hidden = hidden.contiguous()
        out = torch.empty(hidden.shape[0], self._vocabulary)
        self._c.tb_decoder_logits(self._handle, hidden.data_ptr(), hidden.shape[0], out.data_ptr())
        return out


def _check_sizes(
    shape: FusedShape, layers: Sequence[FusedLayer], embedding: torch.Tensor | None, norm: torch.Tensor, head: CpuLinear
) -> None:
    hidden, wide, heads = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
    products = {
        "qkv": (heads + 2 * shape.kv_heads * shape.head_dim, hidden),
        "out": (hidden, heads),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
    norms = dict.fromkeys(("before_attention", "after_attention", "before_mlp", "after_mlp"), hidden)
    norms |= dict.fromkeys(("q_norm", "k_norm"), shape.head_dim)
    found: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = [
        (f"{name} of layer {i}", _size(getattr(layer, name)), size)
        for i, layer in enumerate(layers)
        for name, size in products.items()
    ]
    found += [
        (f"{name} of layer {i}", (weight.numel(),), (size,))
        for i, layer in enumerate(layers)
        for name, size in norms.items()
        if (weight := getattr(layer, name)) is not None
    ]
    found += [("the norm", (norm.numel(),), (hidden,)), ("the head", _size(head), (head.out_features, hidden))]
    if embedding is not None:
        found.append(("the embedding", tuple(embedding.shape), (len(embedding), hidden)))
    for name, size, wanted in found:
        if size != wanted:
            raise ValueError(f"{name} is {list(size)}, not {list(wanted)} as the model's shape has it")


def _size(linear: CpuLinear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


def _layer(layer: FusedLayer) -> _Layer:
    norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp, layer.q_norm, layer.k_norm)
    return _Layer(
        *(linear.handle for linear in (layer.qkv, layer.out, layer.gate, layer.up, layer.down)),
        *(None if norm is None else norm.data_ptr() for norm in norms),
        layer.window or 0,
        -1 if layer.rope is None else layer.rope,
    )
