"""Server-sent events: one write for all that is ready at one time, the headers with the first; comments while there is nothing to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import anyio
import msgspec
from aiohttp import web

WRITE_STALL = 300.0
"""Seconds a client may leave a full connection unread before it counts as gone."""

COMMENT = b": the answer goes on\n\n"
"""Clients skip it."""

_encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"


class EventStream:
    """As a context manager it sends a comment whenever it has begun and nothing was written for `comment_seconds`."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], comment_seconds: float) -> None:
        self._request = request
        self._comment_seconds = comment_seconds
        self._written_at = 0.0
        self._commenting: asyncio.Task[None] | None = None
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self.started = False

    def __enter__(self) -> Self:
        self._commenting = asyncio.get_running_loop().create_task(self._comment())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._commenting is not None:
            self._commenting.cancel()

    async def _comment(self) -> None:
        """A connection that is gone, or not read, is for whoever has something to send to find out."""
        now = asyncio.get_running_loop().time
        while True:
            idle = now() - self._written_at if self.started else 0.0
            await asyncio.sleep(max(0.0, self._comment_seconds - idle))
            transport = self._request.transport
            if not self.started or now() - self._written_at < self._comment_seconds:
                continue
            if transport is None or transport.is_closing():
                return
            self._written_at = now()
            if not transport.get_write_buffer_size():
                with contextlib.suppress(ConnectionError):
                    await self._response.write(COMMENT)

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
        self._written_at = asyncio.get_running_loop().time()
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
