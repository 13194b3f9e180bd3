"""The runner's ways on a GPU, on the CPU: sampled ids that stay there, steps launched ahead, tables that stay there. Same tokens."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from device_fakes import AheadDriver, ResidentModel, on_device
from worker_fakes import ALL, VOCAB, Driver, Spec, loaded

from tokenbus.core import sampler
from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.worker.device import CpuDevice
from tokenbus.core.worker.staging import Staging
from tokenbus.core.worker.state import FusedFilters, WorkerRequestState

PROMPT = [5, 9, 33, 2, 17, 40, 41, 8, 8, 60, 1]
KINDS = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 123},
    "cut": {"temperature": 1.1, "seed": (1 << 64) - 3, "top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "nucleus": {"temperature": 0.7, "seed": 5, "top_p": 0.9},
    "on the host": {"temperature": 0.9, "seed": 7, "logprobs": 2, "frequency_penalty": 1.0, "top_k": 30},
}
FUSED = {"greedy", "drawn", "cut", "nucleus"}


def specs(kinds=tuple(KINDS), count: int = 2) -> list[Spec]:
    return [
        Spec(f"{kind} {i}", [*PROMPT[: 3 + 4 * i], i], 5 + 3 * i, chunk=4 + 9 * i, **KINDS[kind])
        for kind in kinds
        for i in range(count)
    ]


def outcome(of: list[Spec]) -> list:
    return [(spec.name, spec.tokens, spec.logprobs, spec.prompt_logprobs, spec.error) for spec in of]


def plainly(of: list[Spec]) -> list:
    """As the CPU's runner answers."""
    Driver(of).run(loaded())
    return outcome(of)


def test_device_and_host_sampler_give_the_same_tokens():
    mine, expected = specs(), plainly(specs())
    driver = Driver(mine)
    driver.run(on_device())
    assert outcome(mine) == expected


@pytest.mark.parametrize("kinds", [tuple(FUSED), tuple(KINDS)], ids=["all on the device", "some on the host"])
def test_steps_launched_ahead_give_the_same_tokens(kinds):
    mine, expected = specs(kinds), plainly(specs(kinds))
    driver = AheadDriver(mine)
    driver.run(on_device())
    assert outcome(mine) == expected
    assert driver.ahead > 5
    waits = sum("wait" in result.phases for result in driver.results)
    assert waits >= (driver.ahead if set(kinds) == FUSED else 0), "steps were collected as they were launched"


def test_nothing_is_pending_where_the_host_samples():
    runner, driver = on_device(), Driver([Spec("a", PROMPT, 4, **KINDS["on the host"]), Spec("b", PROMPT, 4)])
    pending = runner.launch(driver.plan())
    assert pending.later is None
    assert pending.result.sampled.keys() == {"a", "b"}


def test_ids_are_unknown_to_the_host_until_collected():
    runner, driver = on_device(), Driver([Spec("a", PROMPT, 2)])
    first = runner.launch(driver.plan())
    second = runner.launch(StepInput(step_id=7, num_tokens={"a": 1}))
    assert runner._requests["a"].tokens == [*PROMPT, -1, -1]
    assert second.result.sampled == first.result.sampled == {}
    results = [runner.collect(second), runner.collect(first)]  # the later one settles both
    expected = plainly([Spec("a", PROMPT, 2)])[0][1]
    assert runner._requests["a"].tokens == expected
    assert [r.sampled["a"][0] for r in reversed(results)] == expected[-2:]


def test_preemption_between_steps_ahead():
    mine = [Spec(f"r{i}", [*PROMPT, i], 9, preempt_at=2 + i, **KINDS["drawn"]) for i in range(3)]
    expected = plainly([Spec(f"r{i}", [*PROMPT, i], 9, **KINDS["drawn"]) for i in range(3)])
    AheadDriver(mine).run(on_device())
    assert outcome(mine) == expected


def test_drafts_are_sampled_behind_on_the_device(monkeypatch):
    """Right, half right and wrong ones, beside requests without; none on the host but for a request that needs it."""
    kinds = {kind: KINDS[kind] for kind in ("greedy", "cut", "on the host")}
    known = {kind: plainly([Spec("a", PROMPT, 12, **options)])[0][1] for kind, options in kinds.items()}

    def drafting(kind: str):
        return lambda tokens: [*known[kind][len(tokens) : len(tokens) + len(tokens) % 4], 63, 5][
            : 12 + len(PROMPT) - len(tokens)
        ]

    mine = [Spec(kind, PROMPT, 12, draft=drafting(kind), **options) for kind, options in kinds.items()]
    mine.append(Spec("none", PROMPT[:4], 12))
    driver, on_host, sample = Driver(mine), set(), sampler.sample

    def noting(logits, rows, order):
        on_host.update(row.request.request_id for row in rows)
        return sample(logits, rows, order)

    monkeypatch.setattr(sampler, "sample", noting)
    driver.run(on_device())
    assert on_host == {"on the host"}
    assert [spec.output[:12] for spec in mine[:3]] == [tokens[len(PROMPT) :] for tokens in known.values()]
    assert mine[3].tokens == plainly([Spec("none", PROMPT[:4], 12)])[0][1]
    taken = [len(result.sampled.get("greedy", ())) for result in driver.results]
    assert {1, 2, 4} <= set(taken)


