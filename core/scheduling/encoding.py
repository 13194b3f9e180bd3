"""Pictures and sounds that are encoded piece by piece, in the steps before the one that runs their tokens.

An encoder may take as long as a hundred decode steps. Where it can pause (`EngineInfo.encodes_in_pieces`: towers on a CPU), a step gives
one item `scheduler.encoder_slice_ms` beside everybody else's tokens; the item's request has joined the batch and waits, others join and
go on. When the worker says that the rows are there, its tokens are planned like any others.

All of it is only about when: rows that the worker does not have after all are made in the step that runs the item's tokens. A request waits
for an item once, so items that push each other out of the worker's cache keep nobody waiting for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..plan import EncodeOrder
from ..plugin import StashKey

if TYPE_CHECKING:
    from ..media import MediaItem
    from ..request import Request

REMEMBERED = 4096
"""Items that are known to be ready, or to be waited for."""
SLICES_ALONE = 5
"""What a step that runs no tokens encodes for: somebody who comes meanwhile waits for its end."""
WAITED_FOR: StashKey[set[str]] = StashKey("items waited for")
"""Digests that a request has been held back for."""


class Encoding:
    def __init__(self, *, in_pieces: bool) -> None:
        self._in_pieces = in_pieces
        self._slice = 0.0
        """Seconds."""
        self._ready: OrderedDict[str, None] = OrderedDict()
        """Digests that nothing is left to do for beforehand, oldest first."""
        self._pending: OrderedDict[str, None] = OrderedDict()
        """Digests that somebody waits, or waited, for, and that are not ready; oldest first."""
        self._under_way: str | None = None
        """Digest of the item that the worker has and has not encoded to its end."""
        self._wanted: dict[str, tuple[str, MediaItem]] = {}
        """By digest, of the step that is planned: who waits for it first."""

    def begin_step(self, slice_ms: float) -> None:
        self._slice = slice_ms / 1000 if self._in_pieces else 0.0
        self._wanted.clear()

    def holds_back(self, request: Request, item: MediaItem) -> bool:
        """Whether a request's tokens from this item on have to wait for the encoder. This step then goes on with it, or with another that
        somebody waits for."""
        digest = item.digest
        if not self._slice or digest in self._ready:
            return False
        waited_for = request.stash.get(WAITED_FOR)
        if waited_for is None:
            waited_for = request.stash[WAITED_FOR] = set()
        if digest in waited_for and digest not in self._pending:
            return False  # it was ready, and is no longer
        waited_for.add(digest)
        _remember(self._pending, digest)
        self._wanted.setdefault(digest, (request.request_id, item))
        return True

    def order(self, *, alone: bool) -> tuple[str, EncodeOrder] | None:
        """(a request that waits for it, what the step encodes): the item that is under way before any other, then the first in the plan's
        order. alone: the step runs no tokens."""
        if not self._wanted:
            return None
        digest = self._under_way if self._under_way in self._wanted else next(iter(self._wanted))
        request_id, item = self._wanted[digest]
        known, self._under_way = digest == self._under_way, digest
        seconds = self._slice * (SLICES_ALONE if alone else 1)
        return request_id, EncodeOrder(digest=digest, item=None if known else item, seconds=seconds)

    def update(self, encoded: Iterable[str], forgotten: Iterable[str]) -> None:
        """What a step's result says."""
        for digest in encoded:
            self._is_ready(digest)
        for digest in forgotten:
            self._ready.pop(digest, None)

    def step_failed(self) -> None:
        """Whatever was under way is encoded in the step that runs its tokens: should it be to blame, it is its request that fails."""
        if self._under_way is not None:
            self._is_ready(self._under_way)

    def _is_ready(self, digest: str) -> None:
        if digest == self._under_way:
            self._under_way = None
        self._pending.pop(digest, None)
        _remember(self._ready, digest)


def _remember(digests: OrderedDict[str, None], digest: str) -> None:
    digests[digest] = None
    if len(digests) > REMEMBERED:
        digests.popitem(last=False)
