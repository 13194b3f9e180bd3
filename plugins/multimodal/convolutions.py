"""Convolutions as matrix products by core's tiled kernel: torch's own may divide their sums among threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...kernels.torch_ops.linear import TiledLinear


class Convolution(nn.Module):
    """In place of a Conv1d, Conv2d or Conv3d: every window of the input is a row."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.weight, self.kernel_size, self.stride, self.padding = old.weight, old.kernel_size, old.stride, old.padding
        """Towers look at them: for dtype and device, for the length that comes out."""
        self._inner = TiledLinear(old.weight.detach().flatten(1), None if old.bias is None else old.bias.detach())
        self._pad = [size for side in reversed(old.padding) for size in (side, side)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, C, *sizes] -> [B, out channels, *windows along each]."""
        x = F.pad(x, self._pad)
        axes = range(len(self.kernel_size))
        for axis in axes:
            x = x.unfold(2 + axis, self.kernel_size[axis], self.stride[axis])
        windows = x.movedim(1, 1 + len(self.kernel_size))  # [B, *windows, C, *kernel]
        shape = windows.shape[: 1 + len(self.kernel_size)]
        return self._inner(windows.reshape(shape.numel(), -1)).view(*shape, -1).movedim(-1, 1)


def replace_convolutions(model: nn.Module) -> None:
    """In place, those that are plain: one group, no dilation, zeros around."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and _plain(child):
                setattr(parent, name, Convolution(child))


def _plain(conv: Any) -> bool:
    return (
        conv.groups == 1
        and set(conv.dilation) == {1}
        and conv.padding_mode == "zeros"
        and all(isinstance(size, int) for size in conv.padding)
    )
