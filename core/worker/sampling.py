"""A step's tokens by core's sampler, on the host: rows of logits for runs, drafts compared, prompt positions looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .. import sampler
from ..errors import TokenbusError
from ..plan import StepResult, TokenLogprobs
from .batch import Run
from .plugins import WorkerPlugins
from .state import SampleRow

PROMPT_TILE = 32
"""Prompt rows whose logits exist at the same time."""
SAMPLE_TILE = 128
"""Rows that are sampled together at most, which bounds the memory of their logits."""
DEVICE_TILE = 256
"""The same on a device: there the LM head is read once more for each tile."""

Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states [R, hidden_size] -> float32 [R, vocab_size], contiguous, on the CPU, to be overwritten."""
Fail = Callable[[str, TokenbusError, StepResult], None]


def tiles(runs: Sequence[Run], *, fused: bool | None = None) -> list[list[int]]:
    """Indices of the runs that sample, in groups of at most SAMPLE_TILE rows (a run with more drafts is a group of its own). fused: only
    those that a device samples, in groups of at most DEVICE_TILE, or only the others."""
    most = DEVICE_TILE if fused else SAMPLE_TILE
    found: list[list[int]] = []
    room = 0
    for i, run in enumerate(runs):
        if (fused is not None and fused != on_device(run)) or not (rows := run.rows):
            continue
        if rows > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= rows
    return found


def on_device(run: Run) -> bool:
    """Whether a device can sample its tokens."""
    return run.request.fused is not None


def sample(
    logits: torch.Tensor, runs: list[Run], result: StepResult, plugins: WorkerPlugins, block_size: int, fail: Fail
) -> None:
    """One token for each row of `runs`; a request gets those up to the first that isn't the draft at its place."""
    parts: list[tuple[Run, int]] = []
    """Runs and their first row."""
    rows: list[SampleRow] = []
    kept: list[int] = []
    start = 0
    for run in runs:
        request, known = run.request, len(run.request.tokens) - run.drafts
        if request.request_id not in result.errors:
            parts.append((run, len(rows)))
            rows.extend(SampleRow(request, known + i, drafts=i) for i in range(run.drafts + 1))
            kept.extend(range(start, start + run.drafts + 1))
        start += run.drafts + 1
    if len(kept) < start:
        logits = logits[kept]
    if not rows:
        return
    firsts = {run.request.request_id: logits[row].clone() for run, row in parts if run.drafts}
    outcome = sampler.sample(logits, rows, plugins.order)
    for run, row in parts:
        request = run.request
        known = len(request.tokens) - run.drafts
        tokens, entries = outcome.token_ids[row : row + run.drafts + 1], outcome.logprobs[row : row + run.drafts + 1]
        error = outcome.errors.get(request.request_id)
        if run.drafts:
            drafts = request.tokens[known:]
            del request.tokens[known:]
            if error is not None:  # of a row behind a wrong draft, maybe, which would not have been
                alone = sampler.sample(firsts[request.request_id][None], [SampleRow(request, known)], plugins.order)
                error, tokens, entries = alone.errors.get(request.request_id), alone.token_ids, alone.logprobs
            else:
                tokens = accepted(drafts, tokens)
                entries = entries[: len(tokens)]
        if error is not None:
            fail(request.request_id, error, result)
            continue
        request.tokens.extend(tokens)
        if run.drafts:
            request.computed = len(request.tokens) - 1
            del request.blocks[-(-len(request.tokens) // block_size) :]
        result.sampled[request.request_id] = tokens
        if entries[0] is not None:
            result.logprobs[request.request_id] = [entry for entry in entries if entry is not None]


def accepted(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Of the tokens sampled at the places of the drafts and behind them, those up to the first that isn't the draft there."""
    right = next((i for i, draft in enumerate(drafts) if draft != sampled[i]), len(drafts))
    return list(sampled[: right + 1])


def prompt_logprobs(
    runs: list[Run], starts: list[int], hidden: torch.Tensor, result: StepResult, plugins: WorkerPlugins, head: Head, fail: Fail
) -> tuple[int, int]:
    """Fill `result.prompt_logprobs`. Returns rows and calls of the LM head."""
    num_rows = num_calls = 0
    for run, start in zip(runs, starts, strict=False):
        request = run.request
        if not request.prompt_logits:
            continue
        count = min(run.n, request.num_prompt_tokens - 1 - request.computed)
        entries: list[TokenLogprobs] = []
        for first in range(0, count, PROMPT_TILE):
            size = min(PROMPT_TILE, count - first)
            position = request.computed + first + 1
            rows = [SampleRow(request, position + i, is_prompt=True) for i in range(size)]
            logits = head(hidden[start + first : start + first + size])
            known = request.tokens[position : position + size]
            given, errors = sampler.prompt_logprobs(logits, rows, known, plugins.order)
            num_rows, num_calls = num_rows + size, num_calls + 1
            if errors:
                fail(request.request_id, errors[request.request_id], result)
                break
            entries.extend(entry for entry in given if entry is not None)
        else:
            if entries:
                result.prompt_logprobs[request.request_id] = entries
    return num_rows, num_calls
