"""Gemma 3: every view of a picture is one square and a fixed number of rows, which attend to each other in both directions. There is one
view, of all of it; with "pan and scan", which the folder's image processor may turn on, long pictures have further ones of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ....core.media import Kind
from ..family import ImageFamily, Processed

if TYPE_CHECKING:
    from PIL import Image


PAN_AND_SCAN = {
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
"""What its image processor says, if it says nothing."""


class Gemma3(ImageFamily):
    name = "gemma3"
    model_types = frozenset({"gemma3"})
    markers: Mapping[Kind, str] = {"image": "<start_of_image>"}
    placeholders: Mapping[Kind, str] = {"image": "<image_soft_token>"}

    def load(self) -> None:
        super().load()
        self._rows: int = self._config.mm_tokens_per_image
        processor = self._images.processor
        self._views: dict[str, Any] = {"do_pan_and_scan": bool(processor.do_pan_and_scan)}
        for name, default in PAN_AND_SCAN.items():
            given = getattr(processor, name, None)
            self._views[name] = default if given is None else given
        self.options = {**self._images.options, **self._views}

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        tensors = self._images(media, **self._views)
        view = f"\n\n{self.markers['image']}{self.placeholders['image'] * self._rows}<end_of_image>\n\n"
        crops, text = int(tensors["num_crops"][0]), view
        if crops:  # the words that it was trained with
            parts = " ".join([view] * crops)
            text = f"Here is the original image {view} and here are some crops to help you see better {parts}"
        return Processed({"pixel_values": tensors["pixel_values"]}, text, (1 + crops) * self._rows, bidirectional=True)
