"""Media on the worker: items are encoded in the step that first runs tokens of theirs, kept by content, and put into the batch.

An encoder sees one item at a time, so what it makes of an item does not depend on the batch, on chunk borders, or on what is kept: rows
that were dropped are made again, bit by bit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import RequestError, TokenbusError, WorkerError, plain_text
from ..media import ENCODED_ITEMS, ENCODED_PIECES
from ..models.media import Encoded, MediaRows
from .pieces import Pieces

if TYPE_CHECKING:
    from ..media import MediaItem
    from ..models.base import CausalModel, ForwardBatch
    from ..models.media import MediaEncoder
    from ..plan import EncodeOrder, WorkerRequest
    from .attention import AttentionBatch
    from .batch import Run
    from .plugins import WorkerPlugins


class MediaState:
    """A request's items on the worker."""

    def __init__(self, items: Sequence[MediaItem], num_prompt: int, encoder: MediaEncoder) -> None:
        self.items = items
        self.held: dict[int, Encoded] = {}
        """By index: rows of items that are begun and not yet run to their end."""
        self.places, self.shift = _places(items, num_prompt, encoder)
        """M-RoPE: int64 [3, prompt] (None: as text), and what is added to a position behind the prompt."""

    def among(self, first: int, count: int) -> list[int]:
        """Indices of the items that have tokens among [first, first + count)."""
        end = first + count
        return [i for i, item in enumerate(self.items) if item.start < end and item.end > first]

    def release(self, done: int) -> None:
        """Forget rows of items that end before position `done`."""
        for i in [i for i in self.held if self.items[i].end <= done]:
            del self.held[i]


class MediaPiece(NamedTuple):
    """Tokens of one request in a batch: positions [first, first + count)."""

    state: MediaState | None
    """None: it has no media."""
    first: int
    size: int


