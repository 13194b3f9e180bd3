"""Matrix products on kernels/triton, for the plugins that make a model's own: x [M, K] of the model's dtype -> [M, N] of the same.

Each row depends on itself alone where `invariant` says so; without it the kernels may choose tiles by the number of rows."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...core.models.cpu_linears import Table
from ...core.models.linears import Linears, biases_of
from ...kernels.triton.block_fp8_matmul import block_fp8_matmul
from ...kernels.triton.matmul import matmul
from ...kernels.triton.quantized_matmul import LIMITS, quantize_activations, w8a8_matmul
from ...kernels.triton.weight_only_matmul import int4_matmul, int8_weight_matmul

if TYPE_CHECKING:
    from ...core.models.linears import Embedding, Linear, Matrix, Weights
    from ...kernels.triton.int4_weight import Int4Weight

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Biases = Sequence[torch.Tensor]
"""One for each weight, or none at all."""


class PlainProduct:
    """Weights in the model's dtype."""

    def __init__(self, weights: Sequence[torch.Tensor], biases: Biases, *, invariant: bool) -> None:
        self.weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(list(weights))
        self.bias, self._invariant = _joined(biases), invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._invariant:
            return matmul(x, self.weight, self.bias)
        return torch.nn.functional.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.bias)


class QuantizedProduct:
    """W8A8: weights int8 or e4m3 [N, K] with a scale for each output; x is quantised to the same, with a scale for each row, or with
    `x_scale`, one for all."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        biases: Biases,
        *,
        x_scale: torch.Tensor | None = None,
        invariant: bool,
    ) -> None:
        """scales: float32, [N] or of one number."""
        self.weight = _cat_bytes(weights)
        self.scales = torch.cat(
            [s.float().reshape(-1).expand(len(w)) for s, w in zip(scales, weights, strict=True)]
        ).contiguous()
        self.bias, self.x_scale, self._invariant = _joined(biases), x_scale, invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.x_scale is None:
            values, scales = quantize_activations(x, self.weight.dtype)
        else:
            limit = LIMITS[self.weight.dtype]
            values = (x.float() / self.x_scale).clamp(-limit, limit).to(self.weight.dtype)
            scales = self.x_scale.expand(x.shape[0]).contiguous()
        return w8a8_matmul(values, scales, self.weight, self.scales, self.bias, dtype=x.dtype, invariant=self._invariant)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.scales, self.bias)


class BlockProduct:
    """W8A8 in e4m3 [N, K], with a scale for each block of weights, and for each row's groups of as many inputs."""

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        block: tuple[int, int],
        biases: Biases,
        *,
        invariant: bool,
    ) -> None:
        """scales: [ceil(N / block[0]), K / block[1]]."""
        high, wide = block
        if any(len(w) % high for w in weights[:-1]):  # blocks that begin within another one: each row gets its scales
            scales = [s.repeat_interleave(high, dim=0)[: len(w)] for w, s in zip(weights, scales, strict=True)]
            high = 1
        self.weight, self.block = _cat_bytes(weights), (high, wide)
        self.scales = torch.cat([s.float() for s in scales]).contiguous()
        self.bias, self._invariant = _joined(biases), invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return block_fp8_matmul(x, self.weight, self.scales, self.block, self.bias, invariant=self._invariant)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.scales, self.bias)


class Int8Product:
    """Weights int8 [N, K] with a scale for each output, x as it is."""

    def __init__(
        self, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], biases: Biases, *, invariant: bool
    ) -> None:
        """scales: [N] or of one number."""
        self.weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(list(weights))
        self.scales = torch.cat(
            [s.float().reshape(-1).expand(len(w)) for s, w in zip(scales, weights, strict=True)]
        ).contiguous()
        self.bias, self._invariant = _joined(biases), invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return int8_weight_matmul(x, self.weight, self.scales, self.bias, invariant=self._invariant)

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight, self.scales, self.bias)


class Int4Product:
    """Weights in 4 bits with a scale, and perhaps a zero point, for each group of inputs; x as it is."""

    def __init__(self, weight: Int4Weight, bias: torch.Tensor | None, *, invariant: bool) -> None:
        self.weight, self.bias, self._invariant = weight, bias, invariant

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return int4_matmul(x, self.weight, self.bias, invariant=self._invariant)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def int4_products(weights: Sequence[Int4Weight], biases: Biases, *, invariant: bool) -> Linear:
    """One product of all outputs where the weights are alike, else one after the other."""
    from ...kernels.triton.int4_weight import Int4Weight

    first = weights[0]
    alike = all(
        w.group_size == first.group_size
        and (w.zeros is None) == (first.zeros is None)
        and w.scales.dtype == first.scales.dtype
        and (w.order is None) == (first.order is None)
        and (w.order is None or first.order is None or torch.equal(w.order, first.order))
        for w in weights
    )
    if not alike:
        return Joined([Int4Product(w, biases[i] if biases else None, invariant=invariant) for i, w in enumerate(weights)])
    zeros = None if first.zeros is None else torch.cat([w.zeros for w in weights if w.zeros is not None], dim=1)
    whole = Int4Weight(
        torch.cat([w.data for w in weights]),
        torch.cat([w.scales for w in weights], dim=1),
        zeros,
        first.group_size,
        first.in_features,
        first.order,
    )
    return Int4Product(whole, _joined(biases), invariant=invariant)


class Joined:
    """Outputs of several products, one after the other."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = list(parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)  # pyright: ignore[reportFunctionMemberAccess] - this module's have it


class TritonLinears(Linears):
    """What the plugins' makers share. A product's tensors that are stored alike become one, the others are computed one by one."""

    invariant: ClassVar[bool] = True

    def __init__(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]

    @abstractmethod
    def way(self, name: str) -> Hashable:
        """Of the tensor `name`, without ".weight": those of the same way are multiplied together."""

    @abstractmethod
    def product(self, weights: Weights, names: Sequence[str], biases: Biases) -> Linear:
        """Of tensors of the same way; biases: [] or one for each."""

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        biases = dict(zip(matrix.names, biases_of(weights, matrix), strict=False))
        parts = []
        for _, run in itertools.groupby(matrix.names, self.way):
            names = list(run)
            parts.append(self.product(weights, names, [biases[name] for name in names if name in biases]))
        return parts[0] if len(parts) == 1 else Joined(parts)

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        return self.one(weights, matrix)

    def plain(self, weights: Weights, names: Sequence[str], biases: Biases) -> PlainProduct:
        tensors = [weights.get(f"{name}.weight").to(self.dtype) for name in names]
        return PlainProduct(tensors, [bias.to(self.dtype) for bias in biases], invariant=self.invariant)

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        return Table(head.weight if isinstance(head, PlainProduct) else weights.get(name))

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return 0 if tied else matrix.weights * self.dtype.itemsize


def free(linears: type[Any]) -> Callable[..., Any]:
    """The class with `invariant` off."""
    return type(f"Free{linears.__name__}", (linears,), {"invariant": False, "__doc__": linears.__doc__})


def _joined(biases: Biases) -> torch.Tensor | None:
    return torch.cat(list(biases)).contiguous() if biases else None


def _cat_bytes(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their rows, one after the other: moved as bytes, which every device can do of every dtype of one byte."""
    kind = weights[0].dtype
    return (
        weights[0].contiguous()
        if len(weights) == 1
        else torch.cat([w.contiguous().view(torch.int8) for w in weights]).view(kind)
    )


def _nbytes(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
