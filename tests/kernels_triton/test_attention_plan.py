"""Plans with resident block tables and with padded buffers: the same bits as a plan of its own for each step."""

from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.triton.attention import AttentionPlan, paged_attention
from tokenbus.kernels.triton.attention_plan import SMALLEST_BUCKET

from .paged import DEVICE, SMALL, Case

SIZE = 16


class Step:
    """Queries over caches of random K and V, and its requests' tables in rows that are neither in order nor full."""

    def __init__(self, counts: list[int], contexts: list[int], seed: int = 0, window: int | None = None) -> None:
        g = torch.Generator().manual_seed(seed)
        self.case = Case.make([1], window=window)
        self.k, self.v = (torch.randn(64, SIZE, 2, 64, generator=g).to(DEVICE) for _ in "kv")
        self.q = torch.randn(sum(counts), 6, 64, generator=g).to(DEVICE)
        self.starts = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.contexts = contexts
        order = torch.randperm(64, generator=g).tolist()
        self.lists = [[order.pop() for _ in range(-(-n // SIZE))] for n in contexts]
        self.rows = [2 * len(counts) - 1 - 2 * i for i in range(len(counts))]
        self.tables = torch.full((2 * len(counts), 24), -1, dtype=torch.int32)
        for row, blocks in zip(self.rows, self.lists, strict=True):
            self.tables[row, : len(blocks)] = torch.tensor(blocks)
        self.tables = self.tables.to(DEVICE)

    def plan(self, kinds: dict | None = None, *, resident: bool = True) -> AttentionPlan:
        more = {"tables": self.tables, "table_rows": self.rows} if resident else {}
        return AttentionPlan(self.starts, self.contexts, [] if resident else self.lists, DEVICE, kinds=kinds, **more)

    def run(self, plan: AttentionPlan) -> torch.Tensor:
        q = torch.full((plan.tokens, 6, 64), float("nan"), device=DEVICE)
        q[: len(self.q)] = self.q
        return paged_attention(q, self.k, self.v, plan, self.case.scale, self.case.window, None, SMALL)[: len(self.q)]


STEPS = [
    ([1, 1, 1], [5, 150, 64]),
    ([7, 1, 30], [7, 90, 200]),
    ([70], [70]),
    ([1], [1]),
    ([3] * 17, [20] * 17),
]


@pytest.mark.parametrize(("counts", "contexts", "window"), [(*step, None) for step in STEPS] + [(*STEPS[1], 40)])
def test_resident_tables(counts, contexts, window):
    step = Step(counts, contexts, window=window)
    assert torch.equal(step.run(step.plan()), step.run(step.plan(resident=False)))


@pytest.mark.parametrize(("counts", "contexts"), STEPS)
def test_padded_buffers(counts, contexts):
    step, kinds = Step(counts, contexts), {}
    plain = step.plan(kinds)
    assert plain.bucket() is None, "nobody has been asked for work yet"
    expected = step.run(plain)
    plan = step.plan(kinds)
    assert plan.bucket() is not None
    padded = plan.padded(len(step.q) + 9)
    assert torch.equal(step.run(padded), expected)


def test_a_bucket_serves_other_steps():
    """Its buffers hold what another step left; this one's work replaces all of it."""
    first, kinds = Step([1] * 9, [150, 3, 64, 200, 31, 90, 16, 17, 100]), {}
    first.run(first.plan(kinds))
    padded = first.plan(kinds).padded(16)
    for contexts in ([3, 160], [150, 3, 64, 200, 31, 90, 16]):
        step = Step([1] * len(contexts), contexts, seed=len(contexts))
        first.tables[: len(step.tables)] = step.tables  # the padded plan reads those
        plan = step.plan(kinds)
        if len(contexts) == 7:
            assert plan.bucket() == first.plan(kinds).bucket()
        plan.fill(padded)
        assert torch.equal(step.run(padded), step.run(step.plan(resident=False)))


def test_buckets_are_few():
    kinds: dict = {}
    step = Step([1], [1])
    step.run(step.plan(kinds))

    def bucket(counts: list[int], contexts: list[int]):
        step = Step(counts, contexts)
        return step.plan(kinds).bucket()

    assert bucket([1], [1]) == bucket([1] * SMALLEST_BUCKET, [9] * SMALLEST_BUCKET)
    assert bucket([1], [1]) != bucket([1], [150]), "with and without splits to merge"
    assert bucket([1] * 3, [9] * 3) != bucket([1] * (SMALLEST_BUCKET + 1), [9] * (SMALLEST_BUCKET + 1))
    assert bucket([2], [9]) is None, "no plan with so long a query has run"


def test_a_padded_plan_is_asked_for_nothing_new():
    step, kinds = Step([1], [20]), {}
    step.run(step.plan(kinds))
    padded = step.plan(kinds).padded(4)
    with pytest.raises(RuntimeError, match="no work of"):
        padded.work(1, 64, 7, 2)
