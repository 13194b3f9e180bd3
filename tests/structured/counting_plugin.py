"""A plugin with state of its own for each request, loaded by "counting_plugin:Counting"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from tokenbus.core.plugin import Plugin, PluginInfo, StashKey, hookimpl

SEEN: StashKey[list[int]] = StashKey("seen")


class Counting(Plugin):
    """`counting: true` keeps the tokens it has been shown, one more each time, and lifts the one that has been the rarest so far. It raises
    when it is shown anything but the next token, so also when a part of a prompt counts as one."""

    info: ClassVar[PluginInfo] = PluginInfo(
        name="counting", summary="a test's", scope="request", lossless=False, claims={"counting"}
    )

    @hookimpl
    def worker_request_added(self, request: Any) -> None:
        request.stash[SEEN] = request.tokens[:-1]

    @hookimpl
    def adjust_logits(self, logits: Any, rows: Sequence[Any]) -> None:
        for i, row in enumerate(rows):
            seen = row.request.stash[SEEN]
            if row.tokens[:-1] != seen or row.position != len(seen) + 1:
                raise ValueError(f"{len(seen)} tokens were seen, now there are {len(row.tokens)}")
            seen.append(row.tokens[-1])
            first = row.request.num_prompt_tokens
            output = seen[first:]
            if output:
                logits[i, min(output, key=output.count)] += 9.0
