"""Prometheus metrics at /metrics. Everything is told to it by the front's bus: it never touches a request, and costs steps nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ...core.contexts import FrontContext, Route
from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from .collector import Collector


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    idle_alarm_fraction: float = 0.2
    """Alarm when, over `idle_alarm_window`, work waited while no step ran for more than this fraction of the time."""
    idle_alarm_window: float = 10.0
    """Seconds."""


class Metrics(Plugin):
    info = PluginInfo(
        name="metrics",
        summary="Prometheus metrics of queue, batch, memory, latency and machine use at /metrics",
        scope="step",
        lossless=True,
        default=True,
    )
    Settings = MetricsSettings

    def __init__(self, settings: Any, role: Any) -> None:
        super().__init__(settings, role)
        self._collector: Collector | None = None

    @hookimpl
    def front_started(self, front: FrontContext) -> None:
        from .collector import Collector

        self._collector = Collector(front, self.settings)

    @hookimpl
    def front_stopped(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    @hookimpl
    def http_routes(self) -> list[Route]:
        return [Route("GET", "/metrics", self._serve)]

    async def _serve(self, request: Any) -> Any:
        from aiohttp import web

        if self._collector is None:
            raise web.HTTPNotFound
        body, content_type = self._collector.exposition(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})
