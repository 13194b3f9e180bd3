"""Requests to simulate, made from recorded lives: token ids that nobody wrote, equal where the recorded ones were.

A full block's ids come from its hash, so equal beginnings are equal again; all other ids are unique. What a request generates is known
beforehand, so drafts are right as often, and at the same places, as they were.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

from ..plugin import Plugin, PluginInfo, hookimpl
from ..request import AdmittedRequest, Request, Resumed
from .frames import HASH_BYTES
from .history import Life
from .media import items_of

STOP = 0
"""The one id that ends a request."""
UNIQUE = 1 << 30
"""Ids from here on stand once."""
DRAFTS = "recorded drafts"
"""The plugin that proposes again what was proposed."""


class Story:
    """One request: its prompt, and what it will answer."""

    def __init__(self, life: Life, block_size: int, unique: Iterator[int]) -> None:
        self.life = life
        arrival = life.arrival
        self._unique = unique
        length = arrival.prompt + life.outputs
        tokens = _tokens(life.hashes, block_size)[:length]
        tokens += [next(unique) for _ in range(length - len(tokens))]
        self.prompt = tokens[: arrival.prompt]
        self._answer = tokens[arrival.prompt :]
        if life.end is not None and life.end.stop_token:
            self._answer.append(STOP)
        self._places = sorted(life.drafted)

    def after(self, num_output: int, count: int) -> list[int]:
        """The next `count` output tokens."""
        while len(self._answer) < num_output + count:
            self._answer.append(next(self._unique))
        return self._answer[num_output : num_output + count]

    def drafts(self, num_output: int, most: int) -> list[int]:
        """What was proposed here; between two recorded places, what was left of the proposal there."""
        place = bisect_right(self._places, num_output) - 1
        if place < 0:
            return []
        proposed, accepted = self.life.drafted[self._places[place]]
        gone = num_output - self._places[place]
        if gone > accepted:
            return []
        proposed = min(proposed - gone, most)
        right = min(accepted - gone, proposed)
        true = self.after(num_output, right + 1)
        return [*true[:right], *([true[right] % UNIQUE + 1] * (proposed - right))]

    def admitted(self, features: frozenset[str], created: float) -> AdmittedRequest:
        arrival = self.life.arrival
        fields: dict[str, Any] = {name: value for name, value in arrival.fields.items() if value is not None}
        if arrival.salt is not None:
            fields["cache_salt"] = arrival.salt.hex()
        return AdmittedRequest(
            request_id=str(arrival.serial),
            prompt=self.prompt,
            media=items_of(arrival),
            max_tokens=arrival.max_tokens,
            fields=fields,
            features=tuple(sorted(features)),
            pinned={name: wish for name, wish in arrival.pinned.items() if name in features or not wish},
            tenant=arrival.tenant.hex(),
            arrival=created + arrival.arrival,
            resumed=Resumed(tokens=self.after(0, arrival.known)) if arrival.known else None,
        )

    @property
    def over(self) -> int | None:
        """Output tokens at which somebody ended it from outside; None: it ends by itself."""
        end = self.life.end
        return None if end is not None and end.stop_token else self.life.outputs

    @property
    def given_up(self) -> float | None:
        """When somebody ended it, who had not got any new token."""
        end, arrival = self.life.end, self.life.arrival
        if end is None or end.reason in {"stop", "length"} or self.life.outputs > arrival.known:
            return None
        return end.at


def _tokens(hashes: bytes, block_size: int) -> list[int]:
    """Ids of full blocks: two that hold the hash, then filling."""
    tokens: list[int] = []
    for begin in range(0, len(hashes), HASH_BYTES):
        value = int.from_bytes(hashes[begin : begin + HASH_BYTES], "little")
        block = [1 + value % (UNIQUE - 1), 1 + (value >> 32) % (UNIQUE - 1)]
        tokens += (block + [1] * block_size)[:block_size]
    return tokens


def make_plugin(stories: dict[str, Story]) -> type[Plugin]:
    """The plugin that stands for the proposers that were on, and for fields that make every prompt position count."""

    class RecordedDrafts(Plugin):
        info = PluginInfo(name=DRAFTS, summary="proposes what was proposed", scope="request", lossless=True)

        @hookimpl
        def propose_drafts(self, request: Request, most: int) -> list[int]:
            return stories[request.request_id].drafts(request.num_output, most)

    return RecordedDrafts


LOGITS = "recorded prompt logprobs"


def make_logits_plugin(stories: dict[str, Story]) -> type[Plugin]:
    """The plugin that says of which requests every prompt position was run."""

    class RecordedPromptLogits(Plugin):
        info = PluginInfo(name=LOGITS, summary="says who wanted prompt logprobs", scope="request", lossless=True)

        @hookimpl
        def wants_prompt_logits(self, request: Request) -> bool:
            return stories[request.request_id].life.prompt_logits

    return RecordedPromptLogits
