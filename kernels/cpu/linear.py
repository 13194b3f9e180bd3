"""Linear layers from packed weights, for use from torch code."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import cast

import torch

from . import lib

DTYPES: dict[torch.dtype, lib.DType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CpuLinear:
    """y = x @ weight.T + bias for 2-D x. A row's bits are the same for every number of rows, position and thread count.

    Holds its own copy of weight and bias, packed. `handle` is the address of its tb_packed (src/linear.h), valid while it lives."""

    __slots__ = ("__weakref__", "_c", "aligned", "dtype", "handle", "in_features", "nbytes", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features], float32 or bfloat16, bias: [out_features] of its dtype; on the CPU, any strides.

        Raises ValueError for others, RuntimeError when there is no library (lib.load)."""
        self._pack([weight], [bias])

    @classmethod
    def fuse(cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = ()) -> CpuLinear:
        """One layer whose outputs are those of several, one after the other (Q, K and V; gate and up). Any bias may be missing."""
        layer = cls.__new__(cls)
        layer._pack(list(weights), list(biases) or [None] * len(weights))
        return layer

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [M, in_features], M >= 0, of the weight's dtype, any strides. Returns a new [M, out_features], of the weight's dtype or
        `out_dtype`; x is left as it is. Raises ValueError for another shape or dtype."""
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype != self.dtype or x.device.type != "cpu":
            raise ValueError(
                f"this layer takes {self.dtype} [M, {self.in_features}], not {x.dtype} {list(x.shape)} on {x.device}"
            )
        y = torch.empty(x.shape[0], self.out_features, dtype=out_dtype or self.dtype)
        if x.stride(1) != 1 or x.stride(0) < 0:
            x = x.contiguous()
        target = lib.DTYPES[DTYPES[y.dtype]]
        self._c.tb_linear(
            self.handle, x.data_ptr(), x.stride(0), y.data_ptr(), self.out_features, x.shape[0], target, 0
        )  # fmt: skip
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ids (int64 [R], each below out_features: not checked) of the matrix as it is stored, [R, in_features] of `dtype`.

        Quantised weights are dequantised in float32 and rounded once."""
        ids = ids.contiguous()
        y = torch.empty(ids.shape[0], self.in_features, dtype=self.dtype)
        self._c.tb_packed_rows(self.handle, ids.data_ptr(), ids.shape[0], lib.DTYPES[DTYPES[self.dtype]], y.data_ptr())
        return y

    def _pack(self, weights: list[torch.Tensor], biases: list[torch.Tensor | None]) -> None:
        dtype = weights[0].dtype
        check(weights, biases, dtype)
        self.dtype = dtype
        self.in_features: int = weights[0].shape[1]
        self.out_features: int = sum(w.shape[0] for w in weights)
        sources = [w if w.stride(1) == 1 else w.contiguous() for w in (w.detach() for w in weights)]
        vectors = [None if b is None else b.detach().contiguous() for b in biases]
        addresses = addresses_of(vectors)
        blocks = [(w.data_ptr(), w.shape[0], w.stride(0)) for w in sources]
        self._own(*lib.pack(DTYPES[dtype], blocks, self.in_features, addresses))
        self.nbytes: int = (
            self.out_features * self.in_features + (0 if addresses is None else self.out_features)
        ) * dtype.itemsize
        """Of weight and bias, without the padding of the packed layout."""

    def _own(self, handle: int, free: Callable[[], None]) -> None:
        self.handle = handle
        self.aligned = True
        """Output n is in tile n // 32: no padding between the matrices."""
        weakref.finalize(self, free)
        self._c = cast("lib.Library", lib.load()).c


def addresses_of(biases: Sequence[torch.Tensor | None]) -> list[int] | None:
    """For lib.pack...; None when there are no biases at all. The tensors must outlive the call."""
    return [0 if b is None else b.data_ptr() for b in biases] if any(b is not None for b in biases) else None


def check(weights: list[torch.Tensor], biases: list[torch.Tensor | None], dtype: torch.dtype) -> None:
    """Raises ValueError unless all are of `dtype`, on the CPU and fit each other."""
    if dtype not in DTYPES:
        raise ValueError(f"packed weights are float32 or bfloat16, not {dtype}")
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights, but {len(biases)} biases")
    for weight, bias in zip(weights, biases, strict=True):
        fits = weight.dim() == 2 and weight.shape[1] == weights[0].shape[1] and 0 not in weight.shape
        if not fits or (bias is not None and bias.shape != weight.shape[:1]):
            shapes = f"{list(weight.shape)} and {None if bias is None else list(bias.shape)}"
            raise ValueError(f"a linear layer needs a weight [N, K] and a bias [N], not {shapes}")
        if any(t is not None and (t.dtype != dtype or t.device.type != "cpu") for t in (weight, bias)):
            raise ValueError(f"weights and biases of one layer are of one dtype ({dtype}) and on the CPU")
