"""A page that shows what the server does, at /dashboard: queue, batch, KV pool, latencies, the last steps, plugins with their switches."""

from __future__ import annotations

from typing import Any

from ...core.contexts import Route
from ...core.plugin import Plugin, PluginInfo, hookimpl


class Dashboard(Plugin):
    info = PluginInfo(
        name="dashboard",
        summary="a page with queue, batch, KV pool, latencies, the last steps and all switches at /dashboard",
        scope="step",
        lossless=True,
        default=True,
    )

    @hookimpl
    def http_routes(self) -> list[Route]:
        return [Route("GET", "/dashboard", self._serve, page=True)]

    async def _serve(self, _request: Any) -> Any:
        from aiohttp import web

        from .page import load_page

        page = load_page()
        return web.Response(body=page.body, headers=page.headers)