class Encoders:
    """The model's encoder and what it gave last, by content: least recently used go first, past `max_bytes`."""

    def __init__(self, encoder: MediaEncoder, max_bytes: int) -> None:
        self.encoder = encoder
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.counts = {ENCODED_ITEMS: 0, ENCODED_PIECES: 0}
        """Since they were last taken (`take_counts`)."""
        self._kept: OrderedDict[str, Encoded] = OrderedDict()
        self._too_large: dict[str, Encoded] = {}
        """The item that `beforehand` encoded last, if it is larger than all that may be kept; until it is used."""
        self._news: dict[str, bool] = {}
        """By digest, what the engine is to know: whether nothing is left to do beforehand."""
        self._pieces = Pieces(encoder) if encoder.pauses else None

    def load(self, piece: MediaPiece) -> None:
        """Make, or find, the rows of all items that this piece runs tokens of. Raises RequestError (the encoder's), and WorkerError for
        part of a span that attends in both directions."""
        state = piece.state
        if state is None:
            return
        for i in state.among(piece.first, piece.size):
            item = state.items[i]
            if item.bidirectional and (item.start < piece.first or item.end > piece.first + piece.size):
                raise WorkerError(f"tokens {piece.first} to {piece.first + piece.size} cut the {item.kind} at {item.start}")
            if i not in state.held:
                state.held[i] = self._get(item)

    def _get(self, item: MediaItem) -> Encoded:
        found = self._kept.get(item.digest)
        if found is not None and len(found.rows) == item.rows:
            self._kept.move_to_end(item.digest)
            return found
        found = self._too_large.pop(item.digest, None) or self._encode(item)
        self._news[item.digest] = self._keep(item.digest, found)
        return found

    def _keep(self, digest: str, found: Encoded) -> bool:
        """Whether there is room for it."""
        if found.nbytes > self.max_bytes:
            return False
        self._drop(digest)
        self._kept[digest] = found
        self.nbytes += found.nbytes
        while self.nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))
        return True

    def _drop(self, digest: str) -> None:
        if (found := self._kept.pop(digest, None)) is not None:
            self.nbytes -= found.nbytes
            self._news[digest] = False

    def beforehand(self, order: EncodeOrder) -> None:
        """Go on with an item for about `order.seconds`, unless nothing is left to do before the step that runs its tokens, because the item
        is done, or was given up, or fails, which that step is to find out."""
        self._news[order.digest] = self._go_on(order)

    def _go_on(self, order: EncodeOrder) -> bool:
        """Whether nothing is left to do beforehand."""
        pieces, digest = self._pieces, order.digest
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return True
        if digest in self._too_large or pieces is None:
            return True
        if order.item is not None:
            pieces.begin(order.item)
        if pieces.digest != digest:
            return True
        self.counts[ENCODED_PIECES] += 1
        try:
            found = pieces.go_on(order.seconds)
        except Exception:
            return True
        if found is not None:
            self.counts[ENCODED_ITEMS] += 1
            if not self._keep(digest, found):
                self._too_large = {digest: found}
        return found is not None

    def _encode(self, item: MediaItem) -> Encoded:
        self.counts[ENCODED_ITEMS] += 1
        try:
            if self._pieces is not None and self._pieces.digest == item.digest:
                found = self._pieces.go_on(math.inf)
                assert found is not None, "it does not pause"
                return found
            return self.encoder.encode(item)
        except TokenbusError:
            raise
        except Exception as error:
            where = f"the {item.kind} at token {item.start}"
            raise WorkerError(f"{where} could not be encoded: {type(error).__name__}: {plain_text(error)}") from error

    def clear(self) -> None:
        """Forget all that is kept."""
        self._news |= dict.fromkeys((*self._kept, *self._too_large), False)
        self._kept.clear()
        self._too_large.clear()
        self.nbytes = 0

    def take_news(self) -> tuple[list[str], list[str]]:
        """`StepResult.encoded` and `forgotten`: since they were last taken. Empty where nothing is encoded in pieces."""
        news, self._news = self._news, {}
        if self._pieces is None:
            return [], []
        return [digest for digest, ready in news.items() if ready], [digest for digest, ready in news.items() if not ready]

    def take_cpu_seconds(self) -> float:
        """CPU time of the encoder's own thread, likewise."""
        return 0.0 if self._pieces is None else self._pieces.take_cpu_seconds()

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return counts

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.close()

    def check_integrity(self) -> None:
        """RuntimeError unless the bytes counted are those kept, and within bounds."""
        kept = sum(found.nbytes for found in self._kept.values())
        if kept != self.nbytes or kept > self.max_bytes:
            raise RuntimeError(f"encoder cache: {self.nbytes} bytes counted, {kept} kept, {self.max_bytes} allowed")


class WorkerMedia:
    """What the runner needs of it all."""

    def __init__(self, encoder: MediaEncoder, max_bytes: int) -> None:
        self.encoders = Encoders(encoder, max_bytes)
        self.weights_bytes = encoder.weights_bytes
        self.fixed_bytes = max_bytes
        self.in_pieces = encoder.pauses
        self.beforehand, self.take_news = self.encoders.beforehand, self.encoders.take_news
        self.take_cpu_seconds, self.close = self.encoders.take_cpu_seconds, self.encoders.close

    def load(self, run: Run) -> None:
        """As `Encoders.load`."""
        if run.request.media is not None:
            self.encoders.load(_piece(run))

    def attach(self, forward: ForwardBatch, runs: Sequence[Run]) -> None:
        """Every one of `runs` was loaded."""
        if any(run.request.media is not None for run in runs):
            attach(forward, [_piece(run) for run in runs])

    def count(self, counters: dict[str, float]) -> None:
        for name, count in self.encoders.take_counts().items():
            if count:
                counters[name] = counters.get(name, 0) + count


def load_media(model: CausalModel, plugins: WorkerPlugins, max_bytes: int) -> WorkerMedia | None:
    """The encoder of a model with more than text in its checkpoint, which is told to take media; None for any other, or if no plugin
    knows its family. max_bytes: of what is kept. Raises ModelError, PluginLoadError."""
    encoder = None if model.beside is None else plugins.encoder(model.beside)
    if encoder is None:
        return None
    model.take_media(looks_ahead=encoder.looks_ahead)
    return WorkerMedia(encoder, max_bytes)


