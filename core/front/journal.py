"""The journal: what the front knows about every open request. Knows nothing of HTTP, processes or streams.

One entry lives from a request's admission to its one end. It holds all that decides the rest of the answer (prompt, parameters, seed,
features) and every token emitted so far, so that a stream can be told exactly where it stands, whatever becomes of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from ..request import AdmittedRequest, Resumed


@dataclass(slots=True)
class OpenRequest:
    admitted: AdmittedRequest
    features: frozenset[str]
    """Plugins in force for it: those it was admitted with, but for live switches of lossless ones."""
    tokens: list[int] = field(default_factory=list)
    """Emitted so far; at most `admitted.max_tokens`."""
    prompt_logprobs: int = 0
    """Entries for prompt positions emitted so far."""
    cached_tokens: int | None = None
    """Prompt tokens that a cache gave when it was first scheduled; None before."""
    preemptions: int = 0
    """As far as they are known: an engine tells of each before the step that needs the blocks, and how many there were at the end."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the engines that gave it back noted."""
    resumptions: int = 0
    """Deaths of an engine that had it."""
    begun: bool = False
    """An engine has had it."""
    until: int | None = None
    """Number of tokens at which the engine that has it now gives it back."""
    cancel_reason: str | None = None
    """Why its client gave it up; None while it is wanted."""

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output."""
        return len(self.admitted.prompt) + len(self.tokens)

    def as_sent(self) -> AdmittedRequest:
        """What an engine is given, to go on where the answer stands."""
        if not self.begun:
            return self.admitted
        resumed = Resumed(
            tokens=list(self.tokens),
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
            notes=self.notes,
            until=self.until,
        )
        return msgspec.structs.replace(self.admitted, features=tuple(sorted(self.features)), resumed=resumed)


class Journal:
    """Open requests by id, in order of admission. A plain object: one owner, no locks."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """All or none; ValueError when an id is open already."""
        ids = [request.request_id for request in requests]
        if len(set(ids)) != len(ids) or not self._open.keys().isdisjoint(ids):
            raise ValueError(f"a request id is in use already: {', '.join(ids)}")
        for request in requests:
            self._open[request.request_id] = OpenRequest(request, frozenset(request.features))

    def emit(self, request_id: str, tokens: Iterable[int], prompt_logprobs: int = 0) -> OpenRequest:
        """Note new tokens of an open request, and the number of new entries for its prompt; KeyError when it isn't open."""
        entry = self._open[request_id]
        entry.tokens.extend(tokens)
        entry.prompt_logprobs += prompt_logprobs
        return entry

    def end(self, request_id: str) -> OpenRequest | None:
        """Close the entry and give it back; None when it isn't open (any more)."""
        return self._open.pop(request_id, None)

    def get(self, request_id: str) -> OpenRequest | None:
        return self._open.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        """A snapshot: entries may be ended while it is walked."""
        return iter(tuple(self._open.values()))

    def media_bytes(self) -> int:
        """Of the processed pictures and sounds of all open requests, once for each request."""
        return sum(item.size for entry in self._open.values() for item in entry.admitted.media)

    def features_in_use(self) -> frozenset[str]:
        """Plugins that some open request was admitted with."""
        return frozenset().union(*(entry.admitted.features for entry in self._open.values()))
