"""Prompt lookup: what followed the last tokens where they stood before is proposed again (Saxena 2023, "Prompt Lookup Decoding").

Good at copying: edits of a given text, quotations, lists and code that repeat themselves. Costs a dictionary entry for each token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ...core.plugin import PluginInfo, StashKey, hookimpl
from .adaptive import Length, Proposer, Record, lengths

if TYPE_CHECKING:
    from ...core.request import Request


class NgramSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Drafts of a request in one step at most."""
    min_match: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    """Tokens at the end that must have stood somewhere before."""
    adaptive: bool = True
    """Fewer drafts, or none, where they are seldom right; False: always as many as there are."""


class Lookup:
    """Where each run of `size` tokens of one request stood, the latest places first."""

    PLACES = 8
    LONGEST = 32
    """Tokens that a match is compared over."""
    RIVAL = 0.8
    """Share of the longest match's length from which another one is as good: where they disagree, drafting ends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._seen = size
        """Places up to here are known: behind tokens[:place]."""

    def catch_up(self, tokens: list[int]) -> None:
        """All runs but the last, which nothing follows yet."""
        for place in range(self._seen, len(tokens)):
            places = self._places.setdefault(tuple(tokens[place - self.size : place]), [])
            places.insert(0, place)
            del places[self.PLACES :]
        self._seen = max(self._seen, len(tokens))

    def continuation(self, tokens: list[int], most: int) -> list[int]:
        """What followed the longest match, up to where matches that are hardly shorter went on in another way; where it runs into the end
        it goes on with itself."""
        self.catch_up(tokens)
        if len(tokens) < self.size:
            return []
        matches = lengths(self._places.get(tuple(tokens[-self.size :]), ()), tokens, self.LONGEST)
        if not matches:
            return []
        place = max(matches, key=matches.__getitem__)
        found = tokens[place : place + most]
        while len(found) < most:
            found.append(found[len(found) - (len(tokens) - place)])
        for rival in (other for other, size in matches.items() if size >= self.RIVAL * matches[place] and other != place):
            theirs = tokens[rival : rival + len(found)]
            del found[next((i for i, (a, b) in enumerate(zip(found, theirs, strict=False)) if a != b), len(found)) :]
        return found


class State:
    __slots__ = ("length", "lookup")

    def __init__(self, size: int, everybody: Record) -> None:
        self.lookup = Lookup(size)
        self.length = Length(everybody)


STATE = StashKey[State]("speculative.ngram")


class Ngram(Proposer):
    info = PluginInfo(
        name="speculative.ngram",
        summary="drafts from the request's own text",
        scope="request",
        lossless=True,
    )
    Settings = NgramSettings

    @hookimpl
    def request_added(self, request: Request) -> None:
        request.stash[STATE] = State(self.settings.min_match, self.everybody)

    @hookimpl
    def propose_drafts(self, request: Request, most: int) -> list[int]:
        state, settings = request.stash[STATE], self.settings
        drafts = state.lookup.continuation(request.tokens, min(most, settings.max_drafts))
        return self.worth(drafts, state.length) if settings.adaptive else drafts

    @hookimpl
    def drafts_verified(self, request: Request, proposed: int, accepted: int) -> None:
        request.stash[STATE].length.verified(proposed, accepted)
