"""Pictures and sounds in recordings.

shape   their spans, and a keyed hash of each: how long they are, how they may be cut, which of them are the same
full    also their digests, in the worker's orders; the tensors that the processor made only where the recorder's `media` asks for them
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..media import MediaItem, TensorBytes
from ..plan import WorkerRequest
from .frames import HASH_BYTES, Arrival, Media


def without_tensors(requests: Iterable[WorkerRequest]) -> list[WorkerRequest]:
    """The same, their media by digest and span alone."""
    return [_with(request, [msgspec.structs.replace(item, tensors={}) for item in request.media]) for request in requests]


def items_of(arrival: Arrival) -> tuple[MediaItem, ...]:
    """A recorded request's media as far as scheduling is concerned. Digests are equal where the recorded ones were."""
    return tuple(
        MediaItem(kind="image", digest=_name(arrival, i), start=start, length=length, bidirectional=bidirectional)
        for i, (start, length, bidirectional) in enumerate(arrival.spans)
    )


def _name(arrival: Arrival, i: int) -> str:
    hashed = arrival.media[i * HASH_BYTES : (i + 1) * HASH_BYTES]
    return hashed.hex() if hashed else f"{arrival.serial}.{i}"  # by a version that wrote no hashes


class Encoder:
    """Which items a step has to encode: those of whom no step before ran any token. As if nothing were ever dropped of what was encoded."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def tokens(self, items: Iterable[MediaItem], first: int, count: int) -> int:
        """Tokens, all in all, of the items that are encoded because tokens [first, first + count) of their request run."""
        return sum(self.lengths(items, first, count))

    def lengths(self, items: Iterable[MediaItem], first: int, count: int) -> list[int]:
        """The same for each of them."""
        new = {i.digest: i.length for i in items if i.start < first + count and i.end > first and i.digest not in self._known}
        self._known |= new.keys()
        return list(new.values())


class MediaStore:
    """Tensors that a replay has met, by digest."""

    def __init__(self) -> None:
        self._tensors: dict[str, dict[str, TensorBytes]] = {}

    def add(self, frame: Media) -> None:
        self._tensors[frame.digest] = frame.tensors

    def filled(self, request: WorkerRequest) -> WorkerRequest | None:
        """The request as the worker got it; None when something of its media is not in the recording."""
        items = []
        for item in request.media:
            tensors = item.tensors or self._tensors.get(item.digest)  # in an order: by a version that had no frames for them
            if tensors is None:
                return None
            items.append(msgspec.structs.replace(item, tensors=tensors))
        return _with(request, items)


def _with(request: WorkerRequest, items: list[MediaItem]) -> WorkerRequest:
    return msgspec.structs.replace(request, media=tuple(items)) if items else request
