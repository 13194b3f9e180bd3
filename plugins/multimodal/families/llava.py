"""LLaVA 1.5: a CLIP-like tower, one row of the projector for each patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....core.media import Kind
from ..family import ImageFamily, Processed

if TYPE_CHECKING:
    from PIL import Image


CLASS_TOKENS = {"clip_vision_model": 1, "siglip_vision_model": 0}
"""Kinds of towers, and the rows that they put before those of a picture's patches."""

MAX_RATIO = 200
"""Of a picture's sides, where it is made as high as the tower's before its middle is cut out: a longer one would take hundreds of MB."""


class Llava(ImageFamily):
    name = "llava"
    model_types = frozenset({"llava"})
    markers: Mapping[Kind, str] = {"image": "<image>"}
    placeholders: Mapping[Kind, str] = {"image": "<image>"}

    def load(self) -> None:
        super().load()
        config = self._config
        tower: str = config.vision_config.model_type
        if tower not in CLASS_TOKENS:
            raise ValueError(f"its tower is of the kind {tower!r}; there are {', '.join(CLASS_TOKENS)}")
        self._patch_size: int = config.vision_config.patch_size
        self._has_class_token = CLASS_TOKENS[tower]
        self._drops_first = config.vision_feature_select_strategy == "default"

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        longer, shorter = max(media.size), min(media.size)
        if longer > MAX_RATIO * shorter and self._images.processor.size.get("shortest_edge"):
            raise ValueError(f"one of its sides is {longer // shorter} times the other; at most {MAX_RATIO} times can be read")
        tensors = self._images(media)
        height, width = tensors["pixel_values"].shape[-2:]
        rows = (height // self._patch_size) * (width // self._patch_size) + self._has_class_token - self._drops_first
        return Processed({"pixel_values": tensors["pixel_values"]}, self.placeholders["image"] * rows, rows)
