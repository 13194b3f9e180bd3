"""Switches that change speed, never answers: ids and logprobs, bit by bit, under every combination that may not matter."""

from __future__ import annotations

import random

import pytest
from equivalence_stand import Answer, Ask

KINDS = {
    "greedy": {"fields": {"logprobs": 3}},
    "seeded": {"temperature": 0.9, "seed": 11, "fields": {"logprobs": 2}},
    "truncated": {"temperature": 1.3, "seed": 12, "fields": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 1}},
    "penalties": {
        "temperature": 0.7,
        "seed": 13,
        "fields": {"repetition_penalty": 1.3, "frequency_penalty": 0.8, "presence_penalty": 0.4, "logprobs": 1},
    },
    "bias": {"temperature": 0.8, "seed": 14, "fields": {"logit_bias": {"9": 4.0, "10": -100}, "min_tokens": 4, "logprobs": 1}},
    "choice": {"temperature": 1.0, "seed": 11, "choice": 2, "fields": {"logprobs": 1}},
}
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 70, 100)
OFF = ("chunked_prefill", "prefix_cache")


def prompts(lengths, seed=1):
    draw = random.Random(seed)
    return [[draw.randrange(20, 250) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def asks():
    """Every kind of sampling at every length."""
    return [Ask(prompt=prompt, max_tokens=12, **kind) for kind in KINDS.values() for prompt in prompts(LENGTHS)]


@pytest.fixture(scope="module")
def alone(tiny_stand, asks):
    """Each request by itself, whole prompt, no cache, one thread, a pool without limits: what every other way must repeat."""
    answers = []
    for ask in asks:
        outcome = tiny_stand.run([ask], off=OFF, threads=1)
        assert outcome.largest_batch == 1
        answers += outcome.answers
    return answers


def same(answers, expected, where):
    for index, (answer, truth) in enumerate(zip(answers, expected, strict=True)):
        assert answer.tokens == truth.tokens, f"{where}: ids of request {index} differ"
        assert answer.logprobs == truth.logprobs, f"{where}: logprobs of request {index} differ"
        assert answer.prompt_logprobs == truth.prompt_logprobs, f"{where}: prompt logprobs of request {index} differ"
        assert answer.reason == truth.reason


def test_the_baseline_is_not_trivial(alone):
    assert len({tuple(answer.tokens) for answer in alone}) > len(alone) // 2
    assert all(answer.logprobs for answer in alone if answer.tokens)


def test_with_the_cpu_kernels_every_step_is_one_call(tiny_stand, kernels, asks):
    """Also through what guards a plugin's attention backend; per layer it would be right, and half as fast."""
    fused = getattr(tiny_stand.runner._model, "_fused", None)
    assert (fused is not None) == (kernels == "cpu")
    if fused is not None:
        before = fused.steps
        outcome = tiny_stand.run(asks[:3])
        assert fused.steps - before == outcome.steps


@pytest.mark.parametrize("threads", [1, 2])
def test_batch_mates(tiny_stand, asks, alone, threads):
    outcome = tiny_stand.run(asks, off=OFF, threads=threads)
    assert outcome.largest_batch > 30
    same(outcome.answers, alone, "all at once")


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunk_borders(tiny_stand, asks, alone, chunk):
    some = slice(None, None, 4 if chunk == 1 else 1)
    outcome = tiny_stand.run(asks[some], off=("prefix_cache",), chunk=chunk)
    assert outcome.chunks > len(asks[some])
    same(outcome.answers, alone[some], f"chunks of {chunk}")


def test_the_adaptive_chunk(tiny_stand, asks, alone):
    same(tiny_stand.run(asks, off=("prefix_cache",), token_budget=64).answers, alone, "adaptive chunks, small budget")


def test_prefix_cache_hits(tiny_stand, asks, alone):
    """Every prompt comes once per kind, so all but the first find its full blocks."""
    arriving = [Ask(**(vars(ask) | {"at_step": 3 * index})) for index, ask in enumerate(asks)]
    outcome = tiny_stand.run(arriving)
    assert sum(answer.cached for answer in outcome.answers) > 100
    assert all(answer.cached % 16 == 0 for answer in outcome.answers)
    assert all(answer.cached < len(ask.prompt) for answer, ask in zip(outcome.answers, asks, strict=True))
    same(outcome.answers, alone, "cached")


@pytest.fixture(scope="module")
def growing():
    """Short prompts that grow by several blocks: they are admitted together and then run out of room."""
    made = [Ask(prompt=prompt, max_tokens=40, **kind) for kind in KINDS.values() for prompt in prompts((12, 13, 14, 15))]
    return [Ask(**(vars(ask) | {"fields": ask.fields | {"ignore_eos": True}})) for ask in made]


@pytest.fixture(scope="module")
def growing_alone(tiny_stand, growing):
    return [tiny_stand.run([ask], off=OFF, threads=1).answers[0] for ask in growing]


@pytest.mark.parametrize("off", [(), ("prefix_cache",), ("chunked_prefill",), OFF])
def test_preemption(tiny_stand, growing, growing_alone, off):
    outcome = tiny_stand.run(growing, off=off, blocks=17)
    assert outcome.preempted > 3
    assert max(answer.preemptions for answer in outcome.answers) < 20
    same(outcome.answers, growing_alone, f"preempted, off: {off}")


def test_everything_at_once(tiny_stand, asks, alone, growing, growing_alone):
    arriving = [Ask(**(vars(ask) | {"at_step": 2 * (index % 17)})) for index, ask in enumerate([*growing, *asks])]
    outcome = tiny_stand.run(arriving, chunk=5, blocks=14, max_running=7, token_budget=24)
    assert outcome.preempted > 0
    assert sum(answer.cached for answer in outcome.answers) > 0
    same(outcome.answers, [*growing_alone, *alone], "chunked, cached, preempted, few at a time")


@pytest.mark.parametrize("policy", ["scheduling.two_phase", "scheduling.static"])
def test_how_batches_are_made(tiny_stand, growing, growing_alone, policy):
    """In a pool that unified batches overflow; static ones pad rows with drafts, of which an answer shows nothing."""
    arriving = [
        Ask(**(vars(ask) | {"at_step": index % 7, "max_tokens": 40 - 8 * (index % 5)})) for index, ask in enumerate(growing)
    ]
    short = [
        Answer(**(vars(answer) | {"tokens": answer.tokens[: ask.max_tokens], "logprobs": answer.logprobs[: ask.max_tokens]}))
        for ask, answer in zip(arriving, growing_alone, strict=True)
    ]
    outcome = tiny_stand.run(arriving, on=(policy,), chunk=16, blocks=17, token_budget=48)
    same(outcome.answers, short, policy)
    if policy == "scheduling.static":
        assert outcome.preempted == 0
        assert outcome.counters["scheduling.static.proposed_tokens"] > 50
    else:
        assert outcome.preempted > 0


def test_live_swaps_of_how_batches_are_made(tiny_stand, growing, growing_alone):
    order = ["scheduling.static", "scheduling.two_phase", "scheduling.unified", "scheduling.priority", "scheduling.static"]
    changes = {3 + 9 * index: {name: True} for index, name in enumerate(order)}
    arriving = [Ask(**(vars(ask) | {"at_step": 2 * index})) for index, ask in enumerate(growing)]
    outcome = tiny_stand.run(arriving, blocks=30, token_budget=48, changes=changes)
    assert outcome.steps > max(changes)
    same(outcome.answers, growing_alone, "swapped live")


def test_prompt_logprobs_do_not_depend_on_chunks_or_preemption(tiny_stand):
    wanted = {"prompt_logprobs": 2, "logprobs": 2, "ignore_eos": True}
    asks = [Ask(prompt=p, max_tokens=50, fields=wanted) for p in prompts((2, 17, 15, 15, 14, 40, 64, 90))]
    truth = [tiny_stand.run([ask], off=OFF).answers[0] for ask in asks]
    assert [len(t.prompt_logprobs) for t in truth] == [1, 16, 14, 14, 13, 39, 63, 89]
    same(tiny_stand.run(asks, chunk=7).answers, truth, "chunks of 7")
    tight = tiny_stand.run(asks, chunk=11, blocks=14)
    assert tight.preempted > 0
    same(tight.answers, truth, "chunked and preempted")


@pytest.mark.slow
def test_every_chunk_size(tiny_stand):
    prompt = prompts((300,))[0]
    ask = Ask(prompt=prompt, max_tokens=3, fields={"logprobs": 3})
    truth = tiny_stand.run([ask], off=OFF).answers
    for chunk in [*range(1, 36), 47, 48, 63, 64, 65, 100, 127, 128, 129, 255, 299, 300, 512]:
        same(tiny_stand.run([ask], off=("prefix_cache",), chunk=chunk).answers, truth, f"chunks of {chunk}")
