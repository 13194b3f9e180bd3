"""A scheduling policy: the shortest request first, by prompt and `max_tokens` together. Every token counts as `seconds_per_token` of
later arrival, so a long request waits, but not for ever: requests that come late enough stand behind it, however short they are.

    pip install ./examples/plugin-shortest-first
    tokenbus serve --enable scheduling.shortest_first

It changes who waits, never what anybody gets: a scheduling policy is lossless.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.policy import OrderedPolicy, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenbus.core.request import Request


class ShortestFirstSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds_per_token: Annotated[float, msgspec.Meta(gt=0)] = 0.05
    """Seconds of waiting that make up for one token more of prompt and `max_tokens`."""


class ShortestFirstPolicy(OrderedPolicy):
    def __init__(self, seconds_per_token: float) -> None:
        super().__init__()
        self._seconds_per_token = seconds_per_token

    def rank(self, request: Request) -> float:
        """Of what never changes, as a rank must be."""
        return request.arrival + self._seconds_per_token * (request.num_prompt + request.admitted.max_tokens)

    def victim(self, running: Sequence[Request], now: float) -> Request:
        """The last in the same order, so the first is never anybody's victim."""
        return max(running, key=lambda request: (self.rank(request), request.request_id))


class ShortestFirst(Plugin):
    info = PluginInfo(
        name="scheduling.shortest_first",
        summary="the shortest request first, with ageing (an example)",
        scope="step",
        lossless=True,
        slot="scheduling",
        api_version=(1, 1),
    )
    Settings = ShortestFirstSettings

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return ShortestFirstPolicy(self.settings.seconds_per_token)
