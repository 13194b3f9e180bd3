"""top_k, top_p and min_p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.contexts import AdmissionContext
from ...core.plugin import Plugin, PluginInfo, hookimpl
from . import checks

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...core.worker.state import FusedFilters, SampleRow, WorkerRequestState

BINS_PER_LOGIT = 8
LAST_BIN = 255
"""Holds everything from 32 logits below the maximum down."""
NEAR = 4.0
MANY = 1024
"""When the tokens less than NEAR logits below the maximum are not MANY, they are tried first. Changes the cost, not the meaning."""


class Truncation(Plugin):
    """Samples from a part of the distribution that stands after temperature. In this order, each on what the one before left,
    renormalised:

        top_k    the k most likely tokens; 0 or -1: all
        top_p    the shortest run of most likely tokens whose probabilities sum to at least top_p (at least one token)
        min_p    tokens at least min_p times as likely as the most likely one

    Of equally likely tokens the one with the lower id counts as more likely.
    """

    info = PluginInfo(
        name="sampling.truncation",
        summary="top_k, top_p, min_p",
        scope="step",
        lossless=False,
        claims={"top_k", "top_p", "min_p"},
        default=True,
    )

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        checked: dict[str, Any] = {}
        if "top_k" in fields and (k := checks.integer("top_k", fields["top_k"], -1)) > 0:
            checked["top_k"] = min(k, request.vocab_size)
        if "top_p" in fields and (p := checks.number("top_p", fields["top_p"], 0, 1)) < 1:
            checked["top_p"] = p
        if "min_p" in fields and (m := checks.number("min_p", fields["min_p"], 0, 1)) > 0:
            checked["min_p"] = m
        return checked

    @hookimpl
    def filter_logits(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
        for row, values in zip(rows, logits.numpy(), strict=True):
            fields = row.request.fields
            kept = keep(values, fields.get("top_k", 0), fields.get("top_p", 1.0), fields.get("min_p", 0.0))
            survivors = values[kept]
            values.fill(-math.inf)
            values[kept] = survivors

    @hookimpl
    def fused_filters(self, request: WorkerRequestState) -> FusedFilters:
        from ...core.worker.state import FusedFilters

        fields = request.fields
        return FusedFilters(fields.get("top_k", 0), fields.get("top_p", 1.0), fields.get("min_p", 0.0))


def keep(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Ids that survive, in no promised order. row: float32, at least one finite value."""
    import numpy as np

    from . import rows

    floor = row.max() + math.log(min_p) if min_p > 0 else -math.inf
    if 0 < top_k < len(row):
        ids = rows.largest(row, top_k)
        if top_p < 1:
            weights = np.exp(row[ids] - row[ids[0]])
            ids = ids[: _nucleus(weights, top_p * float(weights.sum(dtype=np.float64)))]
    elif top_p < 1:
        ids = _top_p(row, top_p)
    else:
        return np.flatnonzero((row >= floor) & (row > -np.inf))
    return ids[row[ids] >= floor]


def _top_p(row: np.ndarray, top_p: float) -> np.ndarray:
    """Often a few tokens hold it all: NEAR first. Else sums probabilities by distance from the maximum, in bins of 1 / BINS_PER_LOGIT, and
    sorts only the bin on the border."""
    import numpy as np

    from . import rows

    below = row.max() - row
    weights = np.exp(-below)
    target = top_p * float(weights.sum(dtype=np.float64))
    near = np.flatnonzero(below <= NEAR)
    if len(near) <= MANY and float(weights[near].sum(dtype=np.float64)) > target:
        ids = rows.descending(row, near)
        return ids[: _nucleus(weights[ids], target)]
    bins = np.minimum(below * BINS_PER_LOGIT, LAST_BIN).astype(np.uint8)
    held = np.cumsum(np.bincount(bins, weights=weights, minlength=LAST_BIN + 1))
    border = int(np.searchsorted(held, target, side="left").clip(0, LAST_BIN))
    ids = rows.descending(row, np.flatnonzero((bins == border) & (row > -np.inf)))
    count = _nucleus(weights[ids], target - (held[border - 1] if border else 0.0))
    return np.concatenate([np.flatnonzero(bins < border), ids[:count]])


def _nucleus(weights: np.ndarray, target: float) -> int:
    """How many of the `weights` (at least one) it takes to hold `target`; all of them if they don't."""
    import numpy as np

    return min(int(np.searchsorted(np.cumsum(weights, dtype=np.float64), target, side="left")) + 1, len(weights))
