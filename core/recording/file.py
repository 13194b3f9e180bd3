"""Recordings on disk: a magic line, then blocks of compressed frames.

    TOKENBUS-RECORDING 1\\n
    length (uint32, little-endian)   CRC-32 of the payload (uint32)   payload: zlib over (length, MessagePack) of each frame
    ...

The first block holds the header alone. A block is written with one call, so a process that dies leaves at most the last one torn: a reader
skips it with a notice. Damage anywhere else is an error. Files are readable by their owner only.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ..errors import RecordingError
from .frames import FORMAT, Frame, Header

MAGIC = b"TOKENBUS-RECORDING 1\n"
SUFFIX = ".tbrec"
BLOCK_BYTES = 256 * 1024
"""Of frames before compression, after which a block is written."""
MOST_BYTES = 256 * 1024 * 1024
"""A block that says it becomes larger than this is damaged."""
LEVEL = 3
"""Of zlib's compression."""

_BLOCK = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


class RecordingWriter:
    """One part. Not thread-safe. Raises OSError as the disk does."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.size = 0
        """Bytes on disk."""
        self._encoder = msgspec.msgpack.Encoder()
        self._frames = bytearray()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._file: BinaryIO = os.fdopen(handle, "wb", buffering=0)
        self._put(MAGIC)
        self._add(header)
        self.flush()

    def write(self, frame: Frame) -> None:
        self._add(frame)
        if len(self._frames) >= BLOCK_BYTES:
            self.flush()

    def _add(self, frame: Frame | Header) -> None:
        data = self._encoder.encode(frame)
        self._frames += _LENGTH.pack(len(data)) + data

    def flush(self) -> None:
        """Hand what was written to the operating system: from here on only its crash loses it."""
        if not self._frames:
            return
        payload = zlib.compress(bytes(self._frames), LEVEL)
        self._frames.clear()
        self._put(_BLOCK.pack(len(payload), zlib.crc32(payload)) + payload)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self.size += len(data)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


class RecordingFile:
    """One part, read block by block. Raises RecordingError when it is none, or of another format, or damaged; OSError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notices: list[str] = []
        """What a reader should know: a torn end. Complete once all frames were read."""
        self.header = self._header()

    def _header(self) -> Header:
        for data in self._raw():
            try:
                format_ = msgspec.msgpack.decode(data, type=_OnlyFormat).format
                if format_ != FORMAT:
                    raise RecordingError(f"{self.path}: recording format {format_}; this Tokenbus reads format {FORMAT}")
                return msgspec.msgpack.decode(data, type=Header)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RecordingError(f"{self.path}: the header can't be read: {error}") from None
        raise RecordingError(f"{self.path}: a recording without a header: nothing was written before its process ended")

    def __iter__(self) -> Iterator[Frame]:
        """All frames but the header."""
        decoder = msgspec.msgpack.Decoder(Frame)
        self.notices.clear()
        frames = self._raw()
        next(frames)
        for data in frames:
            try:
                yield decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise RecordingError(f"{self.path}: a frame can't be read: {error}") from None

    def _raw(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(
                    f"{self.path} is not a recording of this format (it does not begin with {MAGIC[:-1].decode()!r})"
                )
            total = os.fstat(file.fileno()).st_size
            while (begin := file.tell()) < total:
                payload = self._payload(file, begin, total)
                if payload is None:
                    self.notices.append(
                        f"{self.path.name}: the last block, from byte {begin} to the end at {total}, is torn: skipped"
                    )
                    return
                yield from self._frames(payload, begin)

    def _payload(self, file: BinaryIO, begin: int, total: int) -> bytes | None:
        """None: the block is the last one, and torn."""
        head = file.read(_BLOCK.size)
        if len(head) < _BLOCK.size:
            return None
        length, crc = _BLOCK.unpack(head)
        end = begin + _BLOCK.size + length
        if end > total:
            return None
        payload = file.read(length)
        if zlib.crc32(payload) == crc:
            return payload
        if end == total:
            return None
        raise RecordingError(f"{self.path}: the block at byte {begin} is damaged")

    def _frames(self, payload: bytes, begin: int) -> list[bytes]:
        stream = zlib.decompressobj()
        try:
            data = stream.decompress(payload, MOST_BYTES)
        except zlib.error as error:
            raise RecordingError(f"{self.path}: the block at byte {begin} can't be decompressed: {error}") from None
        place, frames = 0, []
        while place + _LENGTH.size <= len(data):
            (length,) = _LENGTH.unpack_from(data, place)
            place += _LENGTH.size + length
            frames.append(data[place - length : place])
        if place != len(data) or not stream.eof:
            raise RecordingError(f"{self.path}: the block at byte {begin} does not end with a frame")
        return frames


class _OnlyFormat(msgspec.Struct):
    format: int = 0
