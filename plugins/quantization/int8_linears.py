"""Matrix products of int8 weights and activations, of a model whose residual stream is rotated first (rotation.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ...core.models.cpu_linears import GateUp, Table
from ...core.models.linears import Linears, tensors_of
from ...kernels.cpu.linear import CpuLinear
from ...kernels.cpu.quantized import QuantLinear
from .rotation import RotatedWeights, can_rotate

if TYPE_CHECKING:
    from ...core.models.config import DecoderConfig
    from ...core.models.linears import Embedding, Linear, Matrix, Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Int8Linears(Linears):
    fused: ClassVar[bool] = True

    def __init__(self, config: DecoderConfig, dtype: str, keep: Sequence[str]) -> None:
        """keep: ends of names of matrices that stay in `dtype`."""
        self._config = config
        self._dtype = DTYPES[dtype]
        self._keep = tuple(keep)
        self._rotated: RotatedWeights | None = None

    def kept(self, matrix: Matrix) -> bool:
        return any(name.endswith(self._keep) for name in matrix.names)

    def source(self, weights: Weights) -> Weights:
        if can_rotate(self._config):
            self._rotated = RotatedWeights(weights, self._config)
        return self._rotated or weights

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        return self._layer(*tensors_of(weights, matrix), kept=self.kept(matrix))

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        tensors, biases = tensors_of(weights, matrix)
        if len(tensors) == 1:
            tensors, biases = list(tensors[0].chunk(2)), list(biases[0].chunk(2)) if biases else []
        return GateUp(*(self._layer([w], biases[i : i + 1], kept=self.kept(matrix)) for i, w in enumerate(tensors)))

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return Table(weights.get(name) if self._rotated is None else self._rotated.embedding())

    def nbytes(self, matrix: Matrix) -> int:
        if self.kept(matrix):
            return (matrix.weights + matrix.rows * matrix.bias) * self._dtype.itemsize
        return matrix.weights + 4 * matrix.rows * (1 + matrix.bias)

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return matrix.weights * self._dtype.itemsize

    def _layer(self, tensors: list[torch.Tensor], biases: list[torch.Tensor], *, kept: bool) -> CpuLinear:
        if kept:
            return CpuLinear.fuse([t.to(self._dtype) for t in tensors], [b.to(self._dtype) for b in biases])
        kind = tensors[0].dtype
        return QuantLinear.int8(tensors, [b.to(kind) for b in biases], dtype=self._dtype)
