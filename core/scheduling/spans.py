"""Pictures and sounds in a plan: which tokens of a prompt may run in a step, given the spans among them.

    a span that attends in both directions   goes whole in one step; chunks and cache hits end at its start, or behind it
    the encoder's budget                     tokens of the items that begin in a step, which it may have to encode

Of two chunks only where they end is decided here: what a step computes is the same whatever the borders.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..contexts import PrefixMatch
from ..errors import ContextLengthError
from ..media import MediaItem
from ..request import AdmittedRequest, Request


def check_spans_fit(admitted: AdmittedRequest, token_budget: int) -> None:
    """ContextLengthError when a span that must go whole in one step is larger than a step."""
    for item in admitted.media:
        if item.bidirectional and item.length > token_budget:
            raise ContextLengthError(
                f"the {item.kind} at token {item.start} takes {item.length} tokens, which have to run in one step; a step has at most "
                f"{token_budget}. Send a smaller one, or have scheduler.token_budget raised",
                request_id=admitted.request_id,
            )


def fitting_chunk(request: Request, wanted: int, *, budget: int, encoder_budget: int, begun: int) -> int:
    """How many of `wanted` (1 or more) next tokens run now, so that no span is cut that must not be. More than `wanted` when the chunk
    begins with such a span, 0 when there is no room for it.

    budget: tokens that a span may take if `wanted` is less. begun: tokens of items that begin in this step already; `encoder_budget` bounds
    them all together, but for a step's first item."""
    first, end = request.computed, request.computed + wanted
    for item in _among(request.admitted.media, first, end):
        if _begins(request, item):
            if begun and begun + item.length > encoder_budget:
                return max(item.start, first) - first
            begun += item.length
        if item.bidirectional and item.end > end:
            if item.start > first:
                return item.start - first
            return item.length if item.length <= max(budget, wanted) else 0
    return wanted


def beginning(request: Request, count: int) -> Iterable[MediaItem]:
    """The items whose encoder's rows are first needed for its next `count` tokens."""
    media = request.admitted.media
    return (i for i in _among(media, request.computed, request.computed + count) if _begins(request, i))


def begun_tokens(request: Request, count: int) -> int:
    """Tokens, all in all, of those items."""
    return sum(item.length for item in beginning(request, count))


def cut_match(request: Request, match: PrefixMatch, block_size: int) -> PrefixMatch | None:
    """The match without blocks from the start of a span on that must go whole, and that the match ends in."""
    tokens = match.num_tokens
    for item in reversed(request.admitted.media):
        if item.bidirectional and item.start < tokens < item.end:
            tokens = item.start // block_size * block_size
    if tokens == match.num_tokens:
        return match
    blocks = match.blocks[: tokens // block_size]
    return PrefixMatch(blocks=blocks, num_tokens=tokens) if blocks else None


def _begins(request: Request, item: MediaItem) -> bool:
    """Its encoder's rows are first needed now: it begins, or the worker has not seen the request (a cache had the item's beginning)."""
    return item.start >= request.computed or not request.worker_knows


def _among(media: Iterable[MediaItem], first: int, end: int) -> Iterable[MediaItem]:
    return (item for item in media if item.start < end and item.end > first)
