"""Drafts change speed, never answers: ids and logprobs, bit by bit, whatever is proposed, alone and with everything else."""

from __future__ import annotations

import random

import pytest
from equivalence_stand import Ask
from test_switches import KINDS, OFF, prompts, same

from tokenbus.core.selftest.ways import Oracle

LENGTHS = (1, 15, 16, 31, 70)


@pytest.fixture(scope="module")
def asks():
    return [
        Ask(prompt=prompt, max_tokens=24, **(kind | {"fields": kind["fields"] | {"ignore_eos": True}}))
        for kind in KINDS.values()
        for prompt in prompts(LENGTHS)
    ]


@pytest.fixture(scope="module")
def alone(tiny_stand, asks):
    answers = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in asks]
    Oracle.learn(asks, answers)
    return answers


def with_oracle(stand, asks, **options):
    outcome = stand.run(asks, on=("selftest.oracle",), plugins=(Oracle,), **options)
    proposed, accepted = (outcome.counters[f"selftest.oracle.{name}"] for name in ("proposed_tokens", "accepted_tokens"))
    assert 0 < accepted < proposed, "nothing was accepted, or nothing rejected"
    return outcome


def test_one_by_one(tiny_stand, asks, alone):
    for ask, truth in zip(asks[::3], alone[::3], strict=True):
        outcome = tiny_stand.run([ask], off=OFF, on=("selftest.oracle",), plugins=(Oracle,))
        assert outcome.counters["selftest.oracle.accepted_tokens"] > 0
        assert outcome.steps < 24
        same(outcome.answers, [truth], f"{ask}")


@pytest.mark.parametrize("mistakes", [0.0, 0.1, 0.5])
def test_all_at_once(tiny_stand, asks, alone, mistakes, monkeypatch):
    monkeypatch.setattr(Oracle, "mistakes", mistakes)
    outcome = tiny_stand.run(asks, on=("selftest.oracle",), plugins=(Oracle,))
    accepted, proposed = (
        outcome.counters["selftest.oracle.accepted_tokens"],
        outcome.counters["selftest.oracle.proposed_tokens"],
    )
    assert 0 < accepted <= proposed
    assert (accepted == proposed) == (mistakes == 0)
    same(outcome.answers, alone, f"{mistakes} of the drafts wrong")


def test_with_chunks_and_hits(tiny_stand, asks, alone):
    arriving = [Ask(**(vars(ask) | {"at_step": 2 * (index % 17)})) for index, ask in enumerate(asks)]
    outcome = with_oracle(tiny_stand, arriving, chunk=5, blocks=14, max_running=7, token_budget=24)
    assert outcome.chunks > len(asks)
    assert sum(answer.cached for answer in outcome.answers) > 0
    same(outcome.answers, alone, "drafts, chunks, hits")


def test_with_preemption(tiny_stand):
    """Short prompts that grow by several blocks: they are admitted together and then run out of room."""
    growing = [
        Ask(prompt=prompt, max_tokens=40, **(kind | {"fields": kind["fields"] | {"ignore_eos": True}}))
        for kind in KINDS.values()
        for prompt in prompts((12, 13, 14, 15))
    ]
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in growing]
    Oracle.learn(growing, truth)
    outcome = with_oracle(tiny_stand, growing, blocks=17)
    assert outcome.preempted > 1
    same(outcome.answers, truth, "drafts, preempted")


def test_stops_inside_accepted_drafts(tiny_stand, asks, alone):
    """A stop token among several tokens of a step ends the request there, a limit too."""
    some = [(ask, truth) for ask, truth in zip(asks, alone, strict=True) if "min_tokens" not in ask.fields][::2]
    stopping = [
        Ask(**(vars(ask) | {"fields": ask.fields | {"stop_token_ids": [truth.tokens[7]]}, "max_tokens": 9 + index % 5}))
        for index, (ask, truth) in enumerate(some)
    ]
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in stopping]
    assert {answer.reason for answer in truth} == {"stop"}
    outcome = with_oracle(tiny_stand, stopping)
    same(outcome.answers, truth, "stops")


@pytest.mark.parametrize("name", ["speculative.ngram", "speculative.suffix"])
def test_proposers(tiny_stand, name):
    """Text of a few ids repeats itself, with exceptions: some drafts are right and some are not."""
    few = {"ignore_eos": True, "logprobs": 1, "logit_bias": {"9": 60, "10": 60, "11": 60}}
    asks = [Ask(prompt=p, max_tokens=60, fields=few) for p in prompts((3, 20, 40, 90), seed=5)]
    asks += [Ask(prompt=p * 3, max_tokens=30, temperature=0.7, seed=3, fields=few) for p in prompts((9, 30), seed=6)]
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in asks]
    for settings in ({}, {"adaptive": False}):
        outcome = tiny_stand.run(asks, on=(name,), settings={name: settings})
        assert outcome.counters[f"{name}.accepted_tokens"] > 20
        assert outcome.counters[f"{name}.proposed_tokens"] > outcome.counters[f"{name}.accepted_tokens"]
        same(outcome.answers, truth, f"{name} {settings}")


def test_what_others_wrote_is_used_if_allowed(tiny_stand):
    """The same request again: without memory the second knows no more than the first."""
    ask = Ask(prompt=prompts((20,), seed=8)[0], max_tokens=40, fields={"ignore_eos": True})
    twice = [ask, Ask(**(vars(ask) | {"at_step": 60}))]
    truth = tiny_stand.run([ask], off=OFF).answers * 2
    accepted = []
    for remember in (0, 1000):
        outcome = tiny_stand.run(twice, on=("speculative.suffix",), settings={"speculative.suffix": {"remember": remember}})
        accepted.append(outcome.counters.get("speculative.suffix.accepted_tokens", 0))
        same(outcome.answers, truth, f"remember {remember}")
    assert accepted[0] == 0
    assert accepted[1] > 20


@pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
def test_the_demo_model_copies(demo_stand):
    """Real text that repeats itself, real logits: most drafts of `ngram` are right, and sampling is seeded."""
    draw = random.Random(2)
    passage = [draw.randrange(100, 40000) for _ in range(24)]
    asks = [Ask(prompt=passage * 3, max_tokens=24, fields={"ignore_eos": True, "logprobs": 2})]
    asks += [Ask(prompt=passage * 3 + passage[:5], max_tokens=16, temperature=0.6, seed=5, fields={"ignore_eos": True})]
    truth = [demo_stand.run([ask], off=OFF, threads=1).answers[0] for ask in asks]
    outcome = demo_stand.run(asks, on=("speculative.ngram",))
    assert outcome.counters["speculative.ngram.accepted_tokens"] > 10
    assert outcome.steps < 25
    same(outcome.answers, truth, "copying")
    oracle = [Ask(**(vars(ask) | {"seed": ask.seed})) for ask in asks]
    Oracle.learn(oracle, truth)
    same(with_oracle(demo_stand, oracle, chunk=17).answers, truth, "known answers with mistakes, chunks of 17")
