"""Core's own way, under a name that can be switched: first come, first served, and every step runs whatever there is to run, decodes and
prompts alike, within one budget of tokens (continuous batching)."""

from __future__ import annotations

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import FcfsPolicy, SchedulingPolicy


class Unified(Plugin):
    info = PluginInfo(
        name="scheduling.unified",
        summary="first come, first served; decodes and prompts share steps",
        scope="step",
        lossless=True,
        slot="scheduling",
        default=True,
    )

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return FcfsPolicy()
