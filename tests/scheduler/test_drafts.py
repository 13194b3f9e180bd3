"""Drafts in the scheduler: planned where there is room, verified, and what they took given back."""

from __future__ import annotations

import random

import pytest

from tokenbus.core.plan import Drafts
from tokenbus.core.plugin import Plugin, PluginInfo, StashKey, hookimpl

STATE = StashKey[random.Random]("oracle")


class Oracle(Plugin):
    """Proposes the answer itself, with mistakes; `solo` is the harness's."""

    info = PluginInfo(name="oracle", summary="", scope="request", lossless=True)
    solo = None
    mistakes = 0.2
    length: int | None = None

    def __init__(self, settings, role) -> None:
        super().__init__(settings, role)
        self.told: list[tuple[int, int]] = []
        self.asked = 0

    @hookimpl
    def request_added(self, request) -> None:
        request.stash[STATE] = random.Random(request.request_id)

    @hookimpl
    def propose_drafts(self, request, most):
        draw = request.stash[STATE]
        self.asked += 1
        count = draw.randint(0, most) if self.length is None else min(most, self.length)
        answer = type(self).solo(list(request.admitted.prompt), request.num_output + count)[request.num_output :]
        return [token if draw.random() >= self.mistakes else 2 + token % 40 for token in answer]

    @hookimpl
    def drafts_verified(self, request, proposed, accepted) -> None:
        assert 0 <= accepted <= proposed
        self.told.append((proposed, accepted))


@pytest.fixture
def drafting(harness, monkeypatch):
    monkeypatch.setattr(Oracle, "solo", staticmethod(harness.solo))

    def make(**options):
        on = ("oracle", *options.pop("on", ()))
        return harness(on=on, plugins=(Oracle, *options.pop("plugins", ())), **options)

    return make


def counters(h) -> dict[str, float]:
    total: dict[str, float] = {}
    for output in h.outputs:
        for name, count in (output.report.counters if output.report else {}).items():
            total[name] = total.get(name, 0) + count
    return total


def test_right_drafts_give_many_tokens_a_step(drafting, monkeypatch) -> None:
    monkeypatch.setattr(Oracle, "mistakes", 0.0)
    monkeypatch.setattr(Oracle, "length", 7)
    h = drafting()
    h.add("a", 10, max_tokens=33)
    h.run()
    assert h.tokens["a"] == h.solo(h.inputs[0].new[0].tokens, 33)
    assert len(h.plans) == 1 + 4, "33 tokens: the prompt's, and 8 a step"
    assert [plan.num_draft_tokens for plan in h.plans] == [0, 7, 7, 7, 7]
    assert [plan.num_tokens["a"] for plan in h.plans[1:]] == [8] * 4
    assert counters(h)["oracle.accepted_tokens"] == counters(h)["oracle.proposed_tokens"] == 28
    assert [output.report.decode_tokens for output in h.outputs[1:5]] == [1] * 4


def test_each_end_says_what_its_own_drafts_came_to(drafting) -> None:
    h = drafting()
    for name in "abc":
        h.add(name, 10, max_tokens=33)
    h.run()
    ends = [finish for output in h.outputs for finish in output.finished.values()]
    assert len(ends) == 3
    assert all(0 < end.accepted_tokens < end.draft_tokens for end in ends), "the last step's too"
    assert sum(end.draft_tokens for end in ends) == counters(h)["oracle.proposed_tokens"]
    assert sum(end.accepted_tokens for end in ends) == counters(h)["oracle.accepted_tokens"]


@pytest.mark.parametrize("mistakes", [0.1, 0.5, 1.0])
def test_wrong_drafts_change_nothing(drafting, monkeypatch, mistakes) -> None:
    monkeypatch.setattr(Oracle, "mistakes", mistakes)
    h = drafting(on=("prefix_cache", "chunked_prefill"))
    prompts = {f"r{i}": [3 + (7 * j + i) % 40 for j in range(1 + 5 * i)] for i in range(8)}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=30)
    h.run()
    assert {name: h.tokens[name] for name in prompts} == {name: h.solo(prompt, 30) for name, prompt in prompts.items()}
    found = counters(h)
    assert found["oracle.proposed_tokens"] > found["oracle.accepted_tokens"]
    assert (found["oracle.accepted_tokens"] == 0) == (mistakes == 1.0)
    told = h.plugin("oracle").told
    assert sum(p for p, _ in told) <= found["oracle.proposed_tokens"]
    assert max(a for _, a in told) == 0 or mistakes < 1


def test_drafts_never_push_anybody_out(drafting, monkeypatch) -> None:
    """A pool with room for the answers alone: drafts take what is free and no more."""
    monkeypatch.setattr(Oracle, "mistakes", 0.5)
    h = drafting(num_blocks=8, block_size=4, max_model_len=32)
    for name in "abc":
        h.add(name, 4, max_tokens=6)
    h.run()
    assert not any(plan.preempted for plan in h.plans)
    assert {name: len(tokens) for name, tokens in h.tokens.items()} == {"a": 6, "b": 6, "c": 6}


