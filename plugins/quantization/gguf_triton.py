"""A GGUF file's Q4_0 matrices on kernels/triton, as they are: 4 bits with a scale for 32 values is what `int4_matmul` multiplies, and the
bytes are in its order. Matrices of all other formats are dequantised as they are loaded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.triton.int4_weight import Int4Weight
from .triton_products import TritonLinears, free, int4_products

if TYPE_CHECKING:
    from ...core.models.linears import Linear, Matrix, ModelToLoad, PackedMatrix, Weights
    from .triton_products import Biases

PACKED = "Q4_0"
GROUP, BLOCK_BYTES = 32, 18
"""Values of a block; its bytes: a float16 scale, then 16 bytes, value j in the low half of byte j, value 16 + j in its high half."""


def gguf_linears(model: ModelToLoad) -> GgufTritonLinears:
    make = GgufTritonLinears if model.invariant else free(GgufTritonLinears)
    return make(model)


class GgufTritonLinears(TritonLinears):
    reads_packed = True

    def __init__(self, model: ModelToLoad) -> None:
        super().__init__(model.dtype)
        self._stored = model.stored or {}
        self._device = torch.device(model.device)

    def way(self, name: str) -> Hashable:
        return self._stored[f"{name}.weight"].type == PACKED

    def product(self, weights: Weights, names: Sequence[str], biases: Biases) -> Linear:
        if not self.way(names[0]):
            return self.plain(weights, names, biases)
        made = [self._int4(weights.packed(f"{name}.weight")) for name in names]
        return int4_products(made, biases, invariant=self.invariant)

    def nbytes(self, matrix: Matrix) -> int:
        packed = sum(self._stored[f"{name}.weight"].nbytes for name in matrix.names if self.way(name))
        plain = matrix.weights - packed // BLOCK_BYTES * GROUP
        return packed + (plain + matrix.rows * matrix.bias) * self.dtype.itemsize

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return 0 if tied and not self.way(matrix.names[0]) else matrix.weights * self.dtype.itemsize

    def _int4(self, packed: PackedMatrix) -> Int4Weight:
        rows = packed.data.shape[0]
        blocks = packed.data.reshape(rows, -1, BLOCK_BYTES)
        scales = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
        data = np.ascontiguousarray(blocks[:, :, 2:]).reshape(rows, -1)
        return Int4Weight(
            torch.from_numpy(data).to(self._device),
            torch.from_numpy(np.ascontiguousarray(scales.T)).to(self._device),
            None,
            GROUP,
            packed.in_features,
        )
