"""Prefill first, then decode, never both in one step: continuous batching as it was before prompts were cut into chunks.

While a prompt waits that there is room for, or one is not done yet, running streams stand still; a step of decodes has nothing else in it.
New requests get their first token soon, and everybody else's tokens come in bursts. To compare with `scheduling.unified`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import FcfsPolicy, SchedulingPolicy, Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.request import Request


class TwoPhasePolicy(FcfsPolicy):
    def compose(self, running: Sequence[Request], now: float) -> Sequence[Work]:
        return (Work.PROMPTS | Work.JOINING, Work.DECODES)


class TwoPhase(Plugin):
    info = PluginInfo(
        name="scheduling.two_phase",
        summary="prompts first, then decodes, never in one step",
        scope="step",
        lossless=True,
        slot="scheduling",
    )

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return TwoPhasePolicy()
