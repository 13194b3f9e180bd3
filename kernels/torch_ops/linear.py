"""Linear layers whose rows do not depend on each other: a row's bits are the same for every number of rows, position and thread count.

Two modes. Both reduce each row over its K inputs in one order that depends on the weight's shape only.

packed   oneDNN's blocked weight layout and its brgemm matmul (CPU; float32, and bfloat16 where the CPU has it). That kernel cuts K into
         blocks of min(K, 1024) inputs when K > 1024, else of min(K, 512), whatever M, N and the number of threads are; each
         accumulator takes its block's products one after the other. Three exceptions, and what is done about them:
           M == 1      the row also counts as a transposed matrix, and K > 1024 is then cut by 512     -> one row is computed as two
           K >= 20000  in float32, with M <= 512 and N <= 512, K is divided among threads              -> N is padded beyond 512
           AMX         in bfloat16, beyond 32 rows K is cut otherwise                                  -> 32 rows at a time
         (oneDNN 3.12, compute_blocking_heuristic_avx512 in src/cpu/x64/matmul/brgemm_matmul_utils.cpp; `probe` checks it where we run)
tile     torch's own matmul over row tiles of one fixed, zero-padded size. Everything else: other devices and dtypes, torch built
         without oneDNN. Invariant in M and position; on a CPU in float32 (MKL) only for one thread count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import torch
from torch.nn import functional as F

Mode = Literal["packed", "tile"]

TILE_ROWS = 32
HUGE_N = 16384
"""Outputs from which on oneDNN takes much longer per row when it is given many rows; they are then computed in pieces."""
AMX_ROWS = 32
SPLIT_K = 20000
SPLIT_N = 512


@cache
def packed_available(dtype: torch.dtype) -> bool:
    """Whether this torch and CPU have oneDNN's packed linear for `dtype`."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


@cache
def amx_available() -> bool:
    """Whether oneDNN may use this CPU's tile registers. True where torch can't say."""
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is None or bool(ask())


class TiledLinear:
    """y = x @ weight.T + bias for 2-D x, bit-invariant per row (see the module). Holds its own copy of the weight, packed."""

    __slots__ = ("_padded_n", "_piece", "_run", "_weight", "bias", "dtype", "in_features", "mode", "out_features")  # fmt: skip

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, mode: Mode | None = None) -> None:
        """weight: [out_features, in_features], bias: [out_features], of one dtype and device; neither is kept in "packed" mode but
        for the bias. mode None: "packed" where it is available. Raises ValueError for other shapes, or "packed" where it isn't."""
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(f"a linear layer needs a weight [N, K] and a bias [N], not {_shapes(weight, bias)}")
        possible = weight.device.type == "cpu" and packed_available(weight.dtype)
        if mode == "packed" and not possible:
            raise ValueError(f"no packed linear layer for {weight.dtype} on {weight.device}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.mode: Mode = mode or ("packed" if possible else "tile")
        self._padded_n = self.out_features
        self._run: Callable[[torch.Tensor], torch.Tensor]
        if self.mode == "packed":
            self._pack(weight.detach(), None if bias is None else bias.detach())
        else:
            self._weight, self.bias, self._piece, self._run = weight.detach(), bias, 0, self._tiles

    @classmethod
    def fuse(
        cls, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] = (), mode: Mode | None = None
    ) -> TiledLinear:
        """One layer whose outputs are those of several, one after the other (Q, K and V; gate and up). Biases: all or none."""
        given = [b for b in biases if b is not None]
        if given and len(given) != len(weights):
            raise ValueError(f"{len(weights)} weights, but {len(given)} biases")
        return cls(torch.cat(list(weights)), torch.cat(given) if given else None, mode)

    @property
    def weight(self) -> torch.Tensor | None:
        """[out_features, in_features] as it was given; None in "packed" mode, which has a layout of its own."""
        return self._weight if self.mode == "tile" else None

    @property
    def nbytes(self) -> int:
        """Of weight and bias, without the padding of the packed layout."""
        return (
            self.out_features * self.in_features + (self.out_features if self.bias is not None else 0)
        ) * self.dtype.itemsize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, in_features], M >= 0, of the weight's dtype, any strides. Returns a new [M, out_features]; x is left as it is."""
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty(0, self.out_features)
        return self._run(x)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        n, k = weight.shape
        if self.dtype == torch.float32 and k >= SPLIT_K and n <= SPLIT_N:
            self._padded_n = SPLIT_N + 1
            weight = F.pad(weight, (0, 0, 0, self._padded_n - n))
            bias = None if bias is None else F.pad(bias, (0, self._padded_n - n))
        self.bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._piece = (128 if self.dtype == torch.float32 else 256) if n >= HUGE_N else 0
        if self.dtype == torch.bfloat16 and amx_available():
            self._piece = AMX_ROWS
        self._run = self._packed

    def _packed(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if self._piece and rows > self._piece:
            out = x.new_empty(rows, self.out_features)
            for start in range(0, rows, self._piece):
                out[start : start + self._piece] = self._packed(x[start : start + self._piece])
            return out
        padded = padded_rows(rows)
        if padded != rows:
            x = pad_rows(x, padded)
        y = torch.ops.mkldnn._linear_pointwise.default(x.contiguous(), self._weight, self.bias, "none", [], "")
        if self._padded_n != self.out_features:
            return y[:rows, : self.out_features].contiguous()
        return y if padded == rows else y[:rows]

    def _tiles(self, x: torch.Tensor) -> torch.Tensor:
        return tiled_linear(x, self._weight, self.bias)


def tiled_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias, in "tile" mode, from a weight as it is: no packing, no state. x: [M, K] -> [M, N]."""
    rows = x.shape[0]
    out = x.new_empty(rows, weight.shape[0])
    for start in range(0, rows, TILE_ROWS):
        tile = x[start : start + TILE_ROWS]
        count = tile.shape[0]
        tile = tile.contiguous() if count == TILE_ROWS else pad_rows(tile, TILE_ROWS)
        out[start : start + count] = F.linear(tile, weight, bias)[:count]
    return out


def padded_rows(rows: int) -> int:
    """The number of rows that are computed for `rows`: few different ones, as oneDNN compiles a kernel (about 1 ms) for each.

    2, 3 ... 16, then multiples of 4 up to 64, of 16 up to 256, of 64 beyond."""
    if rows <= 16:
        return max(rows, 2)
    step = 4 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def pad_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """A contiguous copy of x [M, K] with rows added at its end, `rows` in all (zeros; a single row's are its copy)."""
    if x.shape[0] == 1 and rows == 2:
        return torch.cat([x, x])
    padded = x.new_zeros(rows, x.shape[1])
    padded[: x.shape[0]] = x
    return padded


def _shapes(weight: torch.Tensor, bias: torch.Tensor | None) -> str:
    return f"{list(weight.shape)} and {None if bias is None else list(bias.shape)}"
