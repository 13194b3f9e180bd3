"""From logits to token ids: core's part of sampling, and the moments at which plugins take part.

    logits of the model            float32, one row for each token to sample
      adjust_logits hooks          masks, bias, penalties
      temperature                  (logits - max) / temperature; rows below MIN_TEMPERATURE are greedy and skip this and the next
      filter_logits hooks          top-k, top-p, ...
      draw                         greedy: most likely id, ties to the lowest; else Gumbel-max with rng.sample
      token_logprobs hooks

A row's result does not depend, bit by bit, on the other rows: elementwise steps use exactly rounded operations only, whatever reduces or
takes a logarithm runs over one row at a time. Plain numpy on the calling thread: waking other threads for a few rows costs more than it
gains, most of all on a busy machine.

A plugin that raises ends the requests it raises on and no other: hooks work on copies, and after a failure each request's rows are tried
alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import rng
from .errors import RequestError, TokenbusError, WorkerError
from .plan import TokenLogprobs

if TYPE_CHECKING:
    from .host import HookTable, Impl
    from .worker.state import SampleRow

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy."""

Errors = dict[str, TokenbusError]


@dataclass(slots=True)
class Sampled:
    """Outcome of `sample`; a request is in `errors` or its rows have tokens."""

    token_ids: list[int]
    """By row; meaningless for rows of requests in `errors`."""
    logprobs: list[TokenLogprobs | None]
    """By row; None where no plugin gave an entry."""
    errors: Errors = field(default_factory=dict)


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], order: HookTable) -> Sampled:
    """Draw one token for each row.

    logits: float32 [len(rows), vocab_size], contiguous, on the CPU; overwritten. order: the hook table of all loaded plugins: it
    fixes the order of calls; who takes part in which row is decided by `row.request.hooks`.
    """
    errors: Errors = {}
    raw = logits.numpy()
    if (greedy := _plain_greedy(raw, rows)) is not None:
        return greedy
    keep_raw = any(row.request.hooks.token_logprobs for row in rows)
    values = raw.copy() if keep_raw else raw
    tops = _check(values, rows, errors, "the model gave")
    _call_each("adjust_logits", values, rows, order, errors)
    if any(row.request.hooks.adjust_logits for row in rows):
        tops = _check(values, rows, errors, "the request's masks leave", "penalties and biases made")
    _apply_temperature(values, tops, rows, errors)
    _call_each("filter_logits", values, rows, order, errors, lambda row: not is_greedy(row))
    if any(row.request.hooks.filter_logits for row in rows):
        _check(values, rows, errors, "the request's filters leave", "the request's filters made")
    token_ids = [_draw(values[i], row) if row.request.request_id not in errors else -1 for i, row in enumerate(rows)]
    logprobs = _logprobs(raw, values, rows, token_ids, order, errors)
    return Sampled(token_ids, logprobs, errors)


def _plain_greedy(raw: np.ndarray, rows: Sequence[SampleRow]) -> Sampled | None:
    """The short way for rows that are greedy and that no plugin takes part in; None where there are others, or a logit is no number."""
    for row in rows:
        hooks = row.request.hooks
        if not is_greedy(row) or hooks.adjust_logits or hooks.token_logprobs:
            return None
    ids = raw.argmax(axis=1).tolist()  # the first of equals; NaN counts as the largest
    if not all(math.isfinite(raw.item(i, token)) for i, token in enumerate(ids)):
        return None
    return Sampled(ids, [None] * len(rows))


def prompt_logprobs(
    logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: Sequence[int], order: HookTable
) -> tuple[list[TokenLogprobs | None], Errors]:
    """Entries for prompt positions whose tokens are known. logits: float32 [len(rows), vocab_size], not changed."""
    errors: Errors = {}
    raw = logits.numpy()
    _check(raw, rows, errors, "the model gave")
    return _logprobs(raw, None, rows, token_ids, order, errors), errors


def is_greedy(row: SampleRow) -> bool:
    return row.request.temperature < MIN_TEMPERATURE


def _draw(values: np.ndarray, row: SampleRow) -> int:
    request = row.request
    if is_greedy(row):
        return int(values.argmax())  # numpy: the first of equals
    return rng.sample(values, request.seed, row.position, request.choice)


