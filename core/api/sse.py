"""Server-sent events: one write for all that is ready at one time, the headers with the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec
from aiohttp import web

WRITE_STALL = 300.0
"""Seconds a client may leave a full connection unread before it counts as gone."""

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


class EventStream:
    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self.started = False

    async def send(self, events: list[Any]) -> None:
        """Write events, objects to be encoded. Waits while the client doesn't read; ConnectionError when it is gone."""
        if events:
            await self._write(b"".join(map(event, events)))

    async def end(self, events: list[Any]) -> web.StreamResponse:
        """Last events, then the terminator."""
        await self._write(b"".join([*map(event, events), b"data: [DONE]\n\n"]))
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        if not self.started:
            self.started = True
            await self._response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        if not transport.get_write_buffer_size():
            await self._response.write(data)
            return
        try:
            with anyio.fail_after(WRITE_STALL):
                await self._response.write(data)
        except TimeoutError:
            transport.abort()
            raise ConnectionResetError(f"the client has read nothing for {WRITE_STALL:g} s") from None
