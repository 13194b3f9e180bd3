"""The wire between front and engine: typed messages, length-prefixed, over one Unix socket pair.

    preamble   b"TKBS" + uint32 PROTOCOL_VERSION        once, each way, before anything else is decoded
    frame      uint32 length + msgpack of one tagged struct

Big-endian. Bytes of a peer are decoded strictly against a union of message types (see messages.py); nothing is unpickled. A message
that doesn't decode, or that is longer than `MAX_FRAME`, ends the connection with a `WireError`: neither side guesses.

Back-pressure: `send` waits while more than `HIGH_WATER` bytes lie unsent; a reader that stops receiving makes its peer's `send` wait.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

import msgspec

from .messages import PROTOCOL_VERSION

MAGIC = b"TKBS"
MAX_FRAME = 256 * 1024 * 1024
"""Bytes of one message: 128 choices of 100k prompt tokens need about 64 MiB."""
HIGH_WATER = 1024 * 1024
"""Bytes that may lie unsent before `send` waits."""

_LENGTH = struct.Struct(">I")
_PREAMBLE = struct.Struct(">4sI")

In = TypeVar("In")
Out = TypeVar("Out")


class FrameError(ValueError):
    """A message that can't be put on the wire: there is something in it that isn't plain data, or it is too long."""


class WireError(Exception):
    """The peer broke the protocol: another version, a frame out of bounds, bytes that are no message of the expected types."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: object, max_frame: int = MAX_FRAME) -> bytearray:
    """The message as a frame; FrameError when it can't be one."""
    frame = bytearray(_LENGTH.size)
    try:
        _encoder.encode_into(message, frame, _LENGTH.size)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise FrameError(f"a {type(message).__name__} can't be encoded: {type(error).__name__}: {error}") from error
    size = len(frame) - _LENGTH.size
    if size > max_frame:
        raise FrameError(f"a {type(message).__name__} of {size} bytes is over the wire's limit of {max_frame}")
    _LENGTH.pack_into(frame, 0, size)
    return frame


class Channel(Generic[In, Out]):
    """One end of the wire: sends messages of type `Out`, receives the types that `receives` (a union) names.

    One task receives; any number may send, one frame behind the other. After `WireError` or the end of the stream the channel
    is of no more use.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: Any, *, max_frame: int = MAX_FRAME
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(receives, strict=True)
        self._max_frame = max_frame
        self._greeted = False
        self._sending = asyncio.Lock()
        writer.transport.set_write_buffer_limits(high=HIGH_WATER)
        writer.write(_PREAMBLE.pack(MAGIC, PROTOCOL_VERSION))

    async def send(self, message: Out) -> None:
        """Write one message; waits while the peer is slow. Raises OSError when the peer is gone, FrameError when it can't be written."""
        await self.send_frame(encode(message, self._max_frame))

    async def send_frame(self, frame: bytes | bytearray) -> None:
        """Write what `encode` gave; waits while the peer is slow. Raises OSError when the peer is gone."""
        async with self._sending:
            rest = memoryview(frame)
            try:
                while rest:  # in parts: what the transport can't send at once it copies
                    part, rest = rest[:HIGH_WATER], rest[HIGH_WATER:]
                    self._writer.write(part)
                    await self._writer.drain()
            except asyncio.CancelledError:
                self._writer.write(rest)  # a frame that has begun goes out
                raise

    async def receive(self) -> In | None:
        """The next message; None when the peer has closed its end (a message cut short is lost with it). Raises WireError."""
        try:
            if not self._greeted:
                await self._greet()
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > self._max_frame:
                raise WireError(f"a frame of {length} bytes is over the limit of {self._max_frame}")
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError):
            return None
        try:
            return self._decoder.decode(payload)
        except msgspec.DecodeError as error:
            raise WireError(f"a message that is none of the expected types: {error}") from None

    async def _greet(self) -> None:
        magic, version = _PREAMBLE.unpack(await self._reader.readexactly(_PREAMBLE.size))
        if magic != MAGIC:
            raise WireError("the peer does not speak this protocol")
        if version != PROTOCOL_VERSION:
            raise WireError(
                f"the peer speaks version {version} of the protocol, this process version {PROTOCOL_VERSION}: "
                "front and engine come from two installations of Tokenbus"
            )
        self._greeted = True

    async def __aiter__(self) -> AsyncIterator[In]:
        while (message := await self.receive()) is not None:
            yield message

    def close(self) -> None:
        """Idempotent; unsent bytes are still tried for a moment."""
        self._writer.close()

    def abort(self) -> None:
        """Close at once, unsent bytes are lost. Idempotent."""
        self._writer.transport.abort()


async def open_channel(sock: socket.socket, receives: Any, *, max_frame: int = MAX_FRAME) -> Channel[Any, Any]:
    """A channel over one end of a socket pair, which it then owns."""
    sock.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=sock, limit=HIGH_WATER)
    return Channel(reader, writer, receives, max_frame=max_frame)
