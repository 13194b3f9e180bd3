"""`drafts_after_step` and side models: what plugins in the worker see once a step is over, and what becomes of their answers and faults."""

from __future__ import annotations

import msgspec
import pytest
import worker_fakes
from test_runner import PROMPT
from worker_fakes import ALL, BLOCK, VOCAB, Driver, FakeModel, Spec, loaded, reference_greedy

from tokenbus.core.errors import ModelError, PluginLoadError
from tokenbus.core.models.linears import Refusal
from tokenbus.core.plan import Drafts
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.worker.side import Beside, SideModel
from tokenbus.testing.model import prefix_hash


class Head(Plugin):
    """A head on the hidden state: it knows the model's table, so it can tell what comes next from the last token's hash."""

    info = PluginInfo(name="test.head", summary="", scope="request", lossless=True, resident=True, claims={"head"})
    seen: list = []
    answer = None

    @hookimpl
    def side_model(self, model, block_size):
        assert (model, block_size) == ("fake", BLOCK)
        self.side = Side()
        return self.side

    @hookimpl
    def drafts_after_step(self, step):
        drafts = {}
        for run in step.runs:
            tokens = run.request.tokens
            rows = [prefix_hash(tokens[: run.first + i + 1]) for i in range(len(run.hidden))]
            assert run.hidden[:, 0].tolist() == rows
            assert run.request.computed == run.first + len(rows)
            assert not run.sampled or run.request.computed == len(tokens) - 1
            type(self).seen.append((run.request.request_id, run.first, len(rows), run.drafts, run.sampled))
            if run.request.fields["head"] == "raise":
                raise ValueError("broken")
            if run.sampled:
                assert self.side.beside.logits(run.hidden[-1:].clone()).argmax().item() == tokens[-1]
                drafts[run.request.request_id] = reference_greedy(tokens, 2)
        return drafts if self.answer is None else self.answer


class Side(SideModel):
    weights_bytes, kv_bytes_per_token, fixed_bytes = 11, 8, 13

    def __init__(self):
        self.beside: Beside
        self.blocks: list[int] = []

    def load(self, beside):
        self.beside = beside

    def allocate(self, num_blocks):
        assert num_blocks == 512

    def handed_out(self, blocks):
        self.blocks += blocks


@pytest.fixture(autouse=True)
def head(monkeypatch):
    monkeypatch.setattr(worker_fakes, "PLUGINS", (*worker_fakes.PLUGINS, Head))
    monkeypatch.setattr(Head, "seen", [])
    return Head


WITH = (*ALL, "test.head")


class Obedient(Driver):
    """Runs the drafts that the last result proposed."""

    def plan(self):
        for spec in self.specs:
            if self.results and spec.name in self.results[-1].drafts:
                drafts = self.results[-1].drafts[spec.name]
                assert drafts.plugin == "test.head"
                spec.draft = lambda tokens, drafts=drafts: drafts.tokens
            else:
                spec.draft = lambda tokens: []
        return super().plan()


def test_hidden_states_and_drafts_go_round(head):
    truth = reference_greedy(PROMPT, 30)
    specs = [
        Spec("a", PROMPT, 30, features=WITH, head="yes"),
        Spec("b", PROMPT, 30, features=WITH, head="yes", chunk=3),
        Spec("c", PROMPT, 30, features=WITH),
    ]
    runner = loaded(WITH)
    driver = Obedient(specs)
    driver.run(runner)
    assert all(spec.output[:30] == truth for spec in specs)
    mine = [(drafts, sampled) for name, _, _, drafts, sampled in head.seen if name == "a"]
    assert mine[0] == (0, 1)
    assert mine[1:] == [(2, 3)] * (len(mine) - 1)
    assert 10 <= len(mine) <= 12
    assert sum(sampled == 0 for name, *_, sampled in head.seen if name == "b") == (len(PROMPT) - 1) // 3
    assert "c" not in {name for name, *_ in head.seen}
    assert "draft" in driver.results[0].phases
    assert Drafts("test.head", truth[1:3]) == driver.results[0].drafts["a"]
    side = runner.plugins.sides[0]
    assert isinstance(side, Side)
    assert set(side.blocks) >= {0, 1, 2}


def test_one_that_raises_ends_its_request_alone():
    specs = [Spec(name, PROMPT, 5, features=WITH, head="raise" if name == "b" else "yes") for name in "abc"]
    driver = Obedient(specs)
    driver.run(loaded(WITH))
    assert specs[1].error.plugin == "test.head"
    assert specs[1].error.hook == "drafts_after_step"
    assert [spec.output[:5] for spec in (specs[0], specs[2])] == [reference_greedy(PROMPT, 5)] * 2
    assert specs[1].output == []


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([1], "not a mapping"),
        ({"z": [1]}, "none of its requests"),
        ({"a": [1] * 33}, "proposed 33 drafts where 32 was the most"),
        ({"a": ["x"]}, "which is no token id"),
        ({"a": 5}, "not a list"),
    ],
)
def test_nonsense_ends_the_request(head, monkeypatch, answer, problem):
    monkeypatch.setattr(head, "answer", answer)
    spec = Spec("a", PROMPT, 5, features=WITH, head="yes")
    Obedient([spec]).run(loaded(WITH))
    assert problem in spec.error.message


def test_a_draft_beyond_the_vocabulary_ends_the_request(head, monkeypatch):
    monkeypatch.setattr(head, "answer", {"a": [VOCAB]})
    spec = Spec("a", PROMPT, 5, features=WITH, head="yes")
    Obedient([spec]).run(loaded(WITH))
    assert "beyond the vocabulary" in spec.error.message


def test_sizes_are_added(head):
    alone, both = (
        worker_fakes.make_runner(worker_fakes.config(), ALL).load(),
        worker_fakes.make_runner(worker_fakes.config(), WITH).load(),
    )
    assert both.weights_bytes - alone.weights_bytes == 11
    assert both.kv_bytes_per_token - alone.kv_bytes_per_token == 8


def test_refusals_and_wrong_kinds_stop_the_start(head, monkeypatch):
    def start(answer):
        monkeypatch.setattr(Head, "side_model", hookimpl(lambda self, model: answer))
        worker_fakes.make_runner(worker_fakes.config(), WITH).load()

    with pytest.raises(ModelError, match=r"fake can't be run with test.head: not today"):
        start(Refusal("not today"))
    with pytest.raises(PluginLoadError, match="neither a SideModel nor a Refusal"):
        start("a model")


def test_only_a_resident_may_have_one(head, monkeypatch):
    monkeypatch.setattr(Head, "info", PluginInfo(name="test.head", summary="", scope="request", lossless=True, claims={"head"}))
    assert worker_fakes.make_runner(worker_fakes.config(), WITH).load().weights_bytes == FakeModel.spec.weights_bytes


def test_it_stays_while_it_is_off(head):
    """Off and on again: the same instance, with what it holds."""
    runner = loaded(WITH)
    instance = runner.plugins.host.loaded["test.head"]
    driver = Driver([Spec("a", PROMPT, 3, features=ALL)])
    order = driver.plan()
    driver.take(order, runner.run(msgspec.structs.replace(order, features=ALL)))
    assert runner.plugins.host.loaded["test.head"] is instance
    order = driver.plan()
    driver.take(order, runner.run(msgspec.structs.replace(order, features=WITH)))
    assert runner.plugins.host.loaded["test.head"] is instance
