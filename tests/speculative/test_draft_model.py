"""A draft model: the same answers, its K/V in the pool's blocks, hits that count only where its K/V is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tokenbus.core.config import CacheConfig, Config, FeaturesConfig, ModelConfig
from tokenbus.core.errors import ConflictError, ModelError
from tokenbus.core.host import make_host
from tokenbus.core.selftest.stand import Ask, Stand
from tokenbus.core.selftest.tiny import truncate

NAME = "speculative.draft_model"
BLOCK = 16


def make_stand(model, draft, **settings):
    config = Config(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=512),
        cache=CacheConfig(block_size=BLOCK),
        plugins={NAME: {"model": str(draft), "adaptive": False, **settings}},
    )
    return Stand(config, (NAME,))


@pytest.fixture(scope="module")
def stand(tiny, shorter):
    return make_stand(tiny, shorter)


@pytest.fixture(scope="module")
def twins(tiny):
    """The model drafts for itself."""
    return make_stand(tiny, tiny)


def prompt(length, seed=1):
    draw = random.Random(seed * 1000 + length)
    return [draw.randrange(8, 250) for _ in range(length)]


FIELDS = {"ignore_eos": True, "logprobs": 1}
KINDS = [
    Ask(prompt=[], max_tokens=40, fields=FIELDS),
    Ask(prompt=[], max_tokens=40, temperature=0.9, seed=4, fields=FIELDS),
    Ask(prompt=[], max_tokens=40, temperature=0.7, seed=5, choice=1, fields=FIELDS | {"top_p": 0.8, "frequency_penalty": 0.5}),
]


def asks(lengths):
    return [replace(kind, prompt=prompt(length, seed)) for seed, kind in enumerate(KINDS) for length in lengths]


def alone(stand, some):
    plain = [replace(ask, without=(NAME,), at_step=0) for ask in some]
    return [stand.run([ask], off=("prefix_cache", "chunked_prefill")).answers[0] for ask in plain]


def drafter(stand):
    return stand.runner.plugins.sides[0]


def same(outcome, truth):
    for index, (got, want) in enumerate(zip(outcome.answers, truth, strict=True)):
        assert got.same(want), f"request {index}: {got} instead of {want}"


def counts(outcome):
    return outcome.counters.get(f"{NAME}.proposed_tokens", 0), outcome.counters.get(f"{NAME}.accepted_tokens", 0)


def test_a_model_that_drafts_for_itself_is_always_right(twins):
    """Greedy and sampled: the draws are shared by position. Filters and penalties, which it does not apply, make it err."""
    some = asks((1, 15, 16, 17, 40))[:10]
    truth = alone(twins, some)
    for batch in ([ask] for ask in some):
        outcome = twins.run(batch)
        proposed, accepted = counts(outcome)
        assert proposed == accepted > 20
        assert outcome.steps < 10
        same(outcome, [truth[some.index(batch[0])]])
    outcome = twins.run(some)
    assert counts(outcome)[0] == counts(outcome)[1]
    same(outcome, truth)


def test_a_shorter_one_errs_and_changes_nothing(stand):
    some = asks((1, 14, 15, 16, 33, 70))
    outcome = stand.run(some)
    proposed, accepted = counts(outcome)
    assert 0 < accepted < proposed
    same(outcome, alone(stand, some))


def test_chunks_hits_and_preemption(stand):
    some = [replace(ask, at_step=3 * index) for index, ask in enumerate(asks((12, 33, 33, 48, 70)))]
    truth = alone(stand, some)
    outcome = stand.run(some, chunk=7, blocks=24, max_running=6, token_budget=40)
    proposed, accepted = counts(outcome)
    assert 0 < accepted < proposed
    assert outcome.chunks > len(some)
    assert outcome.preempted > 0
    assert any(answer.cached for answer in outcome.answers)
    same(outcome, truth)


def test_more_requests_than_draft_together(stand):
    some = [replace(KINDS[1], prompt=prompt(9, seed), seed=seed, max_tokens=12) for seed in range(40)]
    outcome = stand.run(some)
    assert counts(outcome)[1] > 0
    same(outcome, alone(stand, some))


def test_a_hit_brings_the_drafts_kv_or_has_it_computed(twins, monkeypatch):
    """Whether the cached blocks were filled with this plugin or without it: drafts are right, and only what lacks is run."""
    ran = []
    real = type(drafter(twins))._run

    def spy(self, jobs):
        ran.append([(job.state.filled, job.end) for job in jobs])
        real(self, jobs)

    monkeypatch.setattr(type(drafter(twins)), "_run", spy)
    shared = prompt(64, seed=9)
    first, second = (
        Ask(prompt=[*shared, 30], max_tokens=9, fields=FIELDS),
        Ask(prompt=[*shared, 40], max_tokens=9, fields=FIELDS),
    )
    outcome = twins.run([first, replace(second, at_step=30)])
    assert outcome.answers[1].cached == 64
    starts = [start for jobs in ran for start, _ in jobs]
    assert starts[0] == 0
    assert starts.count(0) == 1, "the second request's drafts began with K/V that was there"
    assert 64 in starts
    assert counts(outcome)[0] == counts(outcome)[1] > 0

    ran.clear()
    drafter_off = replace(first, without=(NAME,))
    outcome = twins.run([drafter_off, replace(second, at_step=30)])
    assert outcome.answers[1].cached == 64
    assert next(start for jobs in ran for start, _ in jobs) == 0, "K/V of the first request is not the draft model's"
    assert counts(outcome)[0] == counts(outcome)[1] > 0


def test_catching_up_takes_several_steps(tiny, twins):
    """A long prefix that was cached without drafts: a few tokens a step, and no drafts until it is done."""
    slow = make_stand(tiny, tiny, catch_up_tokens=20)
    shared = prompt(160, seed=3)
    first = Ask(prompt=shared, max_tokens=1, fields=FIELDS, without=(NAME,))
    second = Ask(prompt=[*shared, 9], max_tokens=30, fields=FIELDS, at_step=10)
    outcome = slow.run([first, second])
    quick = twins.run([first, second])
    assert outcome.answers[1].cached == quick.answers[1].cached == 160
    same(outcome, quick.answers)
    assert outcome.steps - quick.steps >= 5
    assert counts(outcome)[0] == counts(outcome)[1] > 0


def test_adaptive_stops_where_drafts_are_wrong(tiny, shorter):
    stand = make_stand(tiny, shorter, adaptive=True)
    ask = Ask(prompt=prompt(20, seed=6), max_tokens=300, temperature=3.0, seed=8, fields=FIELDS)
    outcome = stand.run([ask])
    assert 0 < counts(outcome)[0] < 600, "of some 2300 without adaptation; how many exactly is a matter of measured times"
    same(outcome, alone(stand, [ask]))


def test_its_kv_is_part_of_the_same_budget(tiny, stand, twins):
    plain = Stand(
        Config(model=ModelConfig(model=str(tiny), dtype="float32", max_model_len=512), cache=CacheConfig(block_size=BLOCK))
    )
    per_layer = plain.info.kv_bytes_per_token // 3
    assert twins.info.kv_bytes_per_token == 6 * per_layer
    assert stand.info.kv_bytes_per_token == 5 * per_layer
    assert twins.info.weights_bytes == 2 * plain.info.weights_bytes
    assert drafter(stand).fixed_bytes > 0


def test_a_model_of_another_vocabulary_is_refused(tiny, tmp_path):
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny, vocab_size=200)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="can't draft: it has 200 token ids, the served model 256"):
        make_stand(tiny, tmp_path)


def test_without_a_model_the_server_does_not_start(tiny):
    config = Config(model=ModelConfig(model=str(tiny), dtype="float32"))
    with pytest.raises(
        ModelError, match=r'it needs a smaller model to draft with: \[plugins\."speculative.draft_model"\] model'
    ):
        Stand(config, (NAME,))


@pytest.mark.long
def test_the_demo_with_a_layer_truncated_copy(tmp_path):
    """Real text, a tokenizer on both sides: some drafts are right and some are not, alone and beside `ngram`."""
    stand = make_stand("demo", truncate("demo", 24, tmp_path), max_drafts=4)
    draw = random.Random(7)
    passage = [draw.randrange(100, 40000) for _ in range(20)]
    some = [Ask(prompt=passage * 3, max_tokens=24, fields=FIELDS)]
    some += [Ask(prompt=passage * 2 + passage[:7], max_tokens=16, temperature=0.7, seed=2, fields=FIELDS)]
    truth = alone(stand, some)
    for on in ((), ("speculative.ngram",)):
        outcome = stand.run(some, on=on)
        proposed, accepted = counts(outcome)
        assert 0 < accepted < proposed
        same(outcome, truth)


def test_a_model_that_is_not_there_is_named(tiny, tmp_path):
    with pytest.raises(ModelError, match=r"tiny.* can't be run with speculative.draft_model: it can't draft with '.*nothing'"):
        make_stand(tiny, tmp_path / "nothing")


def test_it_can_be_switched_live_only_if_it_was_on_at_start():
    off = make_host("engine", Config())
    with pytest.raises(
        ConflictError, match=r"memory that is shared out at start: restart with --enable speculative.draft_model"
    ):
        off.change_switches(off.start_switches(), {NAME: True})
    on = make_host("engine", Config(features=FeaturesConfig(enable=(NAME,))))
    switches = on.change_switches(on.start_switches((NAME,)), {NAME: False})
    assert NAME not in switches.on
    assert NAME in on.change_switches(switches, {NAME: True}).on


@pytest.mark.parametrize("process", [False, True])
def test_an_engine_that_dies_and_a_worker_of_its_own(tiny, tmp_path, process):
    """What the draft model knew is gone, and is computed again; its drafts go on being right, mostly."""
    stand = make_stand(tiny, truncate(str(tiny), None, tmp_path, noise=0.01))
    some = [replace(ask, fatal_at=9 * (index == 2)) for index, ask in enumerate(asks((9, 31, 40)))]
    with stand:
        truth = alone(stand, [replace(ask, fatal_at=0) for ask in some])
        outcome = stand.run(some, process=process, chunk=11)
        assert outcome.deaths == 1
        assert sum(answer.resumed for answer in outcome.answers) > 0
        proposed, accepted = counts(outcome)
        assert 0 < accepted < proposed
        same(outcome, truth)
