"""Linear layers from quantised weights (src/quant.h): int8 with a scale per output, or GGUF's blocks as they are in the file."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from . import lib
from .linear import DTYPES, CpuLinear, addresses_of, check

if TYPE_CHECKING:
    import numpy as np


def supported_gguf_types() -> frozenset[str]:
    return frozenset(lib.GGUF_FORMATS)


@dataclass(frozen=True)
class GgufMatrix:
    """A matrix [N, in_features] as a GGUF file holds it."""

    data: torch.Tensor | np.ndarray
    """uint8 [N, bytes of a row], rows contiguous. Read while a layer is made of it, not kept."""
    type: str
    """A name in supported_gguf_types()."""
    in_features: int


class QuantLinear(CpuLinear):
    """y = x @ weight.T + bias for 2-D x, from quantised weights; x is quantised inside. Otherwise as CpuLinear.

    Made by `int8`, `stored_int8` or `gguf`, not by its constructor."""

    __slots__ = ()

    @classmethod
    def int8(
        cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = (), dtype: torch.dtype | None = None
    ) -> QuantLinear:
        """One layer whose outputs are those of several. Weights: int8, a scale max|w| / 127 for each output; x: int8, one scale a row.

        weights: [N_i, K], float32 or bfloat16, biases: [N_i], one dtype, on the CPU, any strides. dtype: of x, float32 or bfloat16, the
        weights' unless given. Raises ValueError for others, RuntimeError when there is no library."""
        weights = [w.detach() for w in weights]
        check(weights, list(biases) or [None] * len(weights), weights[0].dtype)
        sources = [w if w.stride(1) == 1 else w.contiguous() for w in weights]
        blocks = [(w.data_ptr(), w.shape[0], w.stride(0)) for w in sources]
        dtype = dtype or weights[0].dtype
        layer, bias = cls._new(dtype), _float_biases(biases)
        packed = lib.pack_int8(
            DTYPES[dtype], DTYPES[weights[0].dtype], blocks, weights[0].shape[1], addresses_of(bias)
        )  # fmt: skip
        layer._hold(*packed, blocks, weights[0].shape[1])
        return layer

    @classmethod
    def stored_int8(
        cls,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None] = (),
        dtype: torch.dtype = torch.float32,
    ) -> QuantLinear:
        """`int8` of weights that are quantised already, and are kept as they are: int8 [N_i, K], scales float32 [N_i]. biases: float32 or
        bfloat16 [N_i]. dtype: of x, float32 or bfloat16. Raises ValueError for others, RuntimeError when there is no library."""
        layer, rows, k = cls._new(dtype), [w.shape[0] for w in weights], weights[0].shape[1]
        for w, s in zip(weights, scales, strict=True):
            if (
                w.dtype != torch.int8
                or w.shape[1:] != (k,)
                or 0 in w.shape
                or s.shape != w.shape[:1]
                or s.dtype != torch.float32
            ):
                raise ValueError(
                    f"weights are int8 [N, {k}] with float32 [N] scales, not {w.dtype} {list(w.shape)}, {s.dtype} {list(s.shape)}"
                )
        _check_biases(rows, biases)
        data = [torch.zeros(n, (k + 3) // 4 * 4 + 4, dtype=torch.int8) for n in rows]
        for whole, w, s in zip(data, weights, scales, strict=True):
            whole[:, :k] = w
            whole[:, -4:] = s[:, None].contiguous().view(torch.int8)
        blocks, bias = [(d.data_ptr(), d.shape[0], d.stride(0)) for d in data], _float_biases(biases)
        layer._hold(*lib.pack_int8(DTYPES[dtype], "stored", blocks, k, addresses_of(bias)), blocks, k)
        return layer

    @classmethod
    def gguf(
        cls,
        blocks: Sequence[GgufMatrix],
        biases: Sequence[torch.Tensor | None] = (),
        dtype: torch.dtype = torch.float32,
    ) -> QuantLinear:
        """One layer whose outputs are those of several matrices, which may differ in type. x: int8, one scale for 32 values.

        biases: float32 or bfloat16 [N_i]. dtype: of x, float32 or bfloat16. Raises ValueError for others, and for data that isn't of
        its type and width; RuntimeError when there is no library."""
        blocks = list(blocks)
        layer, k = cls._new(dtype), blocks[0].in_features
        data = [_bytes_of(block, k) for block in blocks]
        _check_biases([d.shape[0] for d in data], biases)
        sources = [(d.data_ptr(), d.shape[0], d.stride(0)) for d in data]
        bias, ends = _float_biases(biases), itertools.accumulate(d.shape[0] for d in data)
        layer._hold(*lib.pack_gguf(DTYPES[dtype], [b.type for b in blocks], sources, k, addresses_of(bias)), sources, k)
        layer.aligned = all(a.type == b.type or n % lib.TILE_N == 0 for a, b, n in zip(blocks, blocks[1:], ends, strict=False))
        return layer

    @classmethod
    def _new(cls, dtype: torch.dtype) -> QuantLinear:
        if dtype not in DTYPES:
            raise ValueError(f"activations are float32 or bfloat16, not {dtype}")
        layer = cls.__new__(cls)
        layer.dtype = dtype
        return layer

    def _hold(self, handle: int, free: Callable[[], None], blocks: Sequence[tuple[int, int, int]], k: int) -> None:
        self._own(handle, free)
        self.in_features = k
        self.out_features = sum(rows for _, rows, _ in blocks)
        self.nbytes = self._c.tb_packed_bytes(handle)


def _bytes_of(block: GgufMatrix, k: int) -> torch.Tensor:
    """The matrix's bytes [N, bytes of a row], its rows contiguous. A read-only array is not copied: nobody writes."""
    if block.type not in lib.GGUF_FORMATS:
        raise ValueError(f"{block.type} is none of the types that stay packed: {', '.join(sorted(lib.GGUF_FORMATS))}")
    if block.in_features != k:
        raise ValueError(f"matrices of one layer take the same number of inputs, not {k} and {block.in_features}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        data = torch.as_tensor(block.data)
    width = lib.gguf_row_bytes(block.type, k)
    if not width or data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != width or data.shape[0] == 0:
        raise ValueError(f"{block.type} of {k} inputs takes uint8 [N, {width}], not {data.dtype} {list(data.shape)}")
    return data if data.stride(1) == 1 else data.contiguous()


def _check_biases(rows: list[int], biases: Sequence[torch.Tensor | None]) -> None:
    if biases and len(biases) != len(rows):
        raise ValueError(f"{len(rows)} weights, but {len(biases)} biases")
    for n, bias in zip(rows, biases, strict=False):
        if bias is not None and (bias.shape != (n,) or bias.dtype not in DTYPES or bias.device.type != "cpu"):
            raise ValueError(
                f"a bias of {n} outputs is float32 or bfloat16 [{n}] on the CPU, not {bias.dtype} {list(bias.shape)}"
            )


def _float_biases(biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [None if b is None else b.detach().float().contiguous() for b in biases]
