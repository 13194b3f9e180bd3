"""The determinism contract on the demo model in float32: alone, among 31 others, chunked, cached, preempted."""

from __future__ import annotations

import random

import pytest
from equivalence_stand import Ask

pytestmark = pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
OFF = ("chunked_prefill", "prefix_cache")


@pytest.fixture(scope="module")
def asks():
    draw = random.Random(3)
    made = []
    for index in range(32):
        prompt = [draw.randrange(100, 40000) for _ in range(draw.choice((5, 15, 16, 17, 32, 33, 48, 90)))]
        kind = {"temperature": 0.8, "seed": index} if index % 2 else {}
        made.append(Ask(prompt=prompt, max_tokens=10, fields={"logprobs": 2}, **kind))
    return made


@pytest.fixture(scope="module")
def together(demo_stand, asks):
    outcome = demo_stand.run(asks, off=OFF)
    assert outcome.largest_batch == 32
    return outcome.answers


def bits(answers):
    return [(answer.tokens, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("index", [0, 1, 8, 17, 30])
def test_alone_is_as_among_31_others(demo_stand, asks, together, index):
    threads = 1 if index == 1 else 2
    assert bits(demo_stand.run([asks[index]], off=OFF, threads=threads).answers) == bits([together[index]])


def test_chunked(demo_stand, asks, together):
    outcome = demo_stand.run(asks, off=("prefix_cache",), chunk=40)
    assert outcome.chunks > 40
    assert bits(outcome.answers) == bits(together)


def test_cached(demo_stand, asks, together):
    twice = [*asks[:8], *(Ask(**(vars(ask) | {"at_step": 12})) for ask in asks[:8])]
    outcome = demo_stand.run(twice)
    assert bits(outcome.answers) == bits([*together[:8], *together[:8]])
    assert sum(answer.cached for answer in outcome.answers[8:]) > 0


def test_preempted(demo_stand, asks):
    growing = [
        Ask(
            prompt=asks[index].prompt[:15],
            max_tokens=22,
            temperature=0.5,
            seed=index,
            fields={"logprobs": 2, "ignore_eos": True},
        )
        for index in (1, 4, 5, 6)
    ]
    roomy = demo_stand.run(growing, off=("prefix_cache",))
    tight = demo_stand.run(growing, off=("prefix_cache",), blocks=8)
    assert roomy.preempted == 0
    assert tight.preempted > 0
    assert bits(tight.answers) == bits(roomy.answers)