def _check(values: np.ndarray, rows: Sequence[SampleRow], errors: Errors, who: str, overflowed: str = "") -> np.ndarray:
    """Largest value of each row; rows without a finite one, or with NaN or +inf, become errors of their requests.

    who: who left nothing; overflowed: who made a value that is no number, `who` by default."""
    tops = values.max(axis=1)  # NaN if there is one
    if not np.isfinite(tops).all():
        for i in np.flatnonzero(~np.isfinite(tops)).tolist():
            request_id = rows[i].request.request_id
            if request_id in errors:
                continue
            if tops[i] == -np.inf and who != "the model gave":
                errors[request_id] = RequestError(f"{who} no token that may be sampled", request_id=request_id)
            else:
                problem = "no finite logit" if tops[i] == -np.inf else f"a logit that is {tops[i]}"
                blamed = overflowed if overflowed and tops[i] != -np.inf else who
                errors[request_id] = WorkerError(f"{blamed} {problem} at position {rows[i].position}", request_id=request_id)
    return tops


def _apply_temperature(values: np.ndarray, tops: np.ndarray, rows: Sequence[SampleRow], errors: Errors) -> None:
    for i, row in enumerate(rows):
        if is_greedy(row) or row.request.request_id in errors:
            continue
        values[i] -= tops[i]
        if row.request.temperature != 1.0:
            values[i] /= np.float32(row.request.temperature)


# ---- hooks over batches of rows -------------------------------------------------------------------------------------------------


def _rows_of(
    impl: Impl, rows: Sequence[SampleRow], errors: Errors, wanted: Callable[[SampleRow], bool] | None = None
) -> list[int]:
    """Indices of the rows in which the plugin takes part."""
    name, hook = impl.plugin, impl.hook
    return [
        i
        for i, row in enumerate(rows)
        if any(mine.plugin == name for mine in getattr(row.request.hooks, hook))
        and row.request.request_id not in errors
        and (wanted is None or wanted(row))
    ]


def _by_request(indices: list[int], rows: Sequence[SampleRow]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for i in indices:
        groups.setdefault(rows[i].request.request_id, []).append(i)
    return groups


def _isolated(
    indices: list[int], rows: Sequence[SampleRow], errors: Errors, call: Callable[[list[int]], list[tuple[int, Any]]]
) -> list[tuple[int, Any]]:
    """`call(indices)`; when a plugin raises, once more for each request alone, so that only the guilty get an error."""
    try:
        return call(indices)
    except TokenbusError as error:
        groups = _by_request(indices, rows)
        if len(groups) == 1:
            errors[next(iter(groups))] = error
            return []
    results = []
    for request_id, own in groups.items():
        try:
            results.extend(call(own))
        except TokenbusError as error:
            errors[request_id] = error
    return results


def _call_each(
    hook: str,
    values: np.ndarray,
    rows: Sequence[SampleRow],
    order: HookTable,
    errors: Errors,
    wanted: Callable[[SampleRow], bool] | None = None,
) -> None:
    for impl in getattr(order, hook):
        indices = _rows_of(impl, rows, errors, wanted)
        if not indices:
            continue

        def call(some: list[int], impl: Impl = impl) -> list[tuple[int, Any]]:
            copy = values[some]
            impl(logits=torch.from_numpy(copy), rows=[rows[i] for i in some])
            return list(zip(some, copy, strict=True))

        for i, changed in _isolated(indices, rows, errors, call):
            values[i] = changed


def _logprobs(
    raw: np.ndarray,
    processed: np.ndarray | None,
    rows: Sequence[SampleRow],
    token_ids: Sequence[int],
    order: HookTable,
    errors: Errors,
) -> list[TokenLogprobs | None]:
    entries: list[TokenLogprobs | None] = [None] * len(rows)
    for impl in order.token_logprobs:
        indices = _rows_of(impl, rows, errors)
        if not indices:
            continue

        def call(some: list[int], impl: Impl = impl) -> list[tuple[int, Any]]:
            answer = impl(
                raw=torch.from_numpy(raw[some]),
                processed=None if processed is None else torch.from_numpy(processed[some]),
                rows=[rows[i] for i in some],
                token_ids=[token_ids[i] for i in some],
            )
            return list(zip(some, answer or [None] * len(some), strict=True))

        for i, entry in _isolated(indices, rows, errors, call):
            if entries[i] is None:
                entries[i] = entry
    return entries
