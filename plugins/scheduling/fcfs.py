"""`scheduling.unified` by the name of its order; configurations may use either."""

from __future__ import annotations

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import FcfsPolicy, SchedulingPolicy


class Fcfs(Plugin):
    info = PluginInfo(
        name="scheduling.fcfs",
        summary="another name of scheduling.unified",
        scope="step",
        lossless=True,
        slot="scheduling",
    )

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return FcfsPolicy()
