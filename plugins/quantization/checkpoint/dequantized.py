"""A quantised checkpoint as if it were none: each matrix is multiplied out when it is read, in float32, and rounded once to the model's
dtype. Memory and speed are those of the model unquantised; activations stay in its dtype, whatever the scheme does with them. But for int8
weights with int8 activations: where there are the C++ kernels, they stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import structlog
import torch

from ....core.models.cpu_linears import CpuLinears, GateUp, TorchLinears
from ....core.models.linears import biases_of
from ....kernels.cpu.quantized import QuantLinear

if TYPE_CHECKING:
    from ....core.models.linears import Linear, Linears, Matrix, ModelToLoad, PackedMatrix, Weights
    from .formats import Format
    from .stored import Scheme, StoredWeight, Survey

log = structlog.get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StoredWeights:
    """A checkpoint's tensors; of a quantised matrix `get` gives what it stands for."""

    def __init__(self, weights: Weights, form: Format, survey: Survey, dtype: torch.dtype) -> None:
        self._weights, self._form, self._survey, self._dtype = weights, form, survey, dtype
        log.info("quantized_checkpoint", **form.report)

    def get(self, name: str) -> torch.Tensor:
        """In the model's dtype. Raises ValueError for tensors that don't fit each other."""
        module = name.removesuffix(".weight")
        if module == name and (stack := self._form.stack(self._weights, name, self._dtype)) is not None:
            return stack
        if module == name or module not in self._survey:
            return self._weights.get(name)
        return self.stored(module).dequantized().to(self._dtype)

    def stored(self, module: str) -> StoredWeight:
        """Raises ValueError, with the module's name."""
        try:
            return self._form.read(self._weights, module, self._survey[module])
        except ValueError as error:
            raise ValueError(f"{module}: {error}") from None

    def raw(self, name: str) -> torch.Tensor | None:
        return self._weights.raw(name)

    def packed(self, name: str) -> PackedMatrix:
        return self._weights.packed(name)


class DequantizedLinears(TorchLinears):
    """Core's products on torch."""

    def __init__(self, form: Format, survey: Survey, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._form, self._survey = form, survey

    def source(self, weights: Weights) -> Weights:
        return StoredWeights(weights, self._form, self._survey, self.dtype)


class StoredCpuLinears(CpuLinears):
    """Core's products on the C++ kernels; int8 weights whose activations are int8, too, stay as they are."""

    def __init__(self, form: Format, survey: Survey, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._form, self._survey = form, survey

    def source(self, weights: Weights) -> Weights:
        return StoredWeights(weights, self._form, self._survey, self.dtype)

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        if not self._stays(matrix):
            return super().one(weights, matrix)
        stored = [cast("StoredWeights", weights).stored(name) for name in matrix.names]
        return self._product([one.values for one in stored], [one.scales for one in stored], biases_of(weights, matrix))

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        if not self._stays(matrix):
            return super().gate_up(weights, matrix)
        stored = [cast("StoredWeights", weights).stored(name) for name in matrix.names]
        values, scales = torch.cat([one.values for one in stored]), torch.cat([_of_rows(one) for one in stored])
        biases = [
            part for bias in biases_of(weights, matrix) for part in (bias.chunk(2) if len(matrix.names) == 1 else (bias,))
        ]
        halves = zip(values.chunk(2), scales.chunk(2), strict=True)
        return GateUp(*(self._product([w], [s], biases[i : i + 1]) for i, (w, s) in enumerate(halves)))

    def nbytes(self, matrix: Matrix) -> int:
        return matrix.weights + 4 * matrix.rows * (1 + matrix.bias) if self._stays(matrix) else super().nbytes(matrix)

    def _stays(self, matrix: Matrix) -> bool:
        return all(name in self._survey and is_w8a8(self._survey[name].scheme) for name in matrix.names)

    def _product(
        self, values: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], biases: list[torch.Tensor]
    ) -> QuantLinear:
        spread = [s.float().reshape(-1).expand(len(v)).contiguous() for v, s in zip(values, scales, strict=True)]
        return QuantLinear.stored_int8(values, spread, biases, self.dtype)


def _of_rows(stored: StoredWeight) -> torch.Tensor:
    return stored.scales.float().reshape(-1).expand(stored.module.rows)


def is_w8a8(scheme: Scheme) -> bool:
    """int8 weights with a scale per output, or for all, and activations with one per row: what `QuantLinear.int8` computes."""
    rows, columns = scheme.block
    return (scheme.kind, scheme.activations, scheme.zeros) == ("int8", "token", False) and rows < 2 and not columns


def cpu_linears(model: ModelToLoad, form: Format, survey: Survey) -> tuple[Linears, str]:
    """Products for the model, by the kernels that can run it; and how they run, in words."""
    dtype = DTYPES[model.dtype]
    how = f"dequantised as it is loaded: memory and speed are those of the model in {model.dtype}"
    if model.no_cpu_kernels:
        return DequantizedLinears(form, survey, dtype), how
    stay = sum(is_w8a8(module.scheme) for module in survey.values())
    whole = "W8A8 in the C++ kernels" if stay == len(survey) else f"{stay} matrices W8A8 in the C++ kernels, the others {how}"
    return StoredCpuLinears(form, survey, dtype), whole if stay else how
