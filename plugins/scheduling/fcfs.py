"""First come, first served: core's own order, under a name that can be switched."""

from __future__ import annotations

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import FcfsPolicy, SchedulingPolicy


class Fcfs(Plugin):
    info = PluginInfo(
        name="scheduling.fcfs",
        summary="first come, first served",
        scope="step",
        lossless=True,
        slot="scheduling",
        default=True,
    )

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return FcfsPolicy()
