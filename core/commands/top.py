"""`tokenbus top`: what a running server does, in the terminal, four times a second. Ctrl-C ends it.

`--once`, or standard output that is no terminal: one look of about a second, as plain text.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from typing import NoReturn

from ..config import Config
from ..errors import NotFoundError, UnavailableError
from ..watching.remote import Remote, connect
from ..watching.screen import Screen

LOOK_SECONDS = 1.2
"""Of one look: long enough for a frame with everything in it, and some steps."""
LONGEST_LOOK = 10.0
FEATURES_SECONDS = 5.0
RETRY_SECONDS = 2.0
OPEN, CLOSE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""The terminal's other screen without a cursor, and back."""


def run(arguments: argparse.Namespace, config: Config) -> int:
    remote = connect(arguments, config)
    if arguments.once or not sys.stdout.isatty():
        return once(remote)
    sys.stdout.write(OPEN)
    try:
        watch(remote, Screen(colour="NO_COLOR" not in os.environ))
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(CLOSE)
        sys.stdout.flush()


def once(remote: Remote) -> int:
    """Raises what `Remote` raises."""
    screen = Screen()
    screen.features = remote.get("/v1/tokenbus/features")
    began = time.monotonic()
    with contextlib.closing(remote.frames()) as frames:
        for frame in frames:
            screen.take(frame)
            seen, facts = time.monotonic() - began, screen.facts
            if seen >= LOOK_SECONDS and ((facts.slow and facts.engine) or facts.server.get("doubt") or seen >= LONGEST_LOOK):
                break
    size = shutil.get_terminal_size((120, 40))
    sys.stdout.write("\n".join(screen.lines(size.columns, max(size.lines, 40))) + "\n")
    return 0


def watch(remote: Remote, screen: Screen) -> NoReturn:
    """For ever: a server that is gone is tried again. ConflictError when it refuses, because of the admin key, say."""
    while True:
        try:
            screen.problem, asked = "", 0.0
            with contextlib.closing(remote.frames()) as frames:
                for frame in frames:
                    screen.take(frame)
                    if time.monotonic() - asked >= FEATURES_SECONDS:
                        asked = time.monotonic()
                        screen.features = remote.get("/v1/tokenbus/features")
                    show(screen)
            screen.problem = "the server has ended the stream"
        except (UnavailableError, NotFoundError) as error:
            screen.problem = error.message
        show(screen)
        time.sleep(RETRY_SECONDS)


def show(screen: Screen) -> None:
    size = shutil.get_terminal_size()
    lines = screen.lines(size.columns, size.lines)
    sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in lines[:-1]) + f"{lines[-1]}\x1b[K\x1b[J")
    sys.stdout.flush()
