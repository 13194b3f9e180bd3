"""Ends this process when the one that started it is gone: from a thread, so that neither a computing step nor a blocked loop delays it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0
"""How long the event loop has to end by itself before the process is ended under it."""
EXIT_ORPHANED = 70


def watch_parent(fd: int) -> None:
    """Start the thread. fd: this process's end of the socket pair whose other end only the parent holds.

    The parent is gone when the other end is closed (also when this process has unread data), or when this process got another parent.
    """
    parent = os.getppid()
    threading.Thread(target=_watch, args=(fd, parent), name="watchdog", daemon=True).start()


def _watch(fd: int, parent: int) -> None:
    hung_up = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
    poller = select.poll()
    poller.register(fd, hung_up)
    while os.getppid() == parent and not any(event & hung_up for _, event in poller.poll(POLL_SECONDS * 1000)):
        pass
    time.sleep(GRACE_SECONDS)
    print("tokenbus: the front process is gone, the engine ends", file=sys.stderr, flush=True)  # noqa: T201 - the logger may be locked
    end_group()


def end_group() -> None:
    """End this process and, when it leads a process group, everything in it."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(EXIT_ORPHANED)
