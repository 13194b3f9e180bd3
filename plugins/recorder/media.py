"""What becomes of pictures and sounds in a full recording: their tensors once in each part, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...core.recording.file import MOST_BYTES
from ...core.recording.frames import Media

if TYPE_CHECKING:
    from ...core.media import MediaItem

LARGEST = MOST_BYTES // 2
"""Bytes of an item's tensors beyond which it can't be kept."""


class MediaFrames:
    """keep: as the setting says."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._written: set[str] = set()
        """Digests of those that the part has."""

    def new_part(self) -> None:
        self._written.clear()

    def missing(self, items: Iterable[MediaItem]) -> Iterator[Media]:
        """Frames for those that the part does not have yet."""
        for item in items if self._keep else ():
            if item.digest not in self._written and item.size <= LARGEST:
                self._written.add(item.digest)
                yield Media(item.digest, item.tensors)
