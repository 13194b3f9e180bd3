"""Suffix decoding: what most often followed the longest known context is proposed, from the request's own text and, if that is switched on,
from recent outputs of the same tenant (after Oliaro et al. 2024, "SuffixDecoding").

For contexts of several lengths a table counts which token followed. Drafts are chosen one by one: the longest context that was seen
decides, and the product of the chosen tokens' shares is the draft's estimated probability; where that is too low, drafting ends.

Good where answers resemble each other: agents that loop, forms, code. With `remember` a tenant's requests learn from each other's outputs;
requests without an API key are one tenant.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.plugin import PluginInfo, StashKey, hookimpl
from .adaptive import Length, Proposer, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.plugin import Role
    from ...core.request import Request

CONTEXTS = (12, 6, 3, 2)
"""Lengths of contexts, longest first."""
FOLLOWERS = 8
"""Tokens counted behind a context."""


class SuffixSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_drafts: Annotated[int, msgspec.Meta(ge=1)] = 16
    """Drafts of a request in one step at most."""
    min_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.1
    """Estimated probability below which no further draft is added."""
    adaptive: bool = True
    """Fewer drafts, or none, where they are seldom right."""
    remember: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Output tokens of ended requests that are kept for each tenant; 0: requests learn from themselves only."""
    tenants: Annotated[int, msgspec.Meta(ge=1)] = 256
    """Tenants whose outputs are kept, those used last."""


class Counts:
    """Which tokens followed which contexts, how often."""

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], dict[int, int]] = {}

    def __len__(self) -> int:
        return len(self._followers)

    def add(self, tokens: Sequence[int], place: int) -> None:
        """tokens[place] followed what stands before it."""
        token = tokens[place]
        for size in CONTEXTS:
            if size > place:
                continue
            followers = self._followers.setdefault(tuple(tokens[place - size : place]), {})
            if token in followers or len(followers) < FOLLOWERS:
                followers[token] = followers.get(token, 0) + 1

    def likeliest(self, tail: Sequence[int], size: int) -> tuple[int, float] | None:
        """The token that followed the last `size` of `tail` most often (of equals, the first seen), and its share, with 2 / size more cases
        in which another one did: a long context is trusted sooner."""
        followers = self._followers.get(tuple(tail[-size:])) if size <= len(tail) else None
        if not followers:
            return None
        token = max(followers, key=followers.__getitem__)
        return token, followers[token] / (sum(followers.values()) + 2 / size)


class Memory:
    """Recent outputs of one tenant: two generations, so that old ones are forgotten in one go."""

    def __init__(self, most: int) -> None:
        self._half = max(1, most // 2)
        self._size = 0
        self.young, self.old = Counts(), Counts()

    def add(self, output: Sequence[int]) -> None:
        output = output[: self._half]
        if self._size + len(output) > self._half:
            self.old, self.young, self._size = self.young, Counts(), 0
        self._size += len(output)
        for place in range(1, len(output)):
            self.young.add(output, place)


class State:
    __slots__ = ("counts", "length", "seen")

    def __init__(self, everybody: Record) -> None:
        self.counts = Counts()
        self.seen = 1
        self.length = Length(everybody)

    def catch_up(self, tokens: list[int]) -> None:
        for place in range(self.seen, len(tokens)):
            self.counts.add(tokens, place)
        self.seen = max(self.seen, len(tokens))


STATE = StashKey[State]("speculative.suffix")


class Suffix(Proposer):
    info = PluginInfo(
        name="speculative.suffix",
        summary="drafts from what often followed before, in this request or the tenant's recent ones",
        scope="request",
        lossless=True,
    )
    Settings = SuffixSettings

    def __init__(self, settings: Any, role: Role) -> None:
        super().__init__(settings, role)
        self._memories: OrderedDict[str, Memory] = OrderedDict()

    @hookimpl
    def request_added(self, request: Request) -> None:
        request.stash[STATE] = State(self.everybody)

    @hookimpl
    def propose_drafts(self, request: Request, most: int) -> list[int]:
        state, settings = request.stash[STATE], self.settings
        state.catch_up(request.tokens)
        sources = [state.counts]
        memory = self._memories.get(request.admitted.tenant) if settings.remember else None
        if memory is not None:
            sources += [memory.young, memory.old]
        drafts = draft(sources, request.tokens, min(most, settings.max_drafts), settings.min_share)
        return self.worth(drafts, state.length) if settings.adaptive else drafts

    @hookimpl
    def drafts_verified(self, request: Request, proposed: int, accepted: int) -> None:
        request.stash[STATE].length.verified(proposed, accepted)

    @hookimpl
    def request_removed(self, request: Request) -> None:
        if not self.settings.remember or request.num_output < CONTEXTS[-1] + 1:
            return
        tenant = request.admitted.tenant
        memory = self._memories.setdefault(tenant, Memory(self.settings.remember))
        self._memories.move_to_end(tenant)
        while len(self._memories) > self.settings.tenants:
            self._memories.popitem(last=False)
        memory.add(request.tokens[request.num_prompt :])


def draft(sources: Sequence[Counts], tokens: Sequence[int], most: int, least: float) -> list[int]:
    """Tokens that may follow, each the likeliest behind the longest context that a source knows, while the estimate is at least `least`."""
    tail = list(tokens[-CONTEXTS[0] :])
    drafts: list[int] = []
    estimate = 1.0
    while len(drafts) < most:
        found = next(
            (known for size in CONTEXTS for source in sources if (known := source.likeliest(tail, size)) is not None), None
        )
        if found is None:
            break
        token, share = found
        estimate *= share
        if estimate < least:
            break
        drafts.append(token)
        tail = [*tail[1 - CONTEXTS[0] :], token]
    return drafts
