from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from worker_fakes import (
    ALL,
    BLOCK,
    SEEN,
    VOCAB,
    Counter,
    Driver,
    FakeModel,
    Faulty,
    Spec,
    loaded,
    reference_greedy,
)

from tokenbus.core.errors import WorkerError
from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo
from tokenbus.testing.model import STATES, logits_table, prefix_hash

PROMPT = [5, 9, 33, 2, 17, 40, 41, 8, 8, 60, 1]
RICH = {
    "temperature": 0.9, "seed": 123, "frequency_penalty": 1.0, "repetition_penalty": 1.3, "top_k": 30, "top_p": 0.95,
    "logprobs": 3, "min_tokens": {"count": 5, "banned": [0]},
}  # fmt: skip


def alone(prompt=PROMPT, new=10, **options) -> Spec:
    spec = Spec("solo", prompt, new, **options)
    Driver([spec]).run(loaded())
    return spec


def test_greedy_follows_the_model():
    assert alone().output == reference_greedy(PROMPT, 10)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 7, 100])
def test_chunk_borders_change_nothing(chunk):
    assert alone(chunk=chunk, **RICH).tokens == alone(**RICH).tokens


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_preempted_and_resumed_gives_the_same(at):
    once, plain = alone(chunk=4, preempt_at=at, **RICH), alone(**RICH)
    assert once.output == plain.output
    assert once.logprobs == plain.logprobs


def test_batch_mates_change_nothing():
    specs = [Spec(f"r{i}", [*PROMPT[: 1 + i % 9], i], 6 + i % 5, chunk=1 + i % 4, **(RICH if i % 2 else {})) for i in range(32)]
    Driver(specs).run(loaded())
    for i, spec in enumerate(specs):
        solo = Spec("solo", spec.prompt, spec.new, **(RICH if i % 2 else {}))
        Driver([solo]).run(loaded())
        assert (spec.output, spec.logprobs) == (solo.output, solo.logprobs)


def test_partial_chunks_sample_nothing():
    spec = Spec("a", PROMPT, 2, chunk=4)
    driver, model = Driver([spec]), FakeModel()
    driver.run(loaded(model=model))
    assert [list(r.sampled) for r in driver.results] == [[], [], ["a"], ["a"]]
    assert model.head_rows == [1, 1]
    assert model.batches == [4, 4, 3, 1]


@pytest.mark.parametrize("chunk", [4, 40])
def test_stateful_processor_sees_each_token_once(chunk):
    """C29: also after preemption, none for partial chunks."""
    features = (*ALL, "test.counter")
    spec = Spec("a", PROMPT, 10, chunk=chunk, preempt_at=5, features=features, **RICH)
    driver, runner = Driver([spec]), loaded(features)
    driver.run(runner)
    assert spec.output == alone(**RICH).output
    assert runner._requests["a"].stash[SEEN] == spec.tokens[:-1]
    assert Counter.info.name in runner.plugins.host.loaded


def test_plan_ahead_of_the_result():
    """The next plan counts on the token that the worker appends itself."""
    spec = Spec("a", PROMPT, 2)
    driver, runner = Driver([spec]), loaded()
    driver.take(order := driver.plan(), runner.run(order))
    tokens = [runner.run(StepInput(step_id=9 + i, num_tokens={"a": 1})).sampled["a"][0] for i in range(1)]
    assert spec.output + tokens == reference_greedy(PROMPT, 2)


# ---- prompt logprobs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [5, 32, 33, 1000])
def test_prompt_logprobs(chunk):
    prompt = [(7 * i) % VOCAB for i in range(80)]
    model, spec = FakeModel(), Spec("a", prompt, 1, chunk=chunk, prompt_logprobs=2)
    Driver([spec]).run(loaded(model=model))
    assert [e.token_id for e in spec.prompt_logprobs] == prompt[1:]
    assert max(model.head_rows) <= 32
    table = logits_table(VOCAB).astype(np.float64)
    for position, entry in enumerate(spec.prompt_logprobs, start=1):
        row = table[prefix_hash(prompt[:position])]
        reference = row - np.log(np.exp(row).sum())
        assert entry.logprob == pytest.approx(reference[prompt[position]], abs=1e-5)
        assert entry.top_ids == np.argsort(-row, kind="stable")[:2].tolist()
    assert spec.logprobs == []


def test_one_token_prompt_has_no_prompt_entries():
    spec = Spec("a", [5], 1, prompt_logprobs=0)
    Driver([spec]).run(loaded())
    assert (spec.prompt_logprobs, len(spec.output)) == ([], 1)


