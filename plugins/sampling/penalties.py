"""Repetition, presence and frequency penalties."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.contexts import AdmissionContext
from ...core.plugin import Plugin, PluginInfo, StashKey, hookimpl
from . import checks

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...core.worker.state import SampleRow, WorkerRequestState


class TokenCounts:
    """Which tokens a request has seen, and how often it has generated each. Grows with the request; each token is counted once."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.length = 0
        """Tokens seen so far: prompt, then output."""
        self.ids = array("q")
        """Distinct ids in order of appearance."""
        self.output_counts = array("f")
        """By place in `ids`: times generated; 0 for a token of the prompt only."""
        self._place: dict[int, int] = {}

    def copy(self) -> TokenCounts:
        made = TokenCounts(self.num_prompt)
        made.length, made.ids, made.output_counts = self.length, self.ids[:], self.output_counts[:]
        made._place = dict(self._place)
        return made

    def catch_up(self, tokens: Sequence[int]) -> None:
        """See tokens[self.length:]."""
        for index in range(self.length, len(tokens)):
            token = tokens[index]
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self.ids)
                self.ids.append(token)
                self.output_counts.append(0.0)
            if index >= self.num_prompt:
                self.output_counts[place] += 1.0
        self.length = max(self.length, len(tokens))


LEAST_REPETITION = 0.01
"""With much less a logit leaves float32's range."""

STATE = StashKey[TokenCounts]("sampling.penalties")


class Penalties(Plugin):
    """repetition_penalty r, 0.01 to 100: positive logits of tokens in prompt or output are divided by r, negative ones multiplied
    (Keskar et al. 2019). Then, for tokens of the output: logit -= presence_penalty + count * frequency_penalty.

    Runs before logit_bias. Its state is rebuilt from the tokens after a preemption.
    """

    info = PluginInfo(
        name="sampling.penalties",
        summary="repetition_penalty, presence_penalty, frequency_penalty",
        scope="step",
        lossless=False,
        claims={"repetition_penalty", "presence_penalty", "frequency_penalty"},
        default=True,
    )

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        if "repetition_penalty" in fields:
            value = checks.number("repetition_penalty", fields["repetition_penalty"], LEAST_REPETITION, 100)
            if value != 1:
                checked["repetition_penalty"] = value
        for name in ("presence_penalty", "frequency_penalty"):
            if name in fields and (value := checks.number(name, fields[name], -2, 2)) != 0:
                checked[name] = value
        return checked

    @hookimpl
    def worker_request_added(self, request: WorkerRequestState) -> None:
        counts = request.stash[STATE] = TokenCounts(request.num_prompt_tokens)
        counts.catch_up(request.tokens)

    @hookimpl(tryfirst=True)
    def adjust_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for row, values in zip(rows, logits.numpy(), strict=True):
            penalise(values, self._counts(row), row.request.fields)

    def _counts(self, row: SampleRow) -> TokenCounts:
        counts, tokens = row.request.stash[STATE], row.tokens
        if row.position - row.drafts < counts.length:  # a row before tokens that were already seen
            counts = TokenCounts(row.request.num_prompt_tokens)
        elif row.drafts:
            counts.catch_up(tokens[: row.position - row.drafts])
            counts = counts.copy()
        counts.catch_up(tokens)
        return counts


def penalise(row: np.ndarray, counts: TokenCounts, fields: dict[str, Any]) -> None:
    """Change a float32 row in place."""
    import numpy as np

    ids = np.frombuffer(counts.ids, dtype=np.int64)
    times = np.frombuffer(counts.output_counts, dtype=np.float32)
    values = row[ids]
    repetition = np.float32(fields.get("repetition_penalty", 1.0))
    if repetition != 1:
        values = np.where(values > 0, values / repetition, values * repetition)
    presence, frequency = fields.get("presence_penalty", 0.0), fields.get("frequency_penalty", 0.0)
    if presence or frequency:
        values -= np.float32(frequency) * times + np.float32(presence) * (times > 0)
    row[ids] = values
