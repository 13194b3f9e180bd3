"""Gemma 3: every picture is one square and a fixed number of rows, which attend to each other in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....core.media import Kind
from ..family import ImageFolder, Processed

if TYPE_CHECKING:
    from PIL import Image


class Gemma3:
    name = "gemma3"
    model_types = frozenset({"gemma3"})
    markers: Mapping[Kind, str] = {"image": "<start_of_image>"}
    placeholders: Mapping[Kind, str] = {"image": "<image_soft_token>"}
    sampling_rate = 0

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = {}
        self._folder = folder
        self._rows: int = config.get("mm_tokens_per_image", 256)

    def load(self) -> None:
        self._images = ImageFolder.load(self._folder)
        self.options = {**self._images.options, "do_pan_and_scan": False}

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        """One view of the whole picture: no further ones of its parts ("pan and scan")."""
        tensors = self._images(media, do_pan_and_scan=False)
        rows = self.placeholders["image"] * self._rows
        text = f"\n\n{self.markers['image']}{rows}<end_of_image>\n\n"
        return Processed({"pixel_values": tensors["pixel_values"]}, text, self._rows, bidirectional=True)