# ---- failures -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["worker_request_added", "adjust_logits", "filter_logits", "token_logprobs"])
def test_a_failing_plugin_ends_its_request_alone(hook):
    features = (*ALL, "test.faulty")
    specs = [Spec(f"r{i}", PROMPT[i:], 5, features=features, test_fault="no", **RICH) for i in range(6)]
    specs[2].fields = {**specs[2].fields, "test_fault": hook}
    Faulty.calls = 0
    driver, runner = Driver(specs), loaded(features)
    driver.run(runner)
    guilty = specs.pop(2)
    assert (guilty.error.plugin, guilty.error.hook, guilty.error.kind) == ("test.faulty", hook, "PluginError")
    assert (guilty.error.request_id, guilty.output) == ("r2", [])
    assert Faulty.calls > 0
    for spec in specs:
        assert spec.output == alone(spec.prompt, 5, **RICH).output
    assert "r2" not in runner._requests


def test_a_failed_request_that_is_planned_again_fails_again():
    features = (*ALL, "test.faulty")
    spec = Spec("a", PROMPT, 5, features=features, test_fault="adjust_logits")
    driver, runner = Driver([spec]), loaded(features)
    first = runner.run(driver.plan())
    again = runner.run(StepInput(step_id=1, num_tokens={"a": 1}))
    assert first.errors["a"] == again.errors["a"]
    assert again.sampled == {}
    runner.run(StepInput(step_id=2, num_tokens={}, dropped=["a"]))
    assert (runner._failed, runner._requests) == ({}, {})


def test_a_row_of_nan_is_its_requests_error():
    model = FakeModel()
    model.table = model.table.clone()
    model.table[prefix_hash(PROMPT)] = float("nan")
    specs = [Spec("bad", PROMPT, 4), Spec("good", PROMPT[:4], 4)]
    Driver(specs).run(loaded(model=model))
    assert (specs[0].error.kind, specs[0].output) == ("WorkerError", [])
    assert specs[1].output == reference_greedy(PROMPT[:4], 4)


def test_masks_that_leave_nothing_are_the_clients_error():
    specs = [Spec("bad", PROMPT, 4, allowed_token_ids=[5], min_tokens={"count": 1, "banned": [5]}), Spec("good", PROMPT, 4)]
    Driver(specs).run(loaded())
    assert (specs[0].error.kind, specs[0].output) == ("RequestError", [])
    assert specs[1].output == reference_greedy(PROMPT, 4)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (StepInput(step_id=0, num_tokens={"ghost": 1}), "unknown"),
        (StepInput(step_id=0, num_tokens={"a": 3}), "11 of 12"),
        (StepInput(step_id=0, num_tokens={"a": 0}), "0 tokens"),
    ],
)
def test_an_impossible_order_is_that_requests_error(order, reason):
    driver, runner = Driver([Spec("a", PROMPT, 5)]), loaded()
    driver.take(first := driver.plan(), runner.run(first))
    (error,) = runner.run(order).errors.values()
    assert reason in error.message


def test_too_few_blocks_is_an_error():
    driver, runner = Driver([Spec("a", PROMPT, 9)]), loaded()
    driver.take(order := driver.plan(), runner.run(order))
    runner.run(StepInput(step_id=1, num_tokens={"a": 1}))
    assert "13 are to be written" in runner.run(StepInput(step_id=2, num_tokens={"a": 1})).errors["a"].message


def test_a_failing_forward_is_a_worker_error():
    class Broken(FakeModel):
        def forward(self, batch, kv, attention):
            raise RuntimeError("no")

    with pytest.raises(WorkerError, match=r"step 0 failed: RuntimeError: no"):
        loaded(model=Broken()).run(Driver([Spec("a", PROMPT)]).plan())


# ---- switches, numbers ----------------------------------------------------------------------------------------------------------


def test_switched_off_plugins_stay_for_those_admitted_with_them():
    runner, spec = loaded(), Spec("a", PROMPT, 6, **RICH)
    driver = Driver([spec])
    driver.take(order := driver.plan(), runner.run(order))
    runner.run(StepInput(step_id=5, num_tokens={}, features=("test.attention",)))
    assert "sampling.penalties" in runner.plugins.host.loaded
    driver.run(runner)
    assert spec.output == alone(new=6, **RICH).output
    runner.run(StepInput(step_id=99, num_tokens={}, dropped=["a"]))
    assert set(runner.plugins.host.loaded) == {"test.attention"}
    runner.run(StepInput(step_id=100, num_tokens={}, features=ALL))
    assert set(runner.plugins.host.loaded) == set(ALL)


def test_plugins_that_are_off_come_for_one_request_and_go_with_it():
    few = ("test.attention",)
    specs = [Spec("rich", PROMPT, 6, **RICH), Spec("plain", PROMPT, 9, features=few)]
    runner, driver = loaded(few), Driver(specs)
    driver.run(runner)
    assert specs[0].output == alone(new=6, **RICH).output
    assert specs[1].output == reference_greedy(PROMPT, 9)
    runner.run(StepInput(step_id=99, num_tokens={}, dropped=["rich"]))
    assert set(runner.plugins.host.loaded) == set(few)


