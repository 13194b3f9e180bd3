"""Weights that were copied out of a mapped file need not stay in this process's memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

DONTNEED = 4
"""MADV_DONTNEED of Linux: drop the pages; the next access finds them in the page cache or reads the file again."""
MAPS = Path("/proc/self/maps")


def release_pages(files: Iterable[Path]) -> int:
    """Drop the pages that are mapped from these files, which nobody has written to. Returns the bytes of address space concerned.

    Elsewhere than on Linux nothing happens, and 0 is returned."""
    wanted = {os.path.realpath(path) for path in files}
    released = 0
    for begin, end in _mappings(wanted):
        if _madvise(begin, end - begin, DONTNEED) == 0:
            released += end - begin
    return released


def _mappings(wanted: set[str]) -> Iterator[tuple[int, int]]:
    try:
        text = MAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return
    for line in text.split("\n"):  # the only end of a line here: others may stand in a path
        place, *rest = line.split(maxsplit=5) or ("",)
        if len(rest) == 5 and rest[4] in wanted:
            begin, _, end = place.partition("-")
            yield int(begin, 16), int(end, 16)


def _madvise(address: int, length: int, advice: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    call.restype = ctypes.c_int
    return call(address, length, advice)
