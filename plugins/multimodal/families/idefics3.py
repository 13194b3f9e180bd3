"""Idefics3 and SmolVLM: a large picture is cut into tiles, which come before a small view of all of it; each has its own tokens around."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....core.media import Kind
from ..family import ImageFamily, Processed

if TYPE_CHECKING:
    from PIL import Image

BORDER, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(ImageFamily):
    name = "idefics3"
    model_types = frozenset({"idefics3", "smolvlm"})
    markers: Mapping[Kind, str] = {"image": "<image>"}
    placeholders: Mapping[Kind, str] = {"image": "<image>"}

    def load(self) -> None:
        super().load()
        config = self._config
        side = config.vision_config.image_size // config.vision_config.patch_size
        self._tile_rows = side**2 // config.scale_factor**2

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        tensors = self._images(media, return_row_col_info=True)
        high, wide = int(tensors["rows"][0][0]), int(tensors["cols"][0][0])
        tile = self.placeholders["image"] * self._tile_rows
        lines = ["".join(f"{BORDER}<row_{y + 1}_col_{x + 1}>{tile}" for x in range(wide)) + "\n" for y in range(high)]
        text = "".join(lines) + ("\n" if lines else "") + f"{BORDER}{WHOLE}{tile}{BORDER}"
        kept = {name: tensors[name] for name in ("pixel_values", "pixel_attention_mask") if name in tensors}
        return Processed(kept, text, (high * wide + 1) * self._tile_rows)
