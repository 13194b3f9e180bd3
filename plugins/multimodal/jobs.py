"""What is said between the front and the processes that decode and process: a `Job` in, `Begun` and `Done` out, over a socket of its own.

A frame is four bytes of length (little-endian), then MessagePack.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal

import msgspec

from ...core.media import Kind, MediaItem

IN_IDLE_TIME, BESIDE_OTHERS = b"i", b"b"
"""What is sent with a job's socket: whether it may take only CPU time that nobody else wants, where the system can do so."""
MAX_FRAME = 1 << 30
"""Bytes; the settings' limits are far below."""


class Hello(msgspec.Struct, frozen=True):
    """To the process that makes the others: which model."""

    folder: str
    config: dict[str, Any]
    memory_mb: int
    cpu_seconds: float
    wall_seconds: float


class Ready(msgspec.Struct, frozen=True):
    error: str | None = None
    """Why media can't be processed for this model; the process then ends."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    form: Literal["file", "base64", "pixels", "samples"]
    """Of `data`: a file; a file in base64 (bytes of ASCII); RGB, row by row; float32, sample by sample, channels side by side."""
    data: bytes
    shape: tuple[int, ...] = ()
    """pixels: (height, width). samples: (samples, channels, rate)."""
    origin: str = ""
    """pixels: what it was."""
    declared: str | None = None
    """audio: the format it has to have."""
    max_bytes: int
    max_pixels: int
    max_seconds: float


class Begun(msgspec.Struct, frozen=True):
    pid: int


class Done(msgspec.Struct, frozen=True, kw_only=True):
    refused: str | None = None
    """What is wrong with the client's file."""
    fault: str | None = None
    """What went wrong here."""
    item: MediaItem | None = None
    text: str = ""
    rows: int = 0


def send(sock: socket.socket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sock.sendall(struct.pack("<I", len(body)))
    sock.sendall(body)


def receive(sock: socket.socket, kind: Any) -> Any:
    """EOFError when the peer has closed; TimeoutError by the socket's own limit."""
    (size,) = struct.unpack("<I", _exactly(sock, 4))
    if size > MAX_FRAME:
        raise EOFError
    return msgspec.msgpack.decode(_exactly(sock, size), type=kind)


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data
