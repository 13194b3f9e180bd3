"""int8 weights and activations on kernels/triton, of a model whose residual stream is rotated first (rotation.py)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from ...core.models.cpu_linears import Table
from ...kernels.triton.quantized_matmul import quantize_weight
from .rotation import RotatedWeights, can_rotate
from .triton_products import QuantizedProduct, TritonLinears, free

if TYPE_CHECKING:
    from ...core.models.config import DecoderConfig
    from ...core.models.linears import Embedding, Linear, Matrix, ModelToLoad, Weights
    from .triton_products import Biases


def int8_linears(model: ModelToLoad, config: DecoderConfig, keep: Sequence[str]) -> Int8TritonLinears:
    make = Int8TritonLinears if model.invariant else free(Int8TritonLinears)
    return make(config, model.dtype, keep)


class Int8TritonLinears(TritonLinears):
    def __init__(self, config: DecoderConfig, dtype: str, keep: Sequence[str]) -> None:
        """keep: ends of names of matrices that stay in `dtype`."""
        super().__init__(dtype)
        self._config, self._keep = config, tuple(keep)
        self._rotated: RotatedWeights | None = None

    def source(self, weights: Weights) -> Weights:
        if can_rotate(self._config):
            self._rotated = RotatedWeights(weights, self._config)
        return self._rotated or weights

    def way(self, name: str) -> Hashable:
        return name.endswith(self._keep)

    def product(self, weights: Weights, names: Sequence[str], biases: Biases) -> Linear:
        if self.way(names[0]):
            return self.plain(weights, names, biases)
        made = [quantize_weight(weights.get(f"{name}.weight")) for name in names]
        return QuantizedProduct([w for w, _ in made], [s for _, s in made], biases, invariant=self.invariant)

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return Table(weights.get(name) if self._rotated is None else self._rotated.embedding())

    def nbytes(self, matrix: Matrix) -> int:
        if all(self.way(name) for name in matrix.names):
            return (matrix.weights + matrix.rows * matrix.bias) * self.dtype.itemsize
        return matrix.weights + 4 * matrix.rows * (1 + matrix.bias)

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return matrix.weights * self.dtype.itemsize
