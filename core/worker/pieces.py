"""An encoder that is stopped in the middle and goes on later: it runs on a thread of its own, while the worker's waits.

    worker's thread   go_on(seconds) ──waits──────────────────┐ <── None (paused), or the rows
    encoder's thread        └──> encode ... pause() ... pause(): time is up ──> waits for the next go_on

Only one of the two ever runs. What the encoder computes is the same as in one piece.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..media import MediaItem
    from ..models.media import Encoded, MediaEncoder


class _GivenUpError(BaseException):
    """Raised in the encoder: nobody wants its item any more."""


class Pieces:
    """For one encoder, one item at a time. All methods are called from the worker's thread."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        encoder.pause = self._pause
        self._item: MediaItem | None = None
        self._thread: threading.Thread | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._until = 0.0
        self._outcome: Encoded | BaseException | None = None
        """Of the item: there once the encoder has ended."""
        self._begun = self._giving_up = False

    @property
    def digest(self) -> str | None:
        """Of the item that is under way."""
        return None if self._item is None else self._item.digest

    def begin(self, item: MediaItem) -> None:
        """Take an item on; the one that is under way is given up."""
        self._give_up()
        self._item = item

    def go_on(self, seconds: float) -> Encoded | None:
        """The rows, when they are done within about this time; else None. Raises what the encoder does; the item is then no longer under
        way, as when it is done."""
        assert self._item is not None, "nothing is under way"
        self._until = time.perf_counter() + seconds
        self._run()
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return None
        self._item, self._begun = None, False
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the thread."""
        self._give_up()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._go.release()
            thread.join()

    def _give_up(self) -> None:
        if self._begun:
            self._giving_up = True
            self._run()
        self._item, self._outcome, self._begun, self._giving_up = None, None, False, False

    def _run(self) -> None:
        """Let the encoder's thread run until it pauses, or has ended its item."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="encoder", daemon=True)
            self._thread.start()
        self._begun = True
        self._go.release()
        self._back.acquire()

    # ---- on the encoder's thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            if self._item is None:
                return
            try:
                self._outcome = self._encoder.encode(self._item)
            except BaseException as error:
                self._outcome = error
            self._back.release()

    def _pause(self) -> None:
        if threading.current_thread() is not self._thread:
            return  # in one piece, on the worker's own
        if time.perf_counter() < self._until and not self._giving_up:
            return
        self._back.release()
        self._go.acquire()
        if self._giving_up:
            raise _GivenUpError
