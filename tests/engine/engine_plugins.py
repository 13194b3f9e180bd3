"""Plugins that front and engine processes of these tests load by "engine_plugins:Class"."""

from __future__ import annotations

from typing import Any, ClassVar

from tokenbus.core.contexts import FrontContext
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

SEEN: list[str] = []
"""Calls in this process."""


class Noted(Plugin):
    @hookimpl
    def front_started(self, front: FrontContext) -> None:
        assert front.config.model.model
        SEEN.append(f"+{self.info.name}")

    @hookimpl
    def front_stopped(self) -> None:
        SEEN.append(f"-{self.info.name}")


class A(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="a", summary="a test's", scope="step", lossless=False, claims={"x"})


class B(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="b", summary="a test's", scope="step", lossless=True)


class FrontFails(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="front_fails", summary="a test's", scope="step", lossless=True)

    @hookimpl
    def front_started(self, front: FrontContext) -> None:
        raise ValueError("no front")


class EngineFails(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="engine_fails", summary="a test's", scope="step", lossless=True)

    @hookimpl
    def engine_started(self) -> None:
        raise ValueError("no engine")


class StepFails(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="step_fails", summary="a test's", scope="step", lossless=True)

    @hookimpl
    def step_finished(self) -> None:
        raise ValueError("no step")


class Limit(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="limit", summary="a test's", scope="step", lossless=True, enforces=True)

    @hookimpl
    def step_finished(self) -> Any:
        raise ValueError("no limit")


class Kernel(Noted):
    info: ClassVar[PluginInfo] = PluginInfo(name="kernel", summary="a test's", scope="step", lossless=True, slot="attention")


class Unplain(Noted):
    """Its fields can't travel: "made" is the plugin's own doing, anything else is left to the client."""

    info: ClassVar[PluginInfo] = PluginInfo(name="unplain", summary="a test's", scope="step", lossless=True, claims={"odd"})

    @hookimpl
    def check_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"odd": object()} if fields["odd"] == "made" else fields
