"""A quantised checkpoint on kernels/triton: which kernel multiplies which scheme. What none can take is multiplied out when it is read.

int4, groups of a multiple of 32, or a scale per output     weight-only, repacked (zero points, sorted inputs: too)
int8, a scale per output, or for all                        weight-only; with activations: W8A8
e4m3, a scale per output, or for all, with activations      W8A8, where the device multiplies e4m3
e4m3 in blocks of a multiple of 32 inputs                   W8A8 in blocks, where it does
int8 in groups, with zero points, and all others            dequantised as it is loaded"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from ....kernels.triton.int4_weight import int4_from_values
from ..triton_products import (
    BlockProduct,
    Int8Product,
    Joined,
    QuantizedProduct,
    TritonLinears,
    free,
    int4_products,
)
from .dequantized import StoredWeights

if TYPE_CHECKING:
    from ....core.models.linears import Linear, Matrix, ModelToLoad, Weights
    from ....kernels.triton.int4_weight import Int4Weight
    from ..triton_products import Biases
    from .formats import Format
    from .stored import Module, StoredWeight, Survey

W4, W8, W8A8, BLOCKS, DEQUANTISED = "int4 weights", "int8 weights", "W8A8", "W8A8 in blocks", "dequantised as it is loaded"
FP8_SINCE = (8, 9)
"""Compute capability."""
MAX_INT8_INPUTS = (2**31 - 1) // (128 * 128)


def device_linears(model: ModelToLoad, form: Format, survey: Survey) -> CheckpointLinears:
    make = CheckpointLinears if model.invariant else free(CheckpointLinears)
    return make(model, form, survey)


class CheckpointLinears(TritonLinears):
    def __init__(self, model: ModelToLoad, form: Format, survey: Survey) -> None:
        super().__init__(model.dtype)
        self._form, self._survey = form, survey
        self._heads = model.tensors
        fp8 = multiplies_e4m3(torch.device(model.device))
        self._ways = {name: way_of(module, fp8=fp8) for name, module in survey.items()}

    @property
    def ways(self) -> dict[str, int]:
        """How many matrices run which way."""
        return dict(Counter(self._ways.values()))

    def source(self, weights: Weights) -> Weights:
        return StoredWeights(weights, self._form, self._survey, self.dtype)

    def way(self, name: str) -> Hashable:
        way = self._ways.get(name, DEQUANTISED)
        return way if way == DEQUANTISED else (way, self._survey[name].scheme)

    def product(self, weights: Weights, names: Sequence[str], biases: Biases) -> Linear:
        way = self._ways.get(names[0], DEQUANTISED)
        if way == DEQUANTISED:
            return self.plain(weights, names, biases)
        stored = [cast("StoredWeights", weights).stored(name) for name in names]
        if way == W4:
            return int4_products([_int4(one) for one in stored], biases, invariant=self.invariant)
        values, scales = [one.values for one in stored], [one.scales for one in stored]
        if way == W8:
            return Int8Product(values, scales, biases, invariant=self.invariant)
        if way == BLOCKS:
            block = stored[0].module.scheme.block
            return BlockProduct(values, scales, block, biases, invariant=self.invariant)
        of_x = [one.activation_scale for one in stored if one.activation_scale is not None]
        if any(not torch.equal(scale, of_x[0]) for scale in of_x):
            return Joined([self.product(weights, [name], biases[i : i + 1]) for i, name in enumerate(names)])
        return QuantizedProduct(values, scales, biases, x_scale=of_x[0] if of_x else None, invariant=self.invariant)

    def nbytes(self, matrix: Matrix) -> int:
        found = {name: self._survey[name] for name in matrix.names if self._ways.get(name, DEQUANTISED) != DEQUANTISED}
        plain = (matrix.rows - sum(module.rows for module in found.values())) * matrix.columns
        if all(self._ways.get(name) == BLOCKS for name in matrix.names):
            return self._blocks(list(found.values())) + matrix.rows * matrix.bias * self.dtype.itemsize
        held = sum(self._held(name, module) for name, module in found.items())
        return held + (plain + matrix.rows * matrix.bias) * self.dtype.itemsize

    @staticmethod
    def _blocks(modules: Sequence[Module]) -> int:
        high = modules[0].scheme.block[0]
        apart = any(module.rows % high for module in modules[:-1])  # see BlockProduct
        scales = sum((module.rows if apart else module.scales[0]) * module.scales[1] for module in modules)
        return sum(module.rows * module.columns for module in modules) + 4 * scales

    def _held(self, name: str, module: Module) -> int:
        """Bytes of a quantised weight; of inputs that are sorted, their order is not counted."""
        if self._ways[name] == BLOCKS:
            return self._blocks([module])
        if self._ways[name] != W4:
            return module.rows * (module.columns + 4)
        size = packed_group(module)
        groups = -(-module.columns // size)
        stored = self._heads.get(f"{name}.scales") or self._heads.get(f"{name}.weight_scale")
        each = (4 if stored is not None and stored.dtype == "F32" else 2) + module.scheme.zeros
        return module.rows * groups * (size // 2 + each)


def way_of(module: Module, *, fp8: bool) -> str:
    """fp8: the device multiplies e4m3."""
    scheme = module.scheme
    rows, columns = scheme.block
    if scheme.kind == "int4":
        return W4 if rows == 1 and columns % 32 == 0 else DEQUANTISED
    if scheme.activations == "group" and scheme.kind == "e4m3" and fp8 and columns % 32 == 0 and module.columns % columns == 0:
        return BLOCKS
    if rows > 1 or columns or scheme.zeros:
        return DEQUANTISED
    if scheme.kind == "int8":
        fits = module.columns <= MAX_INT8_INPUTS
        return W8 if not scheme.activations else W8A8 if fits and scheme.activations == "token" else DEQUANTISED
    return W8A8 if scheme.activations and fp8 else DEQUANTISED


def multiplies_e4m3(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_SINCE


def packed_group(module: Module) -> int:
    """Inputs of a group as `int4_from_values` packs them."""
    size = module.scheme.block[1] or module.columns
    return 128 if size >= module.columns else next(group for group in (128, 64, 32) if size % group == 0)


def _int4(stored: StoredWeight) -> Int4Weight:
    values, zeros = stored.values, stored.zeros
    if values.dtype == torch.int8:
        values = (values + 8).to(torch.uint8)
        zeros = None if zeros is None else (zeros + 8).to(torch.uint8)
    size = stored.module.scheme.block[1] or -1
    return int4_from_values(
        values, None if zeros is None else zeros.T, stored.scales.T, size, None if size == -1 else stored.group_of
    )
