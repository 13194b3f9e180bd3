"""Runners that take a GPU's ways on the CPU, a driver that launches steps before it collects the one before, and models for both."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import torch
from worker_fakes import ALL, BLOCK, Driver, FakeModel, Spec, config, make_runner

from tokenbus.core.models.base import ForwardBatch, KVCache
from tokenbus.core.plan import StepInput, StepResult
from tokenbus.core.worker.attention import AttentionBackend
from tokenbus.core.worker.device import CpuDevice
from tokenbus.core.worker.pending import Pending
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.testing.model import prefix_hash


class ResidentModel(FakeModel):
    """Finds each request's blocks where a kernel does: in its row of the tables that stay on the device, if there are any."""

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        where, keys = batch.attention, kv.k[0].view(-1)
        if where.tables is None or where.table_rows is None:
            return super().forward(batch, kv, attention)
        self.batches.append(len(batch.token_ids))
        assert int(batch.token_ids.min()) >= 0, "a token that nobody knows"
        keys[where.slots] = batch.token_ids.to(torch.float32)
        hidden = []
        for r, (start, end) in enumerate(itertools.pairwise(where.query_start)):
            blocks = where.tables[where.table_rows[r], : -(-where.context_len[r] // BLOCK)].to(torch.int64)
            slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).view(-1)[: where.context_len[r]]
            stored = keys[slots].to(torch.int64).tolist()
            hidden += [prefix_hash(stored[: p + 1]) for p in batch.positions[start:end].tolist()]
        return torch.tensor(hidden, dtype=torch.float32)[:, None]


def on_device(
    features: tuple[str, ...] = ALL,
    model: FakeModel | None = None,
    device: CpuDevice | None = None,
    blocks: int = 512,
    **sections: Any,
) -> ModelRunner:
    """A loaded runner that launches and collects."""
    runner = make_runner(config(**sections), features, model=model or ResidentModel())
    runner._device = device or CpuDevice(asynchronous=True)
    runner.load()
    runner.allocate(blocks)
    return runner


class AheadDriver(Driver):
    """Launches up to `depth` steps before it collects the first of them: plans count on one token for each request that samples."""

    def __init__(self, specs: list[Spec], depth: int = 2) -> None:
        super().__init__(specs)
        self.depth = depth
        self.ahead = 0
        """Steps that were launched while another one was not collected."""

    def run(self, runner: ModelRunner) -> None:
        flying: deque[tuple[Pending, list[tuple[Spec, int]]]] = deque()
        while self.open or flying:
            if not self.open or len(flying) == self.depth or (flying and self._must_wait()):
                pending, expected = flying.popleft()
                self._know(runner.collect(pending), expected)
                continue
            order = self.plan()
            self.ahead += bool(flying)
            pending = runner.launch(order)
            flying.append((pending, self._count_on(order)))

    def _must_wait(self) -> bool:
        return any(spec.preempt_at is not None and len(spec.output) >= spec.preempt_at and not spec.done for spec in self.specs)

    def _count_on(self, order: StepInput) -> list[tuple[Spec, int]]:
        expected = []
        for spec in self.specs:
            if (n := order.num_tokens.get(spec.name)) is None:
                continue
            spec.computed += n
            place = len(spec.tokens) if spec.computed == len(spec.tokens) else -1
            expected.append((spec, place))
            if place >= 0:
                spec.tokens.append(-1)
                if spec.done:
                    self.dropped.append(spec.name)
        return expected

    def _know(self, result: StepResult, expected: list[tuple[Spec, int]]) -> None:
        self.results.append(result)
        for spec, place in expected:
            if (error := result.errors.get(spec.name)) is not None:
                spec.error = spec.error or error
            elif place >= 0 and spec.error is None:
                (spec.tokens[place],) = result.sampled[spec.name]
                spec.logprobs += result.logprobs.get(spec.name, [])
            spec.prompt_logprobs += result.prompt_logprobs.get(spec.name, [])
