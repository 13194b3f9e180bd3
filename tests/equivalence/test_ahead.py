"""Steps planned before the ones before them have run: the same ids and logprobs, bit by bit, under everything that makes a guess wrong."""

from __future__ import annotations

import pytest
from equivalence_stand import Answer, Ask
from test_switches import KINDS, OFF, prompts, same

LENGTHS = (1, 15, 16, 31, 70)


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    """As they come, end tokens included: who ends when is not known beforehand."""
    return [Ask(prompt=prompt, max_tokens=24, **kind) for kind in KINDS.values() for prompt in prompts(LENGTHS)]


@pytest.fixture(scope="module")
def alone(tiny_stand, asks) -> list[Answer]:
    return [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in asks]


def stopping(asks: list[Ask], answers: list[Answer]) -> list[Ask]:
    """Each ends by a stop token, at another place."""
    return [
        Ask(**(vars(ask) | {"fields": ask.fields | {"stop_token_ids": [answer.tokens[3 + index % 5]]}}))
        for index, (ask, answer) in enumerate(zip(asks, answers, strict=True))
        if len(answer.tokens) > 8 and "min_tokens" not in ask.fields
    ]


def test_one_by_one_and_all_at_once(tiny_stand, asks, alone):
    for ask, truth in zip(asks[::4], alone[::4], strict=True):
        outcome = tiny_stand.run([ask], ahead=True)
        assert outcome.ahead >= len(truth.tokens) - 1
        same(outcome.answers, [truth], f"{ask}")
    outcome = tiny_stand.run(asks, ahead=True)
    assert outcome.ahead > 15
    same(outcome.answers, alone, "all at once")


@pytest.mark.parametrize("process", [False, True])
def test_stop_tokens_leave_tokens_in_vain(tiny_stand, asks, alone, process):
    some = stopping(asks, alone)
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in some]
    assert {answer.reason for answer in truth} == {"stop"}
    arriving = [Ask(**(vars(ask) | {"at_step": 2 * (index % 17)})) for index, ask in enumerate(some)]
    outcome = tiny_stand.run(arriving, ahead=True, process=process, chunk=7, blocks=40, max_running=9)
    assert outcome.discarded > len(some) // 2
    assert sum(answer.cached for answer in outcome.answers) > 0
    same(outcome.answers, truth, "stopped")


def test_with_chunks_hits_and_few_at_a_time(tiny_stand, asks, alone):
    growing = [Ask(**(vars(ask) | {"at_step": 2 * (index % 17)})) for index, ask in enumerate(asks)]
    outcome = tiny_stand.run(growing, ahead=True, chunk=5, blocks=14, max_running=7, token_budget=24)
    assert sum(answer.cached for answer in outcome.answers) > 0
    assert outcome.ahead > 40
    same(outcome.answers, alone, "chunked, cached, few at a time")


def test_preemption(tiny_stand):
    growing = [Ask(prompt=prompt, max_tokens=40, **kind) for kind in KINDS.values() for prompt in prompts((12, 13, 14, 15))]
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in growing]
    outcome = tiny_stand.run(growing, ahead=True, blocks=17)
    assert outcome.preempted > 3
    assert outcome.ahead > 40
    same(outcome.answers, truth, "preempted")


def test_under_live_switches(tiny_stand, asks, alone):
    flips = ["prefix_cache", "chunked_prefill", "scheduling.priority", "scheduling.two_phase", "scheduling.unified"]
    changes = {
        3 + 5 * index: {name: index % 4 > 1} if "." not in name else {name: True} for index, name in enumerate(flips * 2)
    }
    arriving = [Ask(**(vars(ask) | {"at_step": 2 * index})) for index, ask in enumerate(asks)]
    outcome = tiny_stand.run(arriving, ahead=True, changes=changes, blocks=30, token_budget=48)
    assert outcome.steps > max(changes)
    assert outcome.ahead > 20
    same(outcome.answers, alone, "switched live")


def test_prompt_logprobs(tiny_stand):
    wanted = {"prompt_logprobs": 2, "logprobs": 2, "ignore_eos": True}
    asks = [Ask(prompt=p, max_tokens=50, fields=wanted) for p in prompts((2, 17, 15, 15, 14, 40, 64, 90))]
    truth = [tiny_stand.run([ask], off=OFF).answers[0] for ask in asks]
    outcome = tiny_stand.run(asks, ahead=True, chunk=11, blocks=14)
    assert outcome.preempted > 0
    assert outcome.ahead > 40
    same(outcome.answers, truth, "chunked and preempted")


def test_speculation_beside_others(tiny_stand, asks, alone):
    """One request that may have drafts has every step wait while it is in it; without it they are planned ahead again."""
    few = {"ignore_eos": True, "logprobs": 1, "logit_bias": {"9": 60, "10": 60, "11": 60}}
    copying = [Ask(prompt=p, max_tokens=40, fields=few) for p in prompts((20, 40), seed=5)]
    truth = [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in copying]
    name = "speculative.ngram"
    others = [Ask(**(vars(ask) | {"at_step": 5 * index, "without": (name,)})) for index, ask in enumerate(asks)]
    outcome = tiny_stand.run([*copying, *others], ahead=True, on=(name,), settings={name: {"adaptive": False}})
    assert outcome.counters[f"{name}.accepted_tokens"] > 10
    assert outcome.ahead > 20
    same(outcome.answers, [*truth, *alone], "beside one that speculates")
