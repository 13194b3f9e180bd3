"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: pictures keep their shape, and neighbouring patches are merged into one row.

A tower takes several frames of a video together, of a picture the same one so many times. Items have it once, which is 150 MB for a
large picture; the others are put back beside the tower (towers.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....core.media import Kind
from ..family import ImageFamily, Processed

if TYPE_CHECKING:
    from PIL import Image


class QwenVL(ImageFamily):
    name = "qwen_vl"
    model_types = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
    markers: Mapping[Kind, str] = {"image": "<|image_pad|>"}
    placeholders: Mapping[Kind, str] = {"image": "<|image_pad|>"}

    def load(self) -> None:
        super().load()
        self._merge: int = self._config.vision_config.spatial_merge_size

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        tensors = self._images(media, temporal_patch_size=1)
        grid = tuple(int(size) for size in tensors["image_grid_thw"][0])
        rows = math.prod(grid) // self._merge**2
        kept = {name: tensors[name] for name in ("pixel_values", "image_grid_thw")}
        return Processed(kept, self.placeholders["image"] * rows, rows, grid=grid)
