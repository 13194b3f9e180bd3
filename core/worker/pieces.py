"""An encoder that is stopped in the middle and goes on later: it runs on a thread of its own, while the worker's waits.

    worker's thread   go_on(seconds) ──waits──────────────────┐ <── None (paused), or the rows
    encoder's thread        └──> encode ... pause() ... pause(): time is up ──> waits for the next go_on

Only one of the two ever runs. What the encoder computes is the same as in one piece. An item that nobody goes on with for `KEPT_SECONDS`
is given up, with all that the encoder has in memory of it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..media import MediaItem
    from ..models.media import Encoded, MediaEncoder

KEPT_SECONDS = 30.0


class _GivenUpError(BaseException):
    """Raised in the encoder: its item is wanted no more."""


class _ExpiredError(_GivenUpError):
    """The same, and nobody waits for the encoder to end."""


class Pieces:
    """For one encoder, one item at a time. All methods are called from the worker's thread."""

    def __init__(self, encoder: MediaEncoder) -> None:
        self._encoder = encoder
        encoder.pause = self._pause
        self._thread = _Thread()
        weakref.finalize(self, self._thread.end)
        self._item: MediaItem | None = None
        self._begun = self._giving_up = False
        self._until = 0.0
        self._outcome: Encoded | BaseException | None = None
        """Of the item: there once the encoder has ended."""

    @property
    def digest(self) -> str | None:
        """Of the item that is under way."""
        if self._begun and not self._thread.paused:  # nobody went on with it for too long
            self._forget()
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
        if not self._thread.run(self._encode, resume=self._begun):
            self._thread.run(self._encode, resume=False)  # from the beginning
        self._begun, outcome = True, self._outcome
        if outcome is None:
            return None
        self._forget()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def take_cpu_seconds(self) -> float:
        """CPU time of the encoder's thread since this was last asked."""
        seconds, self._thread.cpu_seconds = self._thread.cpu_seconds, 0.0
        return seconds

    def close(self) -> None:
        """End the thread."""
        self._give_up()
        self._thread.end()

    def _give_up(self) -> None:
        if self._begun:
            self._giving_up = True
            self._thread.run(self._encode, resume=True)
        self._forget()

    def _forget(self) -> None:
        self._item, self._outcome, self._begun, self._giving_up = None, None, False, False

    # ---- on the encoder's thread ------------------------------------------------------------------------------------------------

    def _encode(self) -> None:
        assert self._item is not None
        try:
            self._outcome = self._encoder.encode(self._item)
        except _ExpiredError:
            raise
        except BaseException as error:
            self._outcome = error

    def _pause(self) -> None:
        if not self._thread.here or (time.perf_counter() < self._until and not self._giving_up):
            return  # in one piece, on the worker's own thread; or there is time left
        self._thread.pause()
        if self._giving_up:
            raise _GivenUpError


class _Thread:
    """Does a job at a time, in turns with the thread that calls `run`. Started when it is first needed."""

    def __init__(self) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._job: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._state: Literal["idle", "runs", "paused"] = "idle"
        self.cpu_seconds = self._mark = 0.0

    @property
    def paused(self) -> bool:
        return self._state == "paused"

    def run(self, job: Callable[[], None], *, resume: bool) -> bool:
        """Begin a job, or have the one that is paused go on; comes back when it ends, or pauses. False, and nothing done: the paused one is
        no more. Raises RuntimeError when no thread can be had."""
        with self._lock:
            if resume and self._state != "paused":
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name="encoder", daemon=True)
                thread.start()
                self._thread = thread
            if not resume:
                self._job = job
            self._state = "runs"
            self._go.release()
        self._back.acquire()
        return True

    def end(self) -> None:
        """Once its job is done. Nothing happens when it was never started."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._go.release()
            if thread is not threading.current_thread():
                thread.join()

    @property
    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def pause(self) -> None:
        """On the thread, in a job: until `run` is called again. Raises _ExpiredError when it is not."""
        self._hand_back("paused")
        if not self._go.acquire(timeout=KEPT_SECONDS):
            with self._lock:
                if self._state == "paused":
                    self._state = "idle"
                    raise _ExpiredError
            self._go.acquire()  # `run` came just then
        self._mark = time.thread_time()

    def _loop(self) -> None:
        while True:
            self._go.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            self._mark = time.thread_time()
            try:
                job()
            except _ExpiredError:
                continue
            finally:
                del job  # it holds the encoder
            self._hand_back("idle")

    def _hand_back(self, state: Literal["idle", "paused"]) -> None:
        self.cpu_seconds += time.thread_time() - self._mark
        with self._lock:
            self._state = state
        self._back.release()
