"""Core's matrix products on a GPU: cuBLAS's, or Triton's, whose rows do not depend on each other."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional as F

from ..device import GPU_IS_OFF
from .decoder import Table, TorchLinears
from .linears import tensors_of

if TYPE_CHECKING:
    from .linears import Embedding, Linear, Matrix, Weights


class DenseLinear:
    """y = x @ weight.T + bias by torch, that is by cuBLAS on a GPU; which of its kernels depends on the number of rows."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features], rows contiguous; bias: [out_features]; both are kept."""
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [M, in_features], M >= 0. A new [M, out_features]."""
        return F.linear(x, self.weight, self.bias)


class InvariantLinear(DenseLinear):
    """The same by kernels/triton/matmul.py."""

    __slots__ = ("_matmul",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        from ...kernels.triton.matmul import matmul

        super().__init__(weight, bias)
        self._matmul = matmul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._matmul(x, self.weight, self.bias)


class _DenseLinears(TorchLinears):
    """Weights as they are, on the model's device. A tied model's embedding and head are one tensor."""

    @abstractmethod
    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear: ...

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        tensors, biases = tensors_of(weights, matrix)
        weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return self.make(weight.contiguous(), torch.cat(biases) if biases else None)

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return Table(head.weight) if isinstance(head, DenseLinear) else super().embedding(weights, name, head)


class CublasLinears(_DenseLinears):
    """With model.batch_invariant off."""

    invariant: ClassVar[bool] = False

    @property
    def lossy_reason(self) -> str:
        return GPU_IS_OFF

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        return DenseLinear(weight, bias)


class InvariantLinears(_DenseLinears):
    """With model.batch_invariant on. For a decoder on Triton."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        return InvariantLinear(weight, bias)
