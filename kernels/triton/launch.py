"""What the wrappers of this package's kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Kernels run in Triton's interpreter, on the CPU (TRITON_INTERPRET=1 when Triton was imported). It has no product of bfloat16 operands, so
they are widened for it: the products are exact in float32 either way. It also cuts results off to bfloat16, where a device rounds."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, its grid and its arguments by name; `options` are the compiler's."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int | bool]

    def run(self, device: torch.device) -> None:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[self.grid](**self.arguments, **self.options)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel` once for each place of `grid`, on the device of its first argument. An empty grid is nothing to do.

    options: its constants, num_warps, num_stages, and perhaps enable_fp_fusion: whether a product and the sum it goes into may be rounded
    as one. True, unless given: Triton's own default isn't the same in all versions."""
    if all(grid):
        with torch.cuda.device_of(args[0]):
            kernel[grid](*args, **({"enable_fp_fusion": True} | options))


def sizes(defaults: Mapping[str, int], config: Mapping[str, int] | None) -> dict[str, int]:
    """The defaults with what `config` has in their place. Raises ValueError for a name that the kernel does not know."""
    if unknown := set(config or ()) - set(defaults):
        raise ValueError(f"the kernel has no size {min(unknown)!r}; it has {', '.join(defaults)}")
    return {**defaults, **(config or {})}


def power_of_two(n: int) -> int:
    """The smallest one that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [outer, inner, n] whose last dimension is contiguous: a view where x's strides allow it, else a copy."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        x = x.contiguous()
    match x.dim():
        case 1:
            return x[None, None]
        case 2:
            return x[:, None]
        case 3:
            return x
    return x.reshape(-1, *x.shape[-2:])


def check_floats(**tensors: torch.Tensor) -> None:
    """Raises ValueError unless all have one dtype of FLOATS, one device, and at least one dimension."""
    first = next(iter(tensors.values()))
    for name, x in tensors.items():
        if x.dtype not in FLOATS or x.dtype != first.dtype:
            raise ValueError(
                f"{name} is {x.dtype}; expected one dtype of float32, bfloat16 and float16 for {', '.join(tensors)}"
            )
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device}, other tensors on {first.device}")
        if not x.dim():
            raise ValueError(f"{name} has no dimension")


def check_ids(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """x, contiguous. Raises ValueError unless it is int32 or int64, of the given shape and device."""
    if x.dtype not in INTEGERS or tuple(x.shape) != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {list(x.shape)} on {x.device}; expected int32 or int64 {list(shape)} on {device}"
        )
    return x.contiguous()
