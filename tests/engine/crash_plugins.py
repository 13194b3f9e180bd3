"""Plugins of the tests that have engines die; loaded by "crash_plugins:Class"."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any, ClassVar

from tokenbus.core.plugin import Plugin, PluginInfo, StashKey, hookimpl

TOTAL: StashKey[tuple[int, int]] = StashKey("total")


class Poison(Plugin):
    """`poison: n` kills the engine, as a crash in native code would, when the token after n new ones is to be drawn."""

    info: ClassVar[PluginInfo] = PluginInfo(
        name="poison", summary="a test's", scope="request", lossless=False, claims={"poison"}
    )

    @hookimpl
    def adjust_logits(self, rows: Sequence[Any]) -> None:
        for row in rows:
            if row.position - row.request.num_prompt_tokens == row.request.fields["poison"]:
                os.kill(os.getpid(), signal.SIGKILL)


class Rival(Plugin):
    """Requests with `rival: true` kill the engine as soon as two of them draw a token in one step."""

    info: ClassVar[PluginInfo] = PluginInfo(name="rival", summary="a test's", scope="request", lossless=False, claims={"rival"})

    @hookimpl
    def adjust_logits(self, rows: Sequence[Any]) -> None:
        if len({row.request.request_id for row in rows}) > 1:
            os.kill(os.getpid(), signal.SIGKILL)


class Tally(Plugin):
    """`tally: true` lifts one logit by what its state says, which is built from all tokens so far, and kept up to date."""

    info: ClassVar[PluginInfo] = PluginInfo(name="tally", summary="a test's", scope="request", lossless=False, claims={"tally"})

    @hookimpl
    def worker_request_added(self, request: Any) -> None:
        request.stash[TOTAL] = len(request.tokens), sum(request.tokens)

    @hookimpl
    def adjust_logits(self, logits: Any, rows: Sequence[Any]) -> None:
        for i, row in enumerate(rows):
            seen, total = row.request.stash[TOTAL]
            known = len(row.tokens) - row.drafts
            total += sum(row.tokens[seen:known])
            row.request.stash[TOTAL] = known, total
            logits[i, (total + sum(row.tokens[known:])) % logits.shape[1]] += 2.0


class Forgetful(Tally):
    """The same, but it says that it can't be rebuilt."""

    info: ClassVar[PluginInfo] = PluginInfo(
        name="forgetful", summary="a test's", scope="request", lossless=False, claims={"forget"}, resumable=False
    )
