"""Static batching, as inference servers did it before continuous batching: a batch is fixed, and nobody joins until all have finished.

    joining    while no request of the batch has decoded yet, waiting requests join as far as batch, budget and blocks have room; then the
               batch is closed. Prompts first, then decodes, never in one step
    memory     a request joins only when there is room for all that it may ever need: `reserve_tokens`, or its prompt and max_tokens. The
               blocks themselves are taken as they are needed; nobody else joins on them
    padding    the rows of those that have finished go on being computed until the batch ends: the others carry a draft for each of them,
               an end token, which is verified like any draft and thrown away (so no answer changes). A request carries `max_drafts` of
               them at most, and none beyond its own end. Counters show them as drafts of this plugin's

What it does not do: pad prompts to the longest one. The runner's batch is ragged, and a row of padding before a prompt could not be made
by means that a plugin has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import FcfsPolicy, SchedulingPolicy, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.plugin import Role
    from ...core.request import Request


class StaticSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reserve_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens that room is kept for, for each request, whatever it asks for; 0: its own prompt and max_tokens."""
    pad: bool = True
    """Go on computing the rows of finished requests until the batch ends."""


class StaticPolicy(FcfsPolicy):
    def __init__(self, settings: StaticSettings) -> None:
        super().__init__()
        self._settings = settings
        self._size = 0
        """Requests that the batch had at most."""
        self._missing = 0
        """Rows that this step has yet to pad."""
        self._carriers = 0
        """Requests that may still carry them."""

    def compose(self, running: Sequence[Request], now: float) -> Sequence[Work]:
        self._carriers = len(running)
        self._size = max(self._size, self._carriers) if running else 0
        self._missing = self._size - self._carriers
        if any(request.computed > request.num_prompt for request in running):
            return (Work.DECODES | Work.PROMPTS,)
        return (Work.PROMPTS | Work.JOINING, Work.DECODES)

    def reserve(self, request: Request) -> int:
        return self._settings.reserve_tokens or request.limit

    def padding(self, request: Request, most: int) -> list[int]:
        """Drafts in the place of rows that have finished: an equal share for everybody who can still carry some."""
        if not (self._settings.pad and self._missing > 0 and self._carriers > 0):
            return []
        count = min(most, -(-self._missing // self._carriers))
        self._missing -= count
        self._carriers -= 1
        return [min(request.stop_ids, default=0)] * count


class Static(Plugin):
    info = PluginInfo(
        name="scheduling.static",
        summary="a fixed batch: nobody joins until all have finished",
        scope="step",
        lossless=True,
        slot="scheduling",
    )
    Settings = StaticSettings

    def __init__(self, settings: Any, role: Role) -> None:
        super().__init__(settings, role)
        self._policy: StaticPolicy | None = None

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        self._policy = StaticPolicy(self.settings)
        return self._policy

    @hookimpl(tryfirst=True)
    def propose_drafts(self, request: Request, most: int) -> list[int] | None:
        return None if self._policy is None else self._policy.padding(request, most) or None