def test_a_row_behind_a_wrong_draft_may_be_nonsense():
    from tokenbus.testing.model import prefix_hash

    known = plainly([Spec("a", PROMPT, 4)])[0][1]
    model = Nonsense()
    model.wrong = {prefix_hash([*known[: len(PROMPT) + 1], 63]): float("nan")}
    spec = Spec("a", PROMPT, 4, draft=lambda tokens: [63] if len(tokens) == len(PROMPT) + 1 else [])
    Driver([spec]).run(on_device(model=model))
    assert (spec.tokens, spec.error) == (known, None)
    model.wrong = {prefix_hash(known[: len(PROMPT) + 1]): float("nan")}
    spec = Spec("a", PROMPT, 4, draft=lambda tokens: [63] if len(tokens) == len(PROMPT) + 1 else [])
    Driver([spec]).run(on_device(model=model))
    assert "NaN" in spec.error.message


class Follower(Plugin):
    """Looks at a step's end at what was sampled, and proposes it again."""

    info = PluginInfo(name="test.follower", summary="", scope="request", lossless=True)
    seen: ClassVar[list[tuple[int, list[int]]]] = []

    @hookimpl
    def drafts_after_step(self, step):
        for run in step.runs:
            self.seen.append((run.sampled, list(run.request.tokens)))
        return {run.request.request_id: [run.request.tokens[-1]] for run in step.runs if run.sampled and step.most}


def test_who_proposes_after_a_step_sees_its_tokens():
    runner, features = on_device(), (*ALL, "test.follower")
    runner.plugins.host.add(Follower)
    runner.plugins.host.load(("test.follower",))
    Follower.seen.clear()
    driver = Driver([Spec("a", PROMPT, 5, features=features), Spec("b", PROMPT[:3], 5)])
    driver.run(runner)
    expected = plainly([Spec("a", PROMPT, 5), Spec("b", PROMPT[:3], 5)])
    assert [spec.tokens for spec in driver.specs] == [tokens for _, tokens, *_ in expected]
    assert [tokens for _, tokens in Follower.seen] == [expected[0][1][: len(PROMPT) + 1 + i] for i in range(5)]
    assert {sampled for sampled, _ in Follower.seen} == {1}
    assert all(result.drafts["a"].tokens == [result.sampled["a"][-1]] for result in driver.results)


def test_a_live_switch_sees_known_tokens():
    """A plugin that joins while steps are in flight is shown all tokens, and none that nobody knows."""
    prompt = PROMPT[:9]  # its blocks have room for three tokens more
    runner, driver = on_device(), Driver([Spec("a", prompt, 9)])
    pending = [runner.launch(driver.plan()), runner.launch(StepInput(step_id=2, num_tokens={"a": 1}))]
    features = (*ALL, "test.counter")
    pending.append(runner.launch(StepInput(step_id=3, num_tokens={"a": 1}, features=features)))
    pending.append(runner.launch(StepInput(step_id=4, num_tokens={"a": 1})))
    tokens = [token for step in pending for token in runner.collect(step).sampled["a"]]
    assert tokens == plainly([Spec("a", prompt, 4)])[0][1][-4:]
    assert "wait" not in pending[-1].result.phases, "a plugin that changes logits works on the host"


class Nonsense(ResidentModel):
    """Logits of a row whose hidden state is in `wrong` are NaN, or -inf all of them."""

    wrong: dict[int, float]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden).clone()
        for row, state in enumerate(hidden[:, 0].tolist()):
            if int(state) in self.wrong:
                logits[row] = self.wrong[int(state)]
        return logits


@pytest.mark.parametrize(
    ("value", "problem"), [(float("nan"), "NaN or infinite"), (float("-inf"), "no finite logit")], ids=["nan", "nothing"]
)
def test_a_row_that_cannot_be_sampled_fails_alone_and_once(value, problem):
    from tokenbus.testing.model import prefix_hash

    known = plainly([Spec("bad", PROMPT, 3), Spec("good", PROMPT[1:], 6)])
    model = Nonsense()
    model.wrong = {prefix_hash(known[0][1][:-1]): value}  # of its third token
    mine = [Spec("bad", PROMPT, 9), Spec("good", PROMPT[1:], 6)]
    driver, runner = AheadDriver(mine), on_device(model=model)
    driver.run(runner)
    assert problem in mine[0].error.message
    assert mine[0].error.request_id == "bad"
    assert f"position {len(PROMPT) + 2}" in mine[0].error.message
    assert mine[0].output[:2] == known[0][1][len(PROMPT) : len(PROMPT) + 2]
    assert (mine[1].tokens, mine[1].error) == (known[1][1], None)
    failed = [result for result in driver.results if "bad" in result.errors]
    assert len(failed) == 2, "the step that was launched before it was known fails too, and no other"
    assert all("bad" not in result.sampled for result in failed)


