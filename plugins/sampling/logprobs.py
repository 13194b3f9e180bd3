"""Logprobs of sampled tokens and of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...core.contexts import AdmissionContext
from ...core.plan import TokenLogprobs
from ...core.plugin import Plugin, PluginInfo, hookimpl
from . import checks

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...core.request import Request
    from ...core.worker.state import SampleRow


class LogprobsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["raw", "processed"] = "raw"
    """raw: log-softmax of the model's logits, whatever temperature, penalties and filters do. processed: of what was sampled from, without
    the alternatives that were banned; prompt tokens are always raw."""


class Logprobs(Plugin):
    """Fields: `logprobs` and `prompt_logprobs`, the number of most likely alternatives to list; 0 gives the token's own logprob alone.

    Alternatives are sorted by falling logprob, ties by rising id; the token's rank is its place in that order. Differs from a float64
    log-softmax of the same logits by less than 1e-5.
    """

    info = PluginInfo(
        name="sampling.logprobs",
        summary="logprobs, prompt_logprobs",
        scope="step",
        lossless=True,
        claims={"logprobs", "prompt_logprobs"},
        default=True,
    )
    Settings = LogprobsSettings

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        limit = request.limits.max_logprobs
        return {
            name: checks.integer(name, fields[name], 0, limit, what="the server's limit")
            for name in ("logprobs", "prompt_logprobs")
            if name in fields
        }

    @hookimpl
    def wants_prompt_logits(self, request: Request) -> bool | None:
        return True if "prompt_logprobs" in request.fields else None

    @hookimpl
    def token_logprobs(
        self, raw: torch.Tensor, processed: torch.Tensor | None, rows: Sequence[SampleRow], token_ids: Sequence[int]
    ) -> list[TokenLogprobs | None]:
        source = raw if processed is None or self.settings.mode == "raw" else processed
        return [
            None if (wanted := row.request.fields.get(_field(row))) is None else describe(values, token, wanted)
            for row, values, token in zip(rows, source.numpy(), token_ids, strict=True)
        ]


def _field(row: SampleRow) -> str:
    return "prompt_logprobs" if row.is_prompt else "logprobs"


def describe(row: np.ndarray, token: int, wanted: int) -> TokenLogprobs:
    """The entry of one position. row: float32, finite at least once; ids at -inf are not listed."""
    import numpy as np

    from . import rows

    total = rows.log_sum_exp(row)
    ids = rows.largest(row, wanted) if wanted else np.empty(0, dtype=np.int64)
    value = row[token]
    rank = 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token] == value))
    return TokenLogprobs(
        token_id=token,
        logprob=max(float(value) - total, LOWEST),
        rank=rank,
        top_ids=ids.tolist(),
        top_logprobs=(row[ids].astype(np.float64) - total).tolist(),
    )


LOWEST = -9999.0
"""What a token at -inf gets (a prompt token that the model rules out): JSON has no infinity."""
