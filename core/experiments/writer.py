"""Rows and events on disk. Lossless and bounded: room for a row is reserved before its request is admitted, and what can't be written
waits, so that a full disk keeps requests out of the experiment, not rows out of the file.

A server always begins a new file: a line that a crash has cut off is the last of its file.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path

import msgspec
import structlog

from .records import Event, Row, record_files

log = structlog.get_logger(__name__)

FILE_BYTES = 64 * 1024 * 1024
"""A file that has reached this is followed by another."""


class RowWriter:
    """Of one experiment. All but `write` is the event loop's; `write` is for another thread, one at a time."""

    def __init__(self, folder: Path, most_pending: int, file_bytes: int = FILE_BYTES) -> None:
        """Raises OSError when the folder can't be made. most_pending: rows reserved or waiting, at most."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._most = most_pending
        self._file_bytes = file_bytes
        self._reserved = 0
        self._waiting: list[bytes] = []
        self._taken: list[bytes] = []
        self._file: FileIO | None = None
        self._size = 0
        """Of what stands whole in the file."""
        self.written = 0
        """Rows, since this server began."""
        self.bytes = sum(path.stat().st_size for path in record_files(folder))
        """Of all files."""
        self.problem = ""
        """Why the last attempt to write failed; "" when it did not."""

    @property
    def pending(self) -> int:
        return self._reserved + len(self._waiting) + len(self._taken)

    @property
    def waiting(self) -> bool:
        return bool(self._waiting or self._taken)

    def reserve(self, rows: int) -> bool:
        """Room for rows to come; False: there is none, and nothing was reserved."""
        if self.pending + rows > self._most:
            return False
        self._reserved += rows
        return True

    def give_back(self, rows: int) -> None:
        """Of rows that don't come after all."""
        self._reserved -= rows

    def put(self, row: Row) -> None:
        """A row that was reserved."""
        self._reserved -= 1
        self._waiting.append(msgspec.json.encode(row) + b"\n")

    def take(self) -> list[bytes]:
        """What `write` is to write; `settle` comes after it, before the next `take`."""
        self._taken, self._waiting = self._taken + self._waiting, []
        return self._taken

    def settle(self, error: OSError | None) -> None:
        """How `write` went. A failure is logged once and kept in `problem`; what was not written goes on waiting."""
        if error is None:
            self.written += len(self._taken)
            self.bytes += sum(map(len, self._taken))
            self._taken, self.problem = [], ""
            return
        if not self.problem:
            log.error("experiment_rows_not_written", folder=str(self._folder), waiting=self.pending, error=str(error))
        self.problem = str(error)

    def write(self, lines: list[bytes]) -> OSError | None:
        """All or none: what a failed attempt has left behind is cut off before the next. Blocking."""
        data = b"".join(lines)
        try:
            if self._file is None or self._size >= self._file_bytes:
                self.close()
                self._file, self._size = self._next_path().open("xb", buffering=0), 0
            self._file.truncate(self._size)
            self._file.seek(self._size)
            written = self._file.write(data)
        except OSError as error:
            return error
        if written != len(data):
            return OSError(errno.ENOSPC, "only a part could be written")
        self._size += len(data)
        return None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next_path(self) -> Path:
        last = max((int(path.stem.removeprefix("records-")) for path in record_files(self._folder)), default=0)
        return self._folder / f"records-{last + 1:06d}.jsonl"


def write_event(folder: Path, event: Event) -> None:
    """One line, at once. Raises OSError."""
    with (folder / "events.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(event) + b"\n")


def replace_file(path: Path, data: bytes) -> None:
    """The whole of a small file, or nothing of it, whatever happens meanwhile. Raises OSError."""
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
