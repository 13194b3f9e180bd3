"""Matrix products on the C++ kernels, for the fused decoder and for plugins that make their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from ...kernels.cpu.linear import CpuLinear
from .decoder import HeadRows, Table, TorchLinears
from .linears import tensors_of

__all__ = ["CpuLinears", "GateUp", "HeadRows", "Table", "TorchLinears"]

if TYPE_CHECKING:
    from .linears import Embedding, Linear, Matrix, Weights


class GateUp:
    """Two layers, so that the library can compute the same columns of both; for torch code one."""

    def __init__(self, gate: CpuLinear, up: CpuLinear) -> None:
        self.gate = gate
        self.up = up

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.gate(x), self.up(x)], dim=-1)


class CpuLinears(TorchLinears):
    fused: ClassVar[bool] = True

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        return CpuLinear.fuse(*tensors_of(weights, matrix))

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        tensors, biases = tensors_of(weights, matrix)
        if len(tensors) == 1:
            tensors, biases = list(tensors[0].chunk(2)), list(biases[0].chunk(2)) if biases else []
        return GateUp(*(CpuLinear(w, biases[i] if biases else None) for i, w in enumerate(tensors)))

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return super().embedding(weights, name, head) if head is None else HeadRows(cast("CpuLinear", head))
