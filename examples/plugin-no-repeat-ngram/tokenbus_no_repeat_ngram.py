"""A logits processor with a request field of its own: `no_repeat_ngram_size: 3` bans every token that would end a run of three tokens
which the prompt or the answer has already.

    pip install ./examples/plugin-no-repeat-ngram
    tokenbus serve --enable no_repeat_ngram
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tokenbus import Plugin, PluginInfo, StashKey, hookimpl
from tokenbus.core.errors import FieldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tokenbus.core.worker.state import SampleRow, WorkerRequestState

FIELD = "no_repeat_ngram_size"


class Ngrams:
    """Which tokens followed each run of `size - 1` tokens, among the first `length` tokens of a sequence."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.length = 0
        self._after: dict[tuple[int, ...], set[int]] = {}

    def learn(self, tokens: Sequence[int]) -> None:
        """The sequence has grown: `tokens` is all of it."""
        for i in range(max(self.length, self.size - 1), len(tokens)):
            self._after.setdefault(tuple(tokens[i - self.size + 1 : i]), set()).add(tokens[i])
        self.length = len(tokens)

    def banned(self, tokens: Sequence[int]) -> set[int]:
        """What may not follow `tokens`, which begin with those learnt and may go on with guesses."""
        size = self.size
        end = tuple(tokens[len(tokens) - size + 1 :])
        guessed = range(max(self.length, size - 1), len(tokens))
        return self._after.get(end, set()) | {tokens[i] for i in guessed if tuple(tokens[i - size + 1 : i]) == end}


SEEN: StashKey[Ngrams] = StashKey("no_repeat_ngram")


class NoRepeatNgramSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_size: int = 32
    """Largest size that a request may ask for."""


class NoRepeatNgram(Plugin):
    info = PluginInfo(
        name="no_repeat_ngram",
        summary="no n-gram comes twice (an example)",
        scope="request",
        lossless=False,
        claims={FIELD},
        api_version=(1, 1),
    )
    Settings = NoRepeatNgramSettings

    @hookimpl
    def check_fields(self, fields: dict[str, Any]) -> dict[str, Any] | None:
        size = fields[FIELD]
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= self.settings.max_size:
            raise FieldError(FIELD, f"must be a whole number from 0 (off) to {self.settings.max_size}, got {size!r}")
        return None if size else {}

    @hookimpl
    def worker_request_added(self, request: WorkerRequestState) -> None:
        request.stash[SEEN] = Ngrams(request.fields[FIELD])

    @hookimpl
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for i, row in enumerate(rows):
            seen, tokens = row.request.stash[SEEN], row.tokens
            if row.drafts == 0:  # behind drafts, which may turn out wrong, nothing is learnt
                seen.learn(tokens)
            if len(tokens) >= seen.size - 1 and (banned := seen.banned(tokens)):
                logits[i, list(banned)] = float("-inf")
