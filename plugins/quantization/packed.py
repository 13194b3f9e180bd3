"""Matrix products of packed GGUF weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch

from ...core.models.cpu_linears import GateUp, HeadRows, Table
from ...core.models.linears import Linears, PackedMatrix, biases_of
from ...kernels.cpu.linear import CpuLinear
from ...kernels.cpu.quantized import GgufMatrix, QuantLinear
from .gguf import PLAIN

if TYPE_CHECKING:
    from ...core.models.linears import Embedding, Linear, Matrix, ModelToLoad, Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PackedLinears(Linears):
    reads_packed: ClassVar[bool] = True
    fused: ClassVar[bool] = True

    def __init__(self, model: ModelToLoad) -> None:
        """A GGUF model whose matrices are all supported or plain."""
        self._stored = model.stored or {}
        self._dtype = DTYPES[model.dtype]

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        names = [f"{name}.weight" for name in matrix.names]
        biases = biases_of(weights, matrix)
        if self._plain(matrix):
            return CpuLinear.fuse([weights.get(name) for name in names], biases)
        return self._layer([weights.packed(name) for name in names], biases)

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        names = [f"{name}.weight" for name in matrix.names]
        biases: list[torch.Tensor] = biases_of(weights, matrix)
        if len(names) == 1 and biases:
            biases = list(biases[0].chunk(2))
        if self._plain(matrix):
            tensors = [weights.get(name) for name in names]
            halves = list(tensors[0].chunk(2)) if len(names) == 1 else tensors
            return GateUp(*(CpuLinear(half, biases[i] if biases else None) for i, half in enumerate(halves)))
        blocks = [weights.packed(name) for name in names]
        if len(blocks) == 1:
            both, rows = blocks[0], blocks[0].data.shape[0] // 2
            blocks = [PackedMatrix(part, both.type, both.in_features) for part in (both.data[:rows], both.data[rows:])]
        return GateUp(*(self._layer([block], biases[i : i + 1]) for i, block in enumerate(blocks)))

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return Table(weights.get(name)) if head is None else HeadRows(cast("CpuLinear", head))

    def nbytes(self, matrix: Matrix) -> int:
        if self._plain(matrix):
            return (matrix.weights + matrix.rows * matrix.bias) * self._dtype.itemsize
        return sum(self._stored[f"{name}.weight"].nbytes for name in matrix.names) + 4 * matrix.rows * matrix.bias

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return 0 if tied else matrix.weights * self._dtype.itemsize

    def _layer(self, blocks: Sequence[PackedMatrix], biases: list[torch.Tensor]) -> QuantLinear:
        return QuantLinear.gguf([GgufMatrix(b.data, b.type, b.in_features) for b in blocks], biases, dtype=self._dtype)

    def _plain(self, matrix: Matrix) -> bool:
        return self._stored[f"{matrix.names[0]}.weight"].type in PLAIN
