"""One step's index arithmetic: from request states to the ragged batch, and what it costs by the model's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from ..models.base import ForwardBatch, ModelSpec
from .attention import AttentionBatch, KVLayout

if TYPE_CHECKING:
    from .state import WorkerRequestState


class Run(NamedTuple):
    """`n` tokens of `request` from its `computed`-th on; while it runs, its last `drafts` tokens are drafts."""

    request: WorkerRequestState
    n: int
    drafts: int = 0

    @property
    def rows(self) -> int:
        """How many tokens are sampled: one behind the last known token and one behind each draft; 0 for part of a prompt."""
        return self.drafts + 1 if self.request.computed + self.n == len(self.request.tokens) else 0


class Piece(NamedTuple):
    """Tokens of one sequence to run, whose K/V goes into its blocks."""

    tokens: Sequence[int]
    first: int
    """Position of the first of them."""
    blocks: list[int]
    """The block table: covers at least first + len(tokens) tokens."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A ragged batch on the host."""

    numbers: np.ndarray
    """int64 [3, T]: token ids, positions, slots."""
    query_start: list[int]
    context_len: list[int]
    tables: list[list[int]]
    """As in AttentionBatch."""


def build(runs: Sequence[Run], layout: KVLayout) -> ForwardBatch:
    """The batch of at least one run, in the order given. Block tables are the requests' own lists: not to be changed."""
    return ragged(pieces_of(runs), layout)


def pieces_of(runs: Sequence[Run]) -> list[Piece]:
    return [Piece(r.tokens[r.computed : r.computed + count], r.computed, r.blocks) for r, count, _ in runs]


def ragged(pieces: Sequence[Piece], layout: KVLayout) -> ForwardBatch:
    """The batch of at least one piece, in the order given."""
    flat = flatten(pieces, layout.block_size)
    ids, positions, slots = torch.from_numpy(flat.numbers).to(layout.device).unbind(0)
    return ForwardBatch(ids, positions, AttentionBatch(flat.query_start, flat.context_len, flat.tables, slots))


def flatten(pieces: Sequence[Piece], block_size: int) -> Flat:
    """All pieces' tokens behind each other."""
    total = sum(len(piece.tokens) for piece in pieces)
    flat = np.empty((3, total), dtype=np.int64)
    query_start, context_len, tables = [0], [], []
    start = 0
    for tokens, done, table in pieces:
        count = len(tokens)
        if count == 1:
            flat[0, start] = tokens[0]
            flat[1, start] = done
            flat[2, start] = table[done // block_size] * block_size + done % block_size
        else:
            end = start + count
            positions = flat[1, start:end]
            positions[:] = np.arange(done, done + count)
            first = done // block_size
            blocks = np.asarray(table[first : (done + count - 1) // block_size + 1], dtype=np.int64)
            flat[0, start:end] = tokens
            flat[2, start:end] = blocks[positions // block_size - first] * block_size + positions % block_size
        start += count
        query_start.append(start)
        context_len.append(done + count)
        tables.append(table)
    return Flat(flat, query_start, context_len, tables)


def bytes_moved(runs: Sequence[Run], layout: KVLayout, spec: ModelSpec, head_calls: int) -> int:
    """Weights once (the LM head as often as it was called), K/V of each context read once and of each new token written once."""
    weights = spec.step_bytes + (head_calls - 1) * spec.head_bytes
    return weights + layout.bytes_per_token * sum(run.request.computed + 2 * run.n for run in runs)


def flops(runs: Sequence[Run], layout: KVLayout, spec: ModelSpec, head_rows: int) -> int:
    """Two for each weight a token meets; four for each head dimension of each (query, key) pair under the causal mask."""
    tokens = sum(run.n for run in runs)
    pairs = sum(run.n * run.request.computed + run.n * (run.n + 1) // 2 for run in runs)
    linears = 2 * (spec.linear_params * tokens + spec.head_params * head_rows)
    return linears + 4 * spec.num_heads * sum(layout.head_dim) * pairs
