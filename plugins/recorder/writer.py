"""The recorder's own thread: takes notes, has them written."""

from __future__ import annotations

import copy
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import structlog

from .notes import Joined, Note
from .parts import Parts, make_header

if TYPE_CHECKING:
    from ...core.contexts import EngineContext
    from . import RecorderSettings

log = structlog.get_logger(__name__)

CAPACITY = 16384
"""Notes not yet on disk at which the engine holds new requests."""
MEDIA_CAPACITY = 256 * 1024 * 1024
"""Bytes of pictures and sounds not yet on disk at which it does, too."""
FLUSH_SECONDS = 1.0
"""What a crash may lose."""
SOME = 256
"""Notes taken from the queue at a time."""


def clock() -> float:
    """Seconds, of which only differences count."""
    return time.monotonic()


class WriterThread:
    """`put` and `backlog` are for the engine's loop; everything else runs on the thread, which begins with the first note."""

    def __init__(self, engine: EngineContext, settings: RecorderSettings) -> None:
        self.error: Exception | None = None
        """Why nothing is written any more."""
        self._engine = engine
        folder = Path(settings.path).expanduser().absolute()
        self._settings = msgspec.structs.replace(settings, path=str(folder))
        self._began = clock()
        self._created = time.time()
        self._queue: queue.SimpleQueue[Note | None] = queue.SimpleQueue()
        self._on: tuple[str, ...] = ()
        """Plugins that are on at the first note."""
        self._put = self._done = 0
        """Notes handed over; of those, on disk (or given up)."""
        self._media_put = self._media_done = 0
        """The same in bytes of media that are to be kept."""
        self._thread = threading.Thread(target=self._run, name="tokenbus-recorder", daemon=True)
        self._stopped = False
        self._parts: Parts | None = None

    def now(self) -> float:
        """Seconds since recording began."""
        return clock() - self._began

    def put(self, note: Note | None) -> None:
        if self._stopped:
            return
        if self._put == 0:
            switches = self._engine.switches()
            self._on = () if switches is None else switches.names()
            self._engine = copy.copy(self._engine)  # with the settings that hold now
            self._thread.start()
        self._put += 1
        self._media_put += self._media_bytes(note)
        self._queue.put(note)

    def stop(self) -> None:
        """Write what was noted and end; `backlog` tells when that is done. What is noted from then on is not. Idempotent."""
        if self._put:
            self.put(None)
        self._stopped = True

    def backlog(self) -> float:
        return max((self._put - self._done) / CAPACITY, (self._media_put - self._media_done) / MEDIA_CAPACITY)

    def _media_bytes(self, note: Note | None) -> int:
        """As they come with a request; what is sent again is not written again."""
        return sum(item.size for item in note.admitted.media) if self._settings.media and isinstance(note, Joined) else 0

    def _run(self) -> None:
        taken, media, flushed_at = 0, 0, time.monotonic()
        while True:
            notes, ends = self._take(max(0.0, flushed_at + FLUSH_SECONDS - time.monotonic()))
            taken, media = taken + len(notes) + ends, media + sum(map(self._media_bytes, notes))
            much = taken - self._done >= CAPACITY // 4 or media - self._media_done >= MEDIA_CAPACITY // 4
            flush = ends or time.monotonic() - flushed_at >= FLUSH_SECONDS or much
            try:
                if self.error is None:
                    self._write(notes, flush=flush, close=ends)
            except OSError as error:
                self.error = error
                log.error("recorder_cant_write", folder=self._settings.path, error=str(error))  # noqa: TRY400 - the disk's, not ours
            except Exception as error:
                self.error = error
                log.exception("recorder_failed", folder=self._settings.path)
            if flush or self.error is not None:
                flushed_at, self._done, self._media_done = time.monotonic(), taken, media
            if ends:
                return

    def _take(self, wait: float) -> tuple[list[Note], bool]:
        """The next notes, some at a time; and whether they are the last ones. Waits up to so many seconds for the first."""
        notes: list[Note] = []
        while len(notes) < SOME:
            try:
                note = self._queue.get(timeout=0.0 if notes else wait)
            except queue.Empty:
                return notes, False
            if note is None:
                return notes, True
            notes.append(note)
        return notes, False

    def _write(self, notes: list[Note], *, flush: bool, close: bool) -> None:
        if self._parts is None and notes:
            self._parts = Parts(self._settings, make_header(self._engine, self._settings, self._created, self._on))
        if self._parts is not None:
            for note in notes:
                self._parts.write(note)
            if close:
                self._parts.close()
            elif flush:
                self._parts.flush()
