"""What the formats have in common: integers or e4m3 numbers, and a scale for each block of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class UnreadableError(Exception):
    """The format is known, but not what this checkpoint does with it; says what."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a module's weight is stored, as known without reading it."""

    kind: Literal["int4", "int8", "e4m3"]
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all of them."""
    zeros: bool = False
    """A zero point for each scale."""
    activations: Literal["", "token", "group", "static"] = ""
    """What enters the product is quantised to `kind`, too, with a scale for each row, for each of its groups of as many inputs as a block
    has, or one that the checkpoint has. Empty: it is not."""

    def __str__(self) -> str:
        rows, columns = self.block
        scale = {(0, 0): "a scale for all", (1, 0): "a scale per output"}.get(self.block)
        grouped = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        extra = {"": "", "static": ", activations too, with static scales"}.get(self.activations, ", activations too")
        return f"{self.kind}, {scale or grouped}{', zero points' if self.zeros else ''}{extra}"


@dataclass(frozen=True, slots=True)
class Module:
    """A quantised matrix [rows, columns] of a checkpoint."""

    scheme: Scheme
    rows: int
    columns: int

    @property
    def scales(self) -> tuple[int, int]:
        """How many there are: of rows, of columns."""
        return tuple(
            1 if not size else -(-n // size) for n, size in zip((self.rows, self.columns), self.scheme.block, strict=True)
        )  # pyright: ignore[reportReturnType] - of two


Survey = Mapping[str, Module]
"""A checkpoint's quantised matrices, by their names without ".weight"."""


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """weight[n, k] = (values[n, k] - zeros[a, b]) * scales[a, b] of row n's block a and column k's block b.

    Raises ValueError for tensors that don't fit the module."""

    module: Module
    values: torch.Tensor
    """int8, uint8 or float8_e4m3fn [rows, columns]."""
    scales: torch.Tensor
    """Floating-point [A, B]."""
    zeros: torch.Tensor | None = None
    """Of values' dtype [A, B]. None: 0."""
    group_of: torch.Tensor | None = None
    """int64 [columns]: the block of each. None: they are in order."""
    activation_scale: torch.Tensor | None = None
    """A float32 of its own, where activations are "static"."""

    def __post_init__(self) -> None:
        module = self.module
        wanted = {"values": (module.rows, module.columns), "scales": module.scales}
        if self.zeros is not None:
            wanted["zeros"] = module.scales
        if self.group_of is not None:
            wanted["group_of"] = (module.columns,)  # pyright: ignore[reportArgumentType]
        for name, shape in wanted.items():
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} must be {list(shape)}, not {list(found)}")
        if not self.scales.is_floating_point():
            raise ValueError(f"scales must be floating-point, not {self.scales.dtype}")
        groups = module.scales[1]
        if self.group_of is not None and not bool(((self.group_of >= 0) & (self.group_of < groups)).all()):
            raise ValueError(f"g_idx must name one of {groups} groups for each input")

    def dequantized(self) -> torch.Tensor:
        """float32 [rows, columns]: one product, rounded once."""
        weight = self.values.float()
        if self.zeros is not None:
            weight = weight - self._spread(self.zeros)
        return weight * self._spread(self.scales)

    def _spread(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """[A, B] -> float32, of a shape that goes with [rows, columns]."""
        spread = of_blocks.float()
        rows, columns = self.module.scheme.block
        if rows > 1:
            spread = spread.repeat_interleave(rows, dim=0)[: self.module.rows]
        if self.group_of is not None:
            return spread[:, self.group_of]
        return spread.repeat_interleave(columns, dim=1)[:, : self.module.columns] if columns else spread
