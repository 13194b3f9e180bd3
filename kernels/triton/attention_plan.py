"""From a step's ragged batch to the work items and merge jobs of the attention kernels (attention.py says what these compute).

A plan may also fill buffers of fixed sizes, for a CUDA graph that was captured with them:

    bucket()    which buffers the step's work fits into; equal for all steps that one graph can serve
    padded()    a plan of such buffers, with this step's work in them: captured once
    fill()      this step's work into the buffers of a graph that is replayed

What pads a buffer has count 0: the kernels do nothing about it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

ENOUGH = 128
"""Programs (query tiles x KV heads) that one request alone keeps a device busy with; with fewer, its splits are spread."""
SMALLEST_BUCKET = 16
"""Work items of the smallest padded buffer."""

WorkKey = tuple[int, int, int | None, int]
"""Tokens of a tile, positions of a split, window, KV heads."""
Upload = Callable[[np.ndarray, torch.Tensor | None], torch.Tensor]
"""(numbers, where to): a copy on the device, in `where to` if given (of the same shape); the device is not waited for."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work items and merge jobs as the kernels read them (attention_kernels.py), on the device."""

    items: torch.Tensor
    """int32 [n, 8]."""
    jobs: torch.Tensor
    """int32 [m, 4]."""
    slots: int
    """Partial results."""


@dataclass(frozen=True, slots=True)
class HostWork:
    """The same on the host, int32."""

    items: np.ndarray
    jobs: np.ndarray
    slots: int


