"""LLaVA 1.5: a CLIP-like tower, one row of the projector for each patch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.media import Kind
from ..family import ImageFolder, Processed

if TYPE_CHECKING:
    from PIL import Image


class Llava:
    name = "llava"
    model_types = frozenset({"llava"})
    markers: Mapping[Kind, str] = {"image": "<image>"}
    placeholders: Mapping[Kind, str] = {"image": "<image>"}
    sampling_rate = 0

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = {}
        self._folder = folder
        self._patch_size: int = config["vision_config"]["patch_size"]
        self._has_class_token = config["vision_config"].get("model_type", "clip_vision_model") == "clip_vision_model"
        self._drops_first = config.get("vision_feature_select_strategy", "default") == "default"

    def load(self) -> None:
        self._images = ImageFolder.load(self._folder)
        self.options = self._images.options

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        tensors = self._images(media)
        height, width = tensors["pixel_values"].shape[-2:]
        rows = (height // self._patch_size) * (width // self._patch_size) + self._has_class_token - self._drops_first
        return Processed({"pixel_values": tensors["pixel_values"]}, self.placeholders["image"] * rows, rows)