class Twice(Plugin):
    """A second filter: what both leave can't be said in numbers."""

    info = PluginInfo(name="test.twice", summary="", scope="step", lossless=False, claims={"twice"})

    @hookimpl
    def filter_logits(self, logits, rows) -> None:
        logits[:, 5:] = float("-inf")

    @hookimpl
    def fused_filters(self, request: WorkerRequestState) -> FusedFilters:
        return FusedFilters(top_k=VOCAB)


@pytest.mark.parametrize(
    ("fields", "fused"),
    [
        ({}, FusedFilters()),
        ({"temperature": 1.0, "top_k": 3}, FusedFilters(top_k=3)),
        ({"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}, FusedFilters(top_p=0.5, min_p=0.1)),
        ({"temperature": 0.0, "top_k": 3}, FusedFilters()),
        ({"temperature": 1.0, "twice": 1}, FusedFilters(top_k=VOCAB)),
        ({"temperature": 1.0, "twice": 1, "top_k": 3}, None),
        ({"stop": ["x"], "stop_token_ids": [3], "ignore_eos": True}, FusedFilters()),
        ({"temperature": 1.0, "top_k": 3, "stop": ["x"]}, FusedFilters(top_k=3)),
        ({"temperature": 1.0, "top_k": 3, "min_tokens": {"count": 2, "banned": [5]}}, None),
        ({"min_tokens": {"count": 2, "banned": [5]}}, None),
        ({"logprobs": 1}, None),
        ({"frequency_penalty": 1.0}, None),
    ],
)
def test_which_requests_are_sampled_on_the_device(fields, fused):
    runner = on_device()
    runner.plugins.host.add(Twice)
    runner.plugins.host.load(("test.twice",))
    runner.run(Driver([Spec("a", PROMPT, 4, features=(*ALL, "test.twice"), **fields)]).plan())
    assert runner._requests["a"].fused == fused


def test_requests_come_and_go_through_few_rows(monkeypatch):
    """Rows of the tables are used again; tables grow in both directions while requests run."""
    from tokenbus.core.worker import staging

    monkeypatch.setattr(staging, "FIRST_ROWS", 16)
    model = ResidentModel()
    mine = [Spec(f"r{i}", [(7 * i + j) % VOCAB for j in range(1 + i % 5)], 3 + i % 7, **KINDS["drawn"]) for i in range(20)]
    late = [Spec(f"s{i}", [(3 * i + j) % VOCAB for j in range(1 + i)], 5) for i in range(18)]
    runner = on_device(model=model)
    first, second = AheadDriver(mine), AheadDriver(late)
    second.blocks = first.blocks
    first.run(runner)
    second.dropped = first.dropped
    second.run(runner)
    assert outcome(mine) == plainly([Spec(s.name, s.prompt, s.new, **KINDS["drawn"]) for s in mine])
    assert outcome(late) == plainly([Spec(s.name, s.prompt, s.new) for s in late])
    tables = runner._computer._steps.resident
    assert tables.tables.shape[0] == 32, "20 requests at the same time"
    assert len(tables._rows) <= 18


def test_tables_grow_with_the_longest_request(monkeypatch):
    from tokenbus.core.worker import staging

    monkeypatch.setattr(staging, "FIRST_WIDTH", 2)
    monkeypatch.setattr(staging, "FIRST_ROWS", 1)
    mine = [Spec("a", PROMPT, 40, **KINDS["drawn"]), Spec("b", PROMPT[:2], 9), Spec("c", PROMPT * 2, 3)]
    runner = on_device()
    AheadDriver(mine).run(runner)
    assert outcome(mine) == plainly([Spec(s.name, s.prompt, s.new, temperature=s.temperature, seed=s.seed) for s in mine])
    resident = runner._computer._steps.resident
    assert resident.tables.shape == (4, 16)
    assert resident.generation >= 4


def test_rows_that_were_put_begin_where_vectors_may():
    staging = Staging(CpuDevice(asynchronous=True))
    staging.begin()
    for dtype in (np.int32, np.int64, np.float64):
        for count in range(1, 9):
            numbers = np.arange(3 * count, dtype=dtype).reshape(count, 3).T  # as the sampler's come
            there = staging.put(numbers)
            assert there.tolist() == numbers.tolist()
            assert all(row.is_contiguous() and row.data_ptr() % 16 == there.data_ptr() % 16 for row in there.unbind(0))
            to = torch.zeros((3, count), dtype=there.dtype)
            assert staging.put(numbers, to).data_ptr() == to.data_ptr()
            assert to.tolist() == numbers.tolist()
            assert staging.put(numbers[0]).tolist() == numbers[0].tolist()
    assert staging.put(np.zeros((0, 4), dtype=np.int32)).shape == (0, 4)


def test_a_small_arena_grows_and_keeps_what_was_put(monkeypatch):
    from tokenbus.core.worker import staging

    monkeypatch.setattr(staging, "FIRST_ARENA", 16)
    mine = specs()
    AheadDriver(mine).run(on_device())
    assert outcome(mine) == plainly(specs())