class AttentionPlan:
    """One step's ragged batch: work items are made when first needed, and shared by all layers of the same shape."""

    __slots__ = (
        "_context_len", "_device", "_fixed", "_host", "_kinds", "_query_start", "_table_start", "_upload", "_work", "longest",
        "tables", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        query_start: Sequence[int],
        context_len: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device,
        *,
        tables: torch.Tensor | None = None,
        table_rows: Sequence[int] | None = None,
        upload: Upload | None = None,
        kinds: dict[int, dict[WorkKey, None]] | None = None,
    ) -> None:
        """Request r's new tokens are rows query_start[r] : query_start[r + 1] of q, the last of them at position context_len[r] - 1;
        block_tables[r]: its blocks in order, enough for context_len[r] tokens. Lists are read here and not kept.

        tables, table_rows: int32 [rows, width], contiguous, already on the device, where request r's blocks are in row table_rows[r];
        `block_tables` is not looked at then. upload: how numbers reach the device. kinds: the keys that plans of the same `longest` were
        asked for, kept by whoever makes plans, so that `bucket` knows them beforehand."""
        self._upload = upload or (lambda numbers, to: _copy(numbers, to, device))
        self._device = device
        self._fixed = False
        self._query_start = np.asarray(query_start, dtype=np.int64)
        self._context_len = np.asarray(context_len, dtype=np.int64)
        if tables is None or table_rows is None:
            starts, blocks = array("i"), array("i")
            for table in block_tables:
                starts.append(len(blocks))
                blocks.extend(table)
            self._table_start = np.asarray(starts, dtype=np.int64)
            tables = self._upload(np.asarray(blocks, dtype=np.int32), None)
        else:
            self._table_start = np.asarray(table_rows, dtype=np.int64) * tables.shape[1]
        self.tokens = int(query_start[-1])
        self.tables = tables
        """int32: block tables, flat or a row each; work items say where in it a request's table begins."""
        self.longest = 1 << (int(np.diff(self._query_start).max(initial=1)) - 1).bit_length()
        """Tokens of the longest query, rounded up to a power of two."""
        self._kinds = {} if kinds is None else kinds
        self._work: dict[WorkKey, Work] = {}
        self._host: dict[WorkKey, HostWork] = {}

    def work(self, tokens_per_tile: int, split: int, window: int | None, kv_heads: int) -> Work:
        key = (tokens_per_tile, split, window, kv_heads)
        found = self._work.get(key)
        if found is None:
            if self._fixed:
                raise RuntimeError(f"a padded plan has no work of {key}: no plan was asked for it when the buffers were made")
            self._kinds.setdefault(self.longest, {})[key] = None
            made = self._made(key)
            found = self._work[key] = Work(self._upload(made.items, None), self._upload(made.jobs, None), made.slots)
        return found

    # ---- for graphs -------------------------------------------------------------------------------------------------------------

    def bucket(self) -> Hashable | None:
        """Of the buffers that hold all this step's work; None while it isn't known what work will be asked for (no plan of the same
        `longest` has run yet)."""
        keys = self._kinds.get(self.longest)
        if not keys:
            return None
        return self.longest, tuple((key, *_sizes(self._made(key))) for key in keys)

    def padded(self, tokens: int) -> AttentionPlan:
        """A plan of buffers of the sizes in `bucket`, with this step's work in them, for `tokens` rows of q (at least this step's).
        It keeps `tables`, which must stay where it is as long as the plan is used."""
        plan = object.__new__(AttentionPlan)
        plan._upload, plan._device, plan._fixed = self._upload, self._device, True
        plan._query_start, plan._context_len, plan._table_start = self._query_start, self._context_len, self._table_start
        plan.tokens, plan.tables, plan.longest = tokens, self.tables, self.longest
        plan._kinds, plan._host, plan._work = self._kinds, {}, {}
        for key in self._kinds.get(self.longest, {}):
            items, jobs, slots = _sizes(self._made(key))
            empty = [torch.zeros(shape, dtype=torch.int32, device=self._device) for shape in ((items, 8), (jobs, 4))]
            plan._work[key] = Work(empty[0], empty[1], slots)
        self.fill(plan)
        return plan

    def fill(self, padded: AttentionPlan) -> None:
        """Write this step's work into the buffers of a `padded` plan of the same `bucket`."""
        for key, work in padded._work.items():
            made = self._made(key)
            for numbers, to in ((made.items, work.items), (made.jobs, work.jobs)):
                if len(to):
                    whole = np.zeros(to.shape, dtype=np.int32)
                    whole[: len(numbers)] = numbers
                    self._upload(whole, to)

    # ---- the arithmetic ---------------------------------------------------------------------------------------------------------

    def _made(self, key: WorkKey) -> HostWork:
        found = self._host.get(key)
        if found is None:
            found = self._host[key] = self._make(*key)
        return found

    def _make(self, tokens_per_tile: int, split: int, window: int | None, kv_heads: int) -> HostWork:
        tokens = np.diff(self._query_start)
        tiles = -(-tokens // tokens_per_tile)
        request = np.repeat(np.arange(len(tokens)), tiles)
        first = (np.arange(len(request)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens_per_tile
        row = self._query_start[request] + first
        count = np.minimum(tokens[request] - first, tokens_per_tile)
        position = self._context_len[request] - tokens[request] + first
        begin = np.zeros_like(position) if window is None else np.maximum(position - window + 1, 0) // split
        end = -(-(position + count) // split)
        spread = (end - begin > 1) & (tiles[request] * kv_heads < ENOUGH)

        parts = np.where(spread, end - begin, 1)
        slot = np.cumsum(np.where(spread, parts, 0)) - np.where(spread, parts, 0)
        of = np.repeat(np.arange(len(request)), parts)
        part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
        apart = spread[of]
        from_split = begin[of] + part
        to_split = np.where(apart, from_split + 1, end[of])
        items = np.stack(
            [
                row[of], count[of], position[of], self._table_start[request[of]], from_split, to_split,
                np.where(apart, slot[of] + part, -1), np.zeros_like(of),
            ],
            axis=1,
        )  # fmt: skip
        items = items[np.argsort(from_split - to_split, kind="stable")]  # the longest first
        jobs = np.stack([row, count, slot, parts], axis=1)[spread]
        return HostWork(items.astype(np.int32), jobs.astype(np.int32), int(parts[spread].sum()))


def _sizes(work: HostWork) -> tuple[int, int, int]:
    """Of buffers for it: items, jobs, partial results; few different ones, so that few graphs serve all steps."""
    items = max(SMALLEST_BUCKET, 1 << (len(work.items) - 1).bit_length())
    return (items, items, items) if len(work.jobs) else (items, 0, 0)


def _copy(numbers: np.ndarray, to: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """int32 on the device, without waiting for it."""
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int32))
    if device.type == "cpu" or not tensor.numel():
        return tensor.to(device) if to is None else to.copy_(tensor)
    pinned = tensor.pin_memory()
    return pinned.to(device, non_blocking=True) if to is None else to.copy_(pinned, non_blocking=True)
