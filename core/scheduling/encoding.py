"""Pictures and sounds that are encoded piece by piece, in the steps before the one that runs their tokens.

An encoder may take as long as a hundred decode steps. Where it can pause (`EngineInfo.encodes_in_pieces`: towers on a CPU), a step gives
one item `scheduler.encoder_slice_ms` beside everybody else's tokens; the item's request has joined the batch and waits, others join and
go on. When the worker says that the rows are there, its tokens are planned like any others.

All of it is only about when: rows that the worker does not have after all (its cache dropped them, or it failed) are made in the step that
runs the item's tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ..plan import EncodeOrder

if TYPE_CHECKING:
    from ..media import MediaItem
    from ..request import Request

REMEMBERED = 4096
"""Items that are known to be encoded."""
ALONE = 5
"""Slices at once in a step that runs no tokens: what comes meanwhile waits for its end."""


class Encoding:
    def __init__(self, *, in_pieces: bool) -> None:
        self._in_pieces = in_pieces
        self._slice = 0.0
        """Seconds."""
        self._ready: OrderedDict[str, None] = OrderedDict()
        """Digests, those used last at the end."""
        self._under_way: str | None = None
        """Digest of the item that the worker has and has not encoded to its end."""
        self._wanted: dict[str, tuple[str, MediaItem]] = {}
        """By digest, of the step that is planned: who waits for it first."""
        self._waiting: set[str] = set()
        """Requests that were held back in this step."""

    def begin_step(self, slice_ms: float) -> None:
        self._slice = slice_ms / 1000 if self._in_pieces else 0.0
        self._wanted.clear()
        self._waiting.clear()

    def holds_back(self, request: Request, item: MediaItem) -> bool:
        """Whether a request's tokens from this item on have to wait for the encoder. This step then goes on with it, or with another that
        somebody waits for."""
        if not self._slice:
            return False
        if item.digest in self._ready:
            self._ready.move_to_end(item.digest)
            return False
        self._wanted.setdefault(item.digest, (request.request_id, item))
        self._waiting.add(request.request_id)
        return True

    def waits(self, request: Request) -> bool:
        """Whether it was held back in this step."""
        return request.request_id in self._waiting

    def order(self, *, alone: bool) -> tuple[str, EncodeOrder] | None:
        """What the step encodes, and for whom: the item that is under way before any other, then the first in the plan's order. alone: the
        step runs no tokens."""
        if not self._wanted:
            return None
        digest = self._under_way if self._under_way in self._wanted else next(iter(self._wanted))
        request_id, item = self._wanted[digest]
        known, self._under_way = digest == self._under_way, digest
        seconds = self._slice * (ALONE if alone else 1)
        return request_id, EncodeOrder(digest=digest, item=None if known else item, seconds=seconds)

    def done(self, digest: str) -> None:
        """The worker has the item's rows, or can't encode it in pieces."""
        if digest == self._under_way:
            self._under_way = None
        self._ready[digest] = None
        self._ready.move_to_end(digest)
        if len(self._ready) > REMEMBERED:
            self._ready.popitem(last=False)

    def step_failed(self) -> None:
        """Whatever was under way is encoded in the step that runs its tokens: should it be to blame, it is its request that fails."""
        if self._under_way is not None:
            self.done(self._under_way)
