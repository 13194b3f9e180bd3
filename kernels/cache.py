"""The cache folder: where it is, and how several processes fill it without stepping on each other."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """$TOKENBUS_CACHE, else $XDG_CACHE_HOME/tokenbus, else ~/.cache/tokenbus. Not created."""
    if own := os.environ.get("TOKENBUS_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "tokenbus"
    return Path.home() / ".cache" / "tokenbus"


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold an exclusive lock on `target` (a name beside it, `.NAME.lock`) among all processes; its folder is created.

    The lock goes with the process: a holder that dies leaves none behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{target.name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """A path to write a file or a folder to; it becomes `target`, in one rename, when the block ends without an error.

    A reader sees all of it or nothing. Whatever was at `target` before is replaced."""
    target.parent.mkdir(parents=True, exist_ok=True)
    workshop = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        draft = workshop / target.name
        yield draft
        if target.is_dir():
            target.rename(workshop / "old")
        draft.replace(target)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
