"""What a request carries besides text: pictures and sounds, processed and placed among its prompt's tokens.

Made once by the front (by a plugin's `prepare_media`), immutable from then on. The front keeps an open request's items with its prompt, so
that an engine that is started anew is given them again; nobody asks the client twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Kind = Literal["image", "audio"]
ENCODED_ITEMS = "multimodal.encoded_items"
"""Counter: items that the encoder has encoded to their end."""
ENCODED_PIECES = "multimodal.encoded_pieces"
"""Counter: steps that encoded an item, or part of one, before the step that ran its first token."""


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A part of a message that is no text, as `prepare_media` is given it."""

    kind: Kind
    where: str
    """What errors call it: messages[0].content[2]"""
    value: Any = field(repr=False)
    """What stands there under the part's type: of a client whatever its JSON holds, unchecked."""
    own: bool = False
    """The caller is this process's own (offline use): `value` may be a picture, an array, bytes, or the path of a file."""


@dataclass(frozen=True, slots=True)
class PreparedMedia:
    """What `prepare_media` makes of a part."""

    item: MediaItem
    """Not placed yet: `start` 0, `length` 0 and no `embeds`. Core fills them in."""
    marker: str
    """What the model's chat template writes where a part of this kind stands; in templates that know no parts core writes it."""
    text: str
    """What the prompt has in the marker's place."""
    placeholder: str
    """The token, as the tokenizer spells it, that stands in `text` once for each row of the encoder."""
    rows: int
    """How often it stands there."""
    known: bool = False
    """It was made before, for the same file, and found again."""


class TensorBytes(msgspec.Struct, frozen=True):
    """A dense tensor in row-major order, as plain data."""

    dtype: str
    """As numpy and torch both call it: float32, int64, bool, ..."""
    shape: tuple[int, ...]
    data: bytes

    def __repr__(self) -> str:  # in a log or an error message nobody wants megabytes
        return f"TensorBytes({self.dtype}, {self.shape})"


class MediaItem(msgspec.Struct, frozen=True, kw_only=True):
    """One picture or sound, and the prompt's positions that stand for it: [start, start + length), "its span".

    Spans of one request don't overlap, are in order, and lie inside the prompt."""

    kind: Kind
    digest: str
    """SHA-256 in hex over everything that decides what the tower makes of it: the tensors with their names, shapes and dtypes, the
    processor's class and options, the grid, which offsets take rows. Equal digests stand for equal encoder outputs."""
    start: int
    """The prompt position of its span's first token."""
    length: int
    """Tokens of its span, in a row; a family's markers inside it included."""
    embeds: tuple[int, ...] = ()
    """Offsets in the span, ascending, whose embeddings are replaced by the encoder's rows, in order. (): all of them."""
    bidirectional: bool = False
    """Tokens that take rows attend in both directions to those they stand in a row with, so the span can't be run in parts. Others in
    it attend as text."""
    tensors: dict[str, TensorBytes] = {}
    """What the processor gave for this item: pixel_values and the like, in the form that the family's tower takes for one item."""
    grid: tuple[int, ...] | None = None
    """Patches along each axis (time, height, width), for families whose positions depend on it."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def rows(self) -> int:
        """Encoder rows that its span takes."""
        return len(self.embeds) or self.length

    @property
    def size(self) -> int:
        """Bytes of its tensors."""
        return sum(len(tensor.data) for tensor in self.tensors.values())


def check_spans(media: Iterable[MediaItem], num_prompt: int) -> None:
    """ValueError unless the items' spans are in order, apart, inside a prompt of this many tokens, and hold their `embeds`."""
    end = 0
    for item in media:
        if item.start < end or item.length < 1:
            raise ValueError(f"the span [{item.start}, {item.end}) of a media item begins before {end}, or is empty")
        if list(item.embeds) != sorted(set(item.embeds)) or not all(0 <= offset < item.length for offset in item.embeds):
            raise ValueError(f"embeds of the media item at {item.start} must be ascending offsets in its {item.length} tokens")
        end = item.end
    if end > num_prompt:
        raise ValueError(f"a media item ends at {end}, behind the prompt's {num_prompt} tokens")
