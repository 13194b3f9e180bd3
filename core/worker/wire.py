"""What engine and worker process say to each other, over one Unix socket pair. Blocking: each side has a thread for it.

    frame = uint32 length (big-endian) + msgpack of one tagged struct; one answer to one call, in the order of the calls

Bytes are decoded against these types; nothing is unpickled. The first call is `Load`, which carries the protocol version.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from ..config import Config
from ..errors import ErrorInfo
from ..plan import StepInput, StepResult
from .base import WorkerInfo

VERSION = 1
MAX_FRAME = 1 << 30
"""Bytes; a longer frame means that the peer is broken."""

_LENGTH = struct.Struct(">I")


class Load(msgspec.Struct, frozen=True, tag=True):
    version: int
    config: Config
    features: tuple[str, ...]


class Allocate(msgspec.Struct, frozen=True, tag=True):
    num_blocks: int


class Execute(msgspec.Struct, frozen=True, tag=True):
    order: StepInput


class Close(msgspec.Struct, frozen=True, tag=True):
    pass


Call = Load | Allocate | Execute | Close


class Loaded(msgspec.Struct, frozen=True, tag=True):
    info: WorkerInfo


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Executed(msgspec.Struct, frozen=True, tag=True):
    result: StepResult


class Failed(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


Answer = Loaded | Done | Executed | Failed

_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def send(sock: socket.socket, message: Call | Answer) -> None:
    """Write one frame; OSError when the peer is gone."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a message of {len(payload)} bytes passes the limit of {MAX_FRAME}")
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive_call(sock: socket.socket) -> Call:
    """The next call. EOFError when the peer is gone; msgspec.DecodeError when it isn't one."""
    return _calls.decode(_frame(sock))


def receive_answer(sock: socket.socket) -> Answer:
    return _answers.decode(_frame(sock))


def _frame(sock: socket.socket) -> bytearray:
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    if length > MAX_FRAME:
        raise EOFError(f"a frame of {length} bytes passes the limit of {MAX_FRAME}")
    return _exactly(sock, length)


def _exactly(sock: socket.socket, size: int) -> bytearray:
    data: Any = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        n = sock.recv_into(view[got:])
        if n == 0:
            raise EOFError("the peer closed the connection")
        got += n
    return data