def test_under_preemption(drafting) -> None:
    h = drafting(num_blocks=12, block_size=2)
    prompts = {f"r{i}": [3 + (5 * j + i) % 40 for j in range(4)] for i in range(6)}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=15)
    h.run()
    assert sum(len(plan.preempted) for plan in h.plans) > 0
    assert counters(h)["oracle.accepted_tokens"] > 0
    assert h.tokens == {name: h.solo(prompt, 15) for name, prompt in prompts.items()}


def test_the_budget_and_the_setting_bound_them(drafting, monkeypatch) -> None:
    monkeypatch.setattr(Oracle, "mistakes", 0.0)
    h = drafting(token_budget=6, max_running=3)
    for name in "abc":
        h.add(name, 2, max_tokens=20)
    h.run()
    assert max(sum(plan.num_tokens.values()) for plan in h.plans) <= 6
    assert max(plan.num_draft_tokens for plan in h.plans) > 0


def test_a_request_never_runs_past_its_end(drafting, monkeypatch) -> None:
    monkeypatch.setattr(Oracle, "mistakes", 0.0)
    monkeypatch.setattr(Oracle, "length", 50)
    h = drafting()
    h.add("a", 5, max_tokens=3)
    h.add("b", 5, max_tokens=1)
    h.run()
    assert (len(h.tokens["a"]), len(h.tokens["b"])) == (3, 1)
    assert [plan.num_draft_tokens for plan in h.plans] == [0, 1]


class Broken(Plugin):
    info = PluginInfo(name="broken", summary="", scope="request", lossless=True)
    answer: object = None

    @hookimpl
    def propose_drafts(self, request, most):
        if self.answer is None:
            raise ValueError("out of ideas")
        return self.answer


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "out of ideas"),
        ("abc", "answered a str, not a list of token ids"),
        ([1, -1], "proposed -1, which is no token id"),
        ([1, 2.0], "proposed 2.0, which is no token id"),
        ([1] * 1000, "proposed 1000 drafts where"),
    ],
)
def test_a_broken_proposer_ends_its_requests_alone(harness, monkeypatch, answer, problem) -> None:
    monkeypatch.setattr(Broken, "answer", answer)
    h = harness(plugins=(Broken,))
    h.add("good", 5, max_tokens=5)
    h.switch(broken=True)
    h.add("bad", 5, max_tokens=5, features=("broken",))
    h.add("pinned", 5, max_tokens=5, features=(), pinned={"broken": False})
    h.run()
    assert h.finished["bad"].reason == "error"
    assert problem in h.finished["bad"].error.message
    assert "broken" in h.finished["bad"].error.message
    assert len(h.tokens["pinned"]) == 5


class Hinting(Plugin):
    """Stands for a plugin that proposes in the worker; `drafts` are what it says there."""

    info = PluginInfo(name="hinting", summary="", scope="request", lossless=True)


@pytest.mark.parametrize(
    ("hint", "used"),
    [
        ([0, 0], ("oracle", 4)),  # the other one's begin with them
        ([0] * 6, ("hinting", 6)),
        ([1, 0], ("hinting", 2)),
        ([], ("oracle", 4)),
    ],
)
def test_what_the_worker_proposes_goes_first_unless_another_knows_more(drafting, monkeypatch, hint, used) -> None:
    """hint: by place, how far the worker's drafts are from what is right; the oracle proposes 4 right ones."""
    monkeypatch.setattr(Oracle, "mistakes", 0.0)
    monkeypatch.setattr(Oracle, "length", 4)
    h = drafting(on=("hinting",), plugins=(Hinting,))
    h.add("a", 10, max_tokens=12)
    execute = h.worker.execute

    def hinting(order):
        result = execute(order)
        known = len(h.tokens.get("a", [])) + len(result.sampled["a"])
        right = Oracle.solo(h.inputs[0].new[0].tokens, known + len(hint))[known:]
        if hint:
            result.drafts["a"] = Drafts("hinting", [token + off for token, off in zip(right, hint, strict=False)])
        return result

    monkeypatch.setattr(h.worker, "execute", hinting)
    h.run()
    assert h.tokens["a"] == h.solo(h.inputs[0].new[0].tokens, 12)
    name, count = used
    assert h.plans[1].num_draft_tokens == count
    assert counters(h)[f"{name}.proposed_tokens"] >= count


def test_drafts_of_a_plugin_that_was_switched_off_are_not_run(drafting, monkeypatch) -> None:
    h = drafting(on=("hinting",), plugins=(Hinting,))
    h.switch(oracle=False)
    h.add("a", 10, max_tokens=8)
    execute = h.worker.execute

    def hinting(order):
        result = execute(order)
        result.drafts["a"] = Drafts("hinting", [5])
        return result

    monkeypatch.setattr(h.worker, "execute", hinting)
    h.step()
    assert h.step().num_draft_tokens == 1
    h.switch(hinting=False)
    assert h.step().num_draft_tokens == 0
    monkeypatch.undo()
    h.run()
    assert h.tokens["a"] == h.solo(h.inputs[0].new[0].tokens, 8)
