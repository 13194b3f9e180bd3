"""What a model with a tower adds to a step: rows whose embeddings an encoder gives, and places in three dimensions.

The contract of encoders, which plugins provide (hook `media_encoder`); core keeps what they give (core/worker/encoder.py), and puts it
into batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from ..media import MediaItem


@dataclass(slots=True)
class MediaRows:
    """Of one batch: what its rows take in place of, or on top of, what their token ids say. Rows are indices into the batch."""

    rows: torch.Tensor
    """int64 [E]: rows that take an encoder's, ascending. E may be 0."""
    embeds: torch.Tensor
    """[E, hidden_size], the model's dtype: take the place of the embeddings, which the model's `embed_scale` does not touch."""
    deep: list[torch.Tensor] = field(default_factory=list)
    """[E, hidden_size] each: the i-th is added to those rows behind layer i (https://arxiv.org/abs/2406.04334). May be empty."""
    places: torch.Tensor | None = None
    """int64 [3, T]: of every row in time, height and width, for M-RoPE. None: each is at its position in all three."""

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], token embeddings -> the same with the encoder's rows in their places."""
        return x.index_copy(0, self.rows, self.embeds) if len(self.rows) else x

    def add(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        """What goes into the layer behind this one."""
        if layer >= len(self.deep) or not len(self.rows):
            return x
        return x.index_copy(0, self.rows, x[self.rows] + self.deep[layer])


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder made of one item."""

    rows: torch.Tensor
    """[item.rows, hidden_size] in the model's dtype, on its device."""
    deep: tuple[torch.Tensor, ...] = ()
    """The same shape each; see `MediaRows.deep`."""

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.rows, *self.deep))


@dataclass(frozen=True, slots=True)
class MediaCheckpoint:
    """A multimodal checkpoint, as `media_encoder` is shown it."""

    name: str
    path: Path
    config: Mapping[str, Any]
    """config.json, without what it says of quantised weights, which the text part alone has."""
    dtype: torch.dtype
    device: torch.device
    hidden_size: int
    """Of the decoder."""
    tensors: Callable[[], dict[str, torch.Tensor]]
    """Reads those that are not of the text part, by the checkpoint's own names, in `dtype`. May be the file's memory: not to be written."""


def _go_on() -> None:
    """No pause."""


class MediaEncoder(ABC):
    """A tower with whatever projects its output to the decoder. It is called for one item at a time, so that what it makes of an item
    depends on nothing else; on the worker's thread, or while that waits on another one."""

    weights_bytes: int
    pauses: bool = False
    """`encode` calls `pause` between pieces of its work, some ten or more of them."""
    pause: Callable[[], None] = staticmethod(_go_on)
    """Core sets it, on encoders that pause: it comes back when the encoder's next turn has come, or raises when there is none."""
    looks_ahead: ClassVar[bool] = False
    """Items may be `bidirectional`."""

    @abstractmethod
    def encode(self, item: MediaItem) -> Encoded:
        """The item's rows. RequestError: the item is none of the kind, or not of the form, that the model reads."""

    def places(self, item: MediaItem) -> tuple[torch.Tensor, int] | None:
        """For M-RoPE: int64 [3, item.length], the span's places counted from 0, and by how much the text behind is further on than the
        span's beginning. None: as text."""
        return None
