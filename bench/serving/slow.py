"""A plugin for bench/ab.py: some requests wait a while before their prompt is run, so that the tail of TTFT grows by a known amount."""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec

from tokenbus import Plugin, PluginInfo, StashKey, hookimpl

HELD_UNTIL: StashKey[float] = StashKey("bench.slow.until")


class SlowSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    share: float = 0.03
    """Of all requests."""
    seconds: float = 0.0
    """That each of them waits."""


class Slow(Plugin):
    info = PluginInfo(
        name="bench.slow", summary="holds some prompts back (for bench/ab.py)", scope="step", lossless=True, default=False
    )
    Settings = SlowSettings

    def __init__(self, settings: Any, role: Any) -> None:
        super().__init__(settings, role)
        self._draw = random.Random(11)

    @hookimpl
    def request_added(self, request: Any) -> None:
        if self._draw.random() < self.settings.share:
            request.stash[HELD_UNTIL] = time.monotonic() + self.settings.seconds

    @hookimpl
    def limit_chunk(self, request: Any) -> int | None:
        return 0 if time.monotonic() < request.stash.get(HELD_UNTIL, 0.0) else None
