"""Models without files: random weights made where the model runs, in place of a checkpoint that would be 16 GB.

The engine is the real one in everything else: its loader reads config.json, chooses decoder and kernels, and asks this for tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tokenbus.core.models import loader

from .shapes import tensor_shapes

SPREAD = 0.02
"""Of weights: with it the numbers stay of ordinary size in any depth."""


class RandomCheckpoint(loader.Checkpoint):
    """Takes the place of `loader.Checkpoint`. files: the (empty) checkpoint beside config.json."""

    def __init__(self, files: list[Path], name: str, dtype: torch.dtype, device: torch.device, *_: Any, **__: Any) -> None:
        self.files = []
        config = json.loads((files[0].parent / "config.json").read_text(encoding="utf-8"))
        self._shapes = tensor_shapes(config)
        self._made, self._name, self._dtype, self._device = set(), name, dtype, torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(0)

    def get(self, name: str) -> torch.Tensor:
        self._made.add(name)
        tensor = torch.empty(self._shapes[name], dtype=self._dtype, device=self._device)
        if tensor.dim() == 1:
            return tensor.fill_(1.0)
        return tensor.normal_(0.0, SPREAD, generator=self._generator)

    def raw(self, name: str) -> torch.Tensor | None:
        return self.get(name) if name in self._shapes else None

    def check_all_read(self, *, tied: bool) -> None:
        loader.check_all_read(self._shapes.keys() - self._made, self._name, tied=tied)


def install() -> None:
    """From here on this process loads random weights, whatever a checkpoint holds."""
    loader.Checkpoint = RandomCheckpoint
