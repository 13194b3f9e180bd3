"""The equivalence suite as a whole: any two ways of running, and any kind of sampling with each, meet in some cell."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from equivalence_stand import Ask, Stand

from tokenbus.core import sampler
from tokenbus.core.front.journal import OpenRequest
from tokenbus.core.selftest.kinds import KINDS
from tokenbus.core.selftest.matrix import Matrix
from tokenbus.core.selftest.pairwise import pairwise
from tokenbus.core.selftest.ways import AXES, Oracle, Way, every_way, pairwise_ways
from tokenbus.kernels.cpu import lib

CELLS = pairwise_ways(tuple(KINDS))


@pytest.fixture(scope="module")
def tiny_matrix(tiny_path: str):
    if lib.load() is None:
        pytest.skip(f"no CPU kernels: {lib.unavailable_reason()}")
    with Stand(tiny_path, "cpu", block_size=8) as stand:
        yield Matrix(stand, tuple(KINDS), (7, 15, 31), 28, few=True)


@pytest.fixture(scope="module")
def demo_matrix():
    kernels = "torch" if lib.load() is None else "cpu"
    with Stand("demo", kernels, block_size=8) as stand:
        yield Matrix(stand, tuple(KINDS), (7, 15, 31), 28, few=True)


def name(value: Any) -> str:
    return value.name if isinstance(value, Way) else value


@pytest.mark.parametrize(("way", "kind"), CELLS, ids=name)
def test_any_two_meet_on_the_tiny_model(tiny_matrix: Matrix, way: Way, kind: str):
    (cell,) = tiny_matrix.run(way, (kind,))
    assert cell.passed, cell


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("way", "kind"), CELLS, ids=name)
def test_any_two_meet_on_the_demo_model(demo_matrix: Matrix, way: Way, kind: str):
    (cell,) = demo_matrix.run(way, (kind,))
    assert cell.passed, cell


def test_the_plain_answers_are_not_trivial(tiny_matrix: Matrix):
    assert tiny_matrix.kinds == list(KINDS)
    assert len({tuple(answer.tokens) for answer in tiny_matrix.plain}) == len(tiny_matrix.plain)
    reasons = {
        kind: {a.reason for q, a in zip(tiny_matrix.questions, tiny_matrix.plain, strict=True) if q.kind == kind}
        for kind in KINDS
    }
    assert {kind for kind, found in reasons.items() if found == {"stop"}} >= {"grammar", "stop ids", "stop strings"}
    for question, answer in zip(tiny_matrix.questions, tiny_matrix.plain, strict=True):
        if question.kind == "stop strings":
            assert answer.stopped in question.ask.fields["stop"]
            assert answer.stopped not in answer.text


def test_pairs():
    axes = {"a": (1, 2, 3), "b": ("x", "y"), "c": (None, True), "d": (0, 1, 2, 3, 4)}
    rows = pairwise(axes)
    assert 15 <= len(rows) < 20  # of 60
    assert all(row.keys() == axes.keys() for row in rows)
    for one, other in itertools.combinations(axes, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(axes[one], axes[other]))
    assert pairwise(axes) == rows


def test_every_way_is_a_combination_of_its_own():
    ways = every_way()
    assert len({way.name for way in ways}) == len(ways) == 768
    for axis, values in AXES.items():
        seen = {bool(getattr(way, axis)) if axis == "chunk" else getattr(way, axis) for way in ways[:48]}
        assert seen == set(values), "a part is a sample of the whole"
    assert {way.chunk for way in ways} == {0, 1, 7, 16}
    assert len(CELLS) < 60


# ---- the suite fails when it should -------------------------------------------------------------------------------------------------


def cells_of(matrix: Matrix, way: Way, *kinds: str) -> dict[str, Any]:
    return {cell.kind: cell for cell in matrix.run(way, kinds)}


def test_a_token_that_is_lost_at_a_death_is_found(tiny_matrix: Matrix, monkeypatch: pytest.MonkeyPatch):
    as_sent = OpenRequest.as_sent

    def forgetting(self: OpenRequest) -> Any:
        if len(self.tokens) < 3:
            return as_sent(self)
        kept, self.tokens = self.tokens, self.tokens[:-1]
        sent = as_sent(self)
        self.tokens = kept
        return sent

    monkeypatch.setattr(OpenRequest, "as_sent", forgetting)
    cell = cells_of(tiny_matrix, Way(restart=True), "greedy")["greedy"]
    assert "output token" in cell.difference
    assert not cell.passed


def test_sampling_that_counts_steps_is_found_by_a_death(tiny_matrix: Matrix, monkeypatch: pytest.MonkeyPatch):
    """A generator that starts anew in each engine: what is drawn depends on how long it has run."""
    calls = itertools.count()
    draw = sampler.rng.sample
    monkeypatch.setattr(sampler.rng, "sample", lambda logits, seed, *rest: draw(logits, seed + next(calls) // 40, *rest))
    found = cells_of(tiny_matrix, Way(restart=True), "greedy", "seeded")
    assert found["greedy"].same
    assert not found["seeded"].same


def test_a_feature_that_does_nothing_is_found(tiny_matrix: Matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Oracle, "answers", {})
    cell = cells_of(tiny_matrix, Way(proposer=Oracle.info.name), "greedy")["greedy"]
    assert (cell.same, cell.missing, cell.passed) == (True, ["drafts right", "wrong"], False)


def test_a_draft_that_is_never_wrong_is_found(tiny_matrix: Matrix, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Oracle, "mistakes", 0.0)
    cell = cells_of(tiny_matrix, Way(proposer=Oracle.info.name), "greedy")["greedy"]
    assert (cell.same, cell.missing) == (True, ["wrong"])


def test_a_grammar_without_a_mask_is_found(tiny_matrix: Matrix, monkeypatch: pytest.MonkeyPatch):
    everything = np.ones(tiny_matrix.stand.info.vocab_size, dtype=np.bool_)
    monkeypatch.setattr("tokenbus.plugins.structured.masks.Progress.mask", lambda self, output: everything)
    cell = cells_of(tiny_matrix, Way(room="alone"), "grammar")["grammar"]
    assert cell.missing == ["answers held to the grammar"]
    assert not cell.same


def test_the_worker_process_forgets_what_it_knew(tiny_matrix: Matrix):
    """A death in it is one: a request that goes on is sent whole, and the process stays the same."""
    ask = Ask(prompt=[40, 41, 42], max_tokens=12, fields={"ignore_eos": True}, fatal_at=4)
    stand = tiny_matrix.stand
    plain = stand.run([Ask(**(vars(ask) | {"fatal_at": 0}))], off=("prefix_cache", "chunked_prefill"), threads=1)
    for process in (False, True):
        outcome = stand.run([ask], process=process, threads=1)
        assert (outcome.deaths, outcome.answers[0].resumed) == (1, 1)
        assert outcome.steps == plain.steps + 1, "the step in flight was lost, and nothing else"
        assert outcome.answers[0].same(plain.answers[0])