def media_of(order: WorkerRequest, media: WorkerMedia | None) -> MediaState:
    """RequestError when the model reads no media."""
    if media is None:
        raise RequestError("this model reads text only: leave the pictures and sounds out")
    return MediaState(order.media, order.num_prompt_tokens, media.encoders.encoder)


def _piece(run: Run) -> MediaPiece:
    return MediaPiece(run.request.media, run.request.computed, run.n)


def attach(batch: ForwardBatch, pieces: Sequence[MediaPiece]) -> None:
    """Put what `load` made into the batch, whose requests are `pieces`, in order. Without media nothing is changed."""
    if all(piece.state is None for piece in pieces):
        return
    rows: list[torch.Tensor] = []
    embeds: list[torch.Tensor] = []
    deep: list[tuple[torch.Tensor, ...]] = []
    reach: list[tuple[int, int, int]] = []
    """(row, row, position): rows from the first to before the second see up to before the position."""
    device = batch.token_ids.device
    for start, piece in zip(batch.attention.query_start, pieces, strict=False):
        for i in piece.state.among(piece.first, piece.size) if piece.state else ():
            item, found = piece.state.items[i], piece.state.held[i]  # pyright: ignore[reportOptionalMemberAccess]
            offsets = torch.tensor(item.embeds) if item.embeds else torch.arange(item.length)
            at = item.start + offsets - piece.first
            chosen = (at >= 0) & (at < piece.size)
            rows.append(at[chosen] + start)
            embeds.append(found.rows[chosen.to(device)])
            deep.append(tuple(extra[chosen.to(device)] for extra in found.deep))
            if item.bidirectional:
                first = start - piece.first
                reach += [(first + begin, first + end, end) for begin, end in _blocks(item)]
    batch.media = MediaRows(
        rows=torch.cat(rows).to(device) if rows else torch.empty(0, dtype=torch.int64, device=device),
        embeds=torch.cat(embeds) if embeds else torch.empty(0, device=device),
        deep=[torch.cat(layer) for layer in zip(*deep, strict=True)],
        places=_batch_places(batch, pieces),
    )
    if reach:
        _look_ahead(batch.attention, batch.positions, reach)


def _blocks(item: MediaItem) -> list[tuple[int, int]]:
    """Prompt positions, from and before which its rows stand without anything between: those of one block see each other."""
    if not item.embeds:
        return [(item.start, item.end)]
    starts = [i for i, offset in enumerate(item.embeds) if i == 0 or item.embeds[i - 1] != offset - 1]
    ends = [*starts[1:], len(item.embeds)]
    return [(item.start + item.embeds[a], item.start + item.embeds[b - 1] + 1) for a, b in zip(starts, ends, strict=True)]


def _look_ahead(attention: AttentionBatch, positions: torch.Tensor, reach: list[tuple[int, int, int]]) -> None:
    attention.reach = positions + 1
    for first, last, end in reach:
        attention.reach[first:last] = end


def _batch_places(batch: ForwardBatch, pieces: Sequence[MediaPiece]) -> torch.Tensor | None:
    if all(piece.state is None or piece.state.places is None for piece in pieces):
        return None
    places = batch.positions.expand(3, -1).clone()
    for start, piece in zip(batch.attention.query_start, pieces, strict=False):
        state = piece.state
        if state is None or state.places is None:
            continue
        here = places[:, start : start + piece.size]
        prompt = state.places[:, piece.first : piece.first + piece.size]
        here[:, : prompt.shape[1]] = prompt.to(here.device)
        here[:, prompt.shape[1] :] += state.shift
    return places


def _places(items: Sequence[MediaItem], num_prompt: int, encoder: MediaEncoder) -> tuple[torch.Tensor | None, int]:
    """Text goes on by one a token, and behind an item where the encoder says."""
    parts: list[torch.Tensor] = []
    done = place = 0
    for item in items:
        found = encoder.places(item)
        if found is None:
            return None, 0
        span, length = found
        before = item.start - done
        parts += [torch.arange(place, place + before).expand(3, -1), span.cpu() + place + before]
        place += before + length
        done = item.end
    parts.append(torch.arange(place, place + max(0, num_prompt - done)).expand(3, -1))
    return torch.cat(parts, dim=1), place - done