def test_lossless_switches_reach_running_requests():
    runner, spec = loaded(), Spec("a", PROMPT, 6, logprobs=1)
    driver = Driver([spec])
    driver.take(order := driver.plan(), runner.run(order))
    runner.run(StepInput(step_id=5, num_tokens={}, features=(*ALL, "test.counter")))
    driver.take(order := driver.plan(), runner.run(order))
    assert runner._requests["a"].stash[SEEN] == spec.tokens[:-1]
    off = tuple(name for name in ALL if name != "sampling.logprobs")
    runner.run(StepInput(step_id=6, num_tokens={}, features=off))
    assert "test.counter" not in runner.plugins.host.loaded
    driver.run(runner)
    assert spec.output == reference_greedy(PROMPT, 6)
    assert len(spec.logprobs) == 6  # it uses the field: it keeps the plugin
    runner.run(StepInput(step_id=7, num_tokens={}, dropped=["a"]))
    assert "sampling.logprobs" not in runner.plugins.host.loaded


def test_settings_that_change_live_reach_the_workers_plugins_loaded_now_or_later():
    class Adjustable(Plugin):
        class Settings(msgspec.Struct, frozen=True):
            strength: int = 1

        info = PluginInfo(name="test.adjustable", summary="", scope="step", lossless=True, live_settings=("strength",))

    runner = loaded()
    runner.plugins.host.add(Adjustable)
    on = (*ALL, "test.adjustable")
    runner.run(StepInput(step_id=0, num_tokens={}, settings={"test.adjustable": {"strength": 2}}))
    runner.run(StepInput(step_id=1, num_tokens={}, features=on))
    plugin = runner.plugins.host.loaded["test.adjustable"]
    assert plugin.settings.strength == 2
    runner.run(StepInput(step_id=2, num_tokens={}, settings={"test.adjustable": {"strength": 3}}))
    assert (runner.plugins.host.loaded["test.adjustable"] is plugin, plugin.settings.strength) == (True, 3)


def test_a_plugin_that_cannot_be_loaded_fails_the_step_and_changes_nothing():
    class Unloadable(Plugin):
        info = PluginInfo(name="test.unloadable", summary="", scope="step", lossless=True)

        def __init__(self, settings, role):
            raise ValueError("no")

    runner = loaded()
    runner.plugins.host.add(Unloadable)
    with pytest.raises(WorkerError, match="unloadable"):
        runner.run(StepInput(step_id=0, num_tokens={}, features=(*ALL, "test.unloadable")))
    assert runner.plugins.features == frozenset(ALL)
    specs = [Spec("a", PROMPT, 2, features=(*ALL, "test.unloadable")), Spec("b", PROMPT, 2)]
    Driver(specs).run(runner)
    assert (specs[0].error.kind, specs[1].output) == ("PluginLoadError", reference_greedy(PROMPT, 2))


def test_more_rows_than_a_tile():
    model = FakeModel()
    specs = [Spec(f"r{i}", [i % 60, i // 60, 5], 2) for i in range(130)]
    driver = Driver(specs)
    driver.run(loaded(model=model))
    assert model.head_rows == [128, 2] * 2
    assert all(spec.output == reference_greedy(spec.prompt, 2) for spec in specs)
    assert driver.results[0].bytes_moved == 1000 + 4 * 50 + 130 * 8 * 6


def test_with_every_sampling_plugin_off_the_fields_do_nothing():
    assert alone(features=("test.attention",), **{**RICH, "temperature": 0.0}).output == reference_greedy(PROMPT, 10)


@pytest.mark.usefixtures("measures")
def test_info_and_counts():
    runner = loaded()
    info = runner.load()
    assert (info.architecture, info.vocab_size, info.dtype, info.kv_bytes_per_token) == ("Fake", VOCAB, "float32", 8)
    assert (info.lossless, info.lossless_reason) == (False, "a table")
    assert info.free_bytes > 1 << 20
    assert min(info.read_bytes_per_second, info.flops_per_second) > 1e6
    assert list(info.phases) == ["plugins", "weights", "probe", "limits"]
    driver = Driver([Spec("a", PROMPT, 2)])
    driver.run(runner)
    first, second = driver.results
    assert first.flops == 2 * (200 * 11 + 50) + 4 * 2 * (11 * 12 // 2)
    assert second.flops == 2 * (200 + 50) + 4 * 2 * 12
    assert (first.bytes_moved, second.bytes_moved) == (1000 + 8 * 22, 1000 + 8 * (11 + 2))
    assert set(first.phases) == {"prepare", "forward", "logits", "sample", "cpu"}


def test_kv_is_zero_and_aligned():
    runner = loaded()
    assert runner._kv is not None
    (keys,) = runner._kv.k
    assert keys.shape == (512, BLOCK, 1, 1)
    assert keys.data_ptr() % 64 == 0
    assert not torch.any(keys)


def test_fake_model_has_distinct_rows():
    assert logits_table(VOCAB).shape == (STATES, VOCAB)
