"""LLaVA-NeXT: a small view of the picture, then tiles of a larger one without its padding, with a row more at the end of each line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....core.media import Kind
from ..family import Processed
from .llava import Llava

if TYPE_CHECKING:
    from PIL import Image


class LlavaNext(Llava):
    name = "llava_next"
    model_types = frozenset({"llava_next"})

    def load(self) -> None:
        super().load()
        self._tile: int = self._config.vision_config.image_size
        self._pinpoints = [tuple(pair) for pair in self._config.image_grid_pinpoints]

    def process(self, kind: Kind, media: Image.Image) -> Processed:
        from transformers.image_processing_utils import select_best_resolution

        tensors = self._images(media)
        height, width = (int(size) for size in tensors["image_sizes"][0])
        side = self._tile // self._patch_size
        full = [size // self._tile * side for size in select_best_resolution((height, width), self._pinpoints)]
        lines, columns = without_padding(height, width, full[0], full[1])
        rows = side**2 + self._has_class_token - self._drops_first + lines * (columns + 1)
        kept = {name: tensors[name] for name in ("pixel_values", "image_sizes")}
        return Processed(kept, self.placeholders["image"] * rows, rows)


def without_padding(height: int, width: int, lines: int, columns: int) -> tuple[int, int]:
    """Lines and columns of patches that a picture covers, which was made as large as fits into lines x columns and put into the middle."""
    if width / height > columns / lines:
        covered = int(round(height * (columns / width), 7))
        return lines - (lines - covered) // 2 * 2, columns
    covered = int(round(width * (lines / height), 7))
    return lines, columns - (columns - covered) // 2 * 2
