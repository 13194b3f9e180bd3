"""GET /v1/tokenbus/events: the feed of a running server (front/feed.py) as server-sent events, for whoever watches it."""

from __future__ import annotations

from aiohttp import web

from .app import Call, Endpoint, Routes
from .sse import EventStream


def add_event_routes(routes: Routes) -> None:
    routes.add("GET", "/v1/tokenbus/events", Endpoint(events, "admin"))


async def events(call: Call) -> web.StreamResponse:
    """Until the viewer leaves or the server ends; the latter with the terminator "[DONE]"."""
    if call.request.method == "HEAD":
        return web.Response(content_type="text/event-stream")
    feed = call.service.feed
    viewer = feed.join()
    try:
        headers = {"x-request-id": call.request_id}
        with EventStream(call.request, headers, call.service.config.server.stream_comment_seconds) as stream:
            async for frame in viewer:
                await stream.send([frame])
            return await stream.end([])
    finally:
        feed.leave(viewer)
