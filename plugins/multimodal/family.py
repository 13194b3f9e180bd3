"""What a family of models adds to the front: how a picture or sound becomes tensors, and what stands for it in the prompt.

A family is a small file in `families/`, listed in `families/__init__.py`. Its class is made in two processes: in the front, which only
looks at `markers` and `placeholders`, and in the processes that decode and process, which also call `load` and `process`. So its module
must not import torch, transformers or PIL at the top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...core.media import Kind

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Sound:
    samples: np.ndarray
    """float32 [num_samples], one channel, -1 to 1, at the family's `sampling_rate`."""
    sampling_rate: int


@dataclass(frozen=True, slots=True)
class Processed:
    """What one picture or sound becomes."""

    tensors: Mapping[str, np.ndarray]
    """Arguments of the family's tower for this item alone, by name."""
    text: str
    """What stands in the prompt in place of the marker: markers of the family, and `rows` times the placeholder."""
    rows: int
    """Placeholders in `text`: encoder rows. They need not stand in a row; the item's span is from the first to the last of them."""
    bidirectional: bool = False
    grid: tuple[int, ...] | None = None
    """See `MediaItem`."""


class Family(Protocol):
    name: ClassVar[str]
    model_types: ClassVar[frozenset[str]]
    """`model_type` in config.json."""
    markers: ClassVar[Mapping[Kind, str]]
    """By kind of media that the family reads: the text that the model's chat template writes for one of them."""
    placeholders: ClassVar[Mapping[Kind, str]]
    """By kind: the token whose embedding gives way to a row of the encoder, as the tokenizer spells it."""
    sampling_rate: int
    """Hz in which `process` takes sounds; 0 for families without."""
    options: Mapping[str, Any]
    """What else than the media decides the tensors, as plain data: the processor's class and settings. Part of every digest; after
    `load`."""

    def __init__(self, folder: Path) -> None:
        """folder: the model's. Cheap."""
        ...

    def load(self) -> None:
        """Make the processors of the folder. Once, before the first `process`; may raise anything, which is shown as the reason why the
        model can't read media."""
        ...

    def process(self, kind: Kind, media: Image.Image | Sound) -> Processed:
        """One item, by itself: the same answer whatever else is in the request. A picture is RGB and upright."""
        ...


@dataclass(frozen=True, slots=True)
class ImageFolder:
    """Helper for families whose images go through the folder's own Hugging Face image processor, in its PIL form (no torchvision)."""

    processor: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> ImageFolder:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil", local_files_only=True)
        return cls(processor, {"processor": type(processor).__name__, **_plain(processor.to_dict())})

    def __call__(self, image: Image.Image, **options: Any) -> dict[str, np.ndarray]:
        return dict(self.processor(image, return_tensors="np", **options))


def whole_config(folder: Path) -> Any:
    """transformers' configuration of the folder's model: config.json, with all that it leaves to defaults."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True)


class ImageFamily:
    """What families of pictures have in common."""

    sampling_rate = 0

    def __init__(self, folder: Path) -> None:
        self.options: Mapping[str, Any] = {}
        self._folder = folder

    def load(self) -> None:
        self._images = ImageFolder.load(self._folder)
        self.options = self._images.options
        self._config = whole_config(self._folder)


def _plain(value: Any) -> Any:
    """As plain data that JSON can hold; what isn't becomes its `repr`."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
