"""Simulations of recordings whose steps took what a known formula says: then the answers are known, too."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.core.config import Config
from tokenbus.core.errors import ConfigError
from tokenbus.core.host import PluginHost, make_host
from tokenbus.core.recording import ask
from tokenbus.core.recording.file import RecordingError
from tokenbus.core.recording.report import numbers
from tokenbus.core.recording.simulate import Simulation, recorded
from tokenbus.core.recording.step_time import StepTimes
from tokenbus.core.recording.what_if import Questions


@pytest.fixture(scope="module")
def catalogue():
    return make_host("engine", Config()).catalogue


def course(history, catalogue, *wishes):
    host = PluginHost("engine")
    host.catalogue.update(catalogue)
    return Simulation(history, Questions(history.header, host).ask(wishes), StepTimes(history.steps), catalogue).run()


@pytest.mark.parametrize("level", ["shape", "full"])
def test_with_unchanged_settings_every_plan_and_every_time_comes_out_again(stage, some_load, catalogue, level):
    one = stage(level=level, scheduler={"max_running": 6, "token_budget": 40}, num_blocks=60)
    one.play(some_load(120, 12.0, shared=24))
    history = one.history()
    real, found = recorded(history), course(history, catalogue)
    assert found.step_ids == real.step_ids
    assert sum(served.preemptions for served in real.served) > 0
    assert sum(served.cached for served in real.served) > 0
    before, after = numbers(real), numbers(found)
    assert after == pytest.approx(before, rel=1e-6)


def test_drafts_are_right_as_often_and_in_the_same_places(stage, some_load, catalogue):
    one = stage(on=("chunked_prefill", "speculative.ngram", "recorder"))
    one.play(some_load(60, 10.0))
    history = one.history()
    assert any(life.drafted for life in history.lives.values())
    found = course(history, catalogue)
    assert found.step_ids == recorded(history).step_ids
    without = course(history, catalogue, "speculative.ngram=off")
    assert without.steps > found.steps
    assert all(set(step) <= set(range(1, 17)) for step in without.step_ids)
    fewer = course(history, catalogue, "max_drafts=1")
    assert found.steps < fewer.steps < without.steps
    assert numbers(without)["output_tokens"] == numbers(fewer)["output_tokens"] == numbers(found)["output_tokens"]


@pytest.mark.parametrize(
    ("wish", "same", "other"),
    [
        ("max_running=2", {}, {"scheduler": {"max_running": 2}}),
        ("token_budget=9", {}, {"scheduler": {"token_budget": 9}}),
        ("chunked_prefill.chunk_size=6", {}, {"settings": {"chunked_prefill": {"mode": "fixed", "chunk_size": 6}}}),
        ("prefix_cache=off", {}, {"on": ("chunked_prefill", "scheduling.fcfs", "recorder")}),
        ("num_blocks=40", {}, {"num_blocks": 40}),
        ("prefix_cache=on", {"on": ("chunked_prefill", "scheduling.fcfs", "recorder")}, {}),
    ],
)
def test_a_question_is_answered_as_a_real_run_with_these_settings_answers_it(stage, some_load, catalogue, wish, same, other):
    work = some_load(100, 9.0, shared=24)
    first = stage("first", **same)
    first.play(work)
    second = stage("second", **other)
    second.play(work)
    history = first.history()
    real, predicted = numbers(recorded(second.history())), numbers(course(history, catalogue, wish))
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2e_p99", "steps", "cached_share", "preemptions"):
        assert predicted[name] == pytest.approx(real[name], rel=0.03, abs=1e-3), name
    unchanged = numbers(recorded(history))
    assert predicted["ttft_p99"] != pytest.approx(unchanged["ttft_p99"], rel=0.01), "the question made no difference"


def test_priorities_decide_again_and_another_policy_decides_otherwise(stage, some_load, catalogue):
    one = stage(on=("chunked_prefill", "scheduling.priority", "recorder"), scheduler={"max_running": 2})
    work = some_load(60, 14.0)
    for i, asked in enumerate(work):
        asked.values["fields"] = {"priority": -10 * (i % 3 == 0)} if i % 3 == 0 else {}
    one.play(work)
    history = one.history()
    assert course(history, catalogue).step_ids == recorded(history).step_ids
    assert course(history, catalogue, "scheduling.fcfs=on").step_ids != recorded(history).step_ids


def test_who_was_cancelled_is_cancelled_at_the_same_token_or_the_same_time(stage, some_load, catalogue):
    one = stage(scheduler={"max_running": 3})
    work = some_load(40, 20.0)
    for i, asked in enumerate(work):
        if i % 4 == 0:
            asked.cancel_at = asked.at + (0.001 if i % 8 else 0.3)
    one.play(work)
    history = one.history()
    real, found = recorded(history), course(history, catalogue)
    outputs = [{one.serial: sum(n for _, n in one.emitted) for one in run.served} for run in (real, found)]
    assert outputs[0] == outputs[1]
    assert 0 in outputs[0].values()
    assert sum(one.reason == "cancelled" for one in real.served) > 3


def test_a_live_switch_is_made_again_when_it_was(stage, some_load, catalogue):
    one = stage()

    def switch(step):
        if step == 40 and "prefix_cache" in one.scheduler.switches.on:
            one.switch(prefix_cache=False)

    one.play(some_load(80, 10.0, shared=24), between=switch)
    history = one.history()
    assert any(step.step.features is not None for step in history.steps)
    found = course(history, catalogue)
    assert found.step_ids == recorded(history).step_ids
    assert 0 < numbers(found)["cached_share"] < numbers(course(history, catalogue, "prefix_cache=on"))["cached_share"]


def test_a_recording_that_begins_in_the_middle_is_simulated_and_says_so(stage, some_load, catalogue):
    one = stage(on=("chunked_prefill", "prefix_cache", "scheduling.fcfs"))

    def switch(step):
        if step == 30 and "recorder" not in one.scheduler.switches.on:
            one.switch(recorder=True)

    one.play(some_load(80, 14.0), between=switch)
    answer = ask.simulate(one.history(), (), catalogue)
    assert any("under way" in notice for notice in answer.notices)
    real, found = answer.columns[ask.RECORDED], answer.columns[ask.SAME]
    assert found["requests"] == real["requests"] < 80
    assert found["ttft_p99"] == pytest.approx(real["ttft_p99"], rel=0.25)


@pytest.mark.parametrize(
    ("wish", "why"),
    [
        ("attention.torch=on", "does not decide who runs when"),
        ("quantization.int8=on", "does not decide who runs when"),
        ("speculative.ngram=on", "was not on"),
        ("speculative.suffix.max_drafts=2", "what it would have proposed"),
        ("metrics.idle_alarm_fraction=1", "does not decide"),
        ("kernels=torch", "changes what a step takes"),
        ("model.threads=2", "changes what a step takes"),
        ("request_timeout=3", "before requests reach the engine"),
        ("max_drafts=64", "max_drafts was 32"),
        ("block_size=6", "in blocks of 4"),
        ("kv_memory_fraction=0.5", "free memory"),
        ("prefix_cache=maybe", "on or"),
        ("chunked_prefill.chunk=3", "no setting 'chunk'"),
        ("nonsense=3", "no setting and no plugin"),
        ("token_budget", "NAME=VALUE"),
        ("token_budget=many", "whole number"),
        ("enable=prefix_cache", "PLUGIN=on"),
    ],
)
def test_what_the_recording_cant_answer_is_refused_by_name_and_reason(stage, some_load, catalogue, wish, why):
    one = stage()
    one.play(some_load(5, 10.0))
    history = one.history()
    with pytest.raises(RecordingError, match=why) as refused:
        ask.simulate(history, (wish,), catalogue)
    assert wish in refused.value.message
    with pytest.raises(ConfigError, match="token_budget"):
        ask.simulate(history, ("token_budget=0",), catalogue)


def test_one_of_two_proposers_cant_be_switched_off_but_both_can(stage, some_load, catalogue):
    one = stage(on=("chunked_prefill", "speculative.ngram", "speculative.suffix", "recorder"))
    one.play(some_load(10, 10.0))
    history = one.history()
    with pytest.raises(RecordingError, match="whose drafts"):
        ask.simulate(history, ("speculative.ngram=off",), catalogue)
    answer = ask.simulate(history, ("speculative.ngram=off", "speculative.suffix=off"), catalogue)
    assert answer.columns[ask.WISHED]["steps"] > answer.columns[ask.SAME]["steps"]


def test_larger_blocks_and_memory_in_megabytes(stage, some_load, catalogue):
    one = stage(num_blocks=60)
    one.play(some_load(60, 9.0, shared=24))
    history = one.history()
    assert numbers(course(history, catalogue, "block_size=16"))["cached_share"] > 0
    assert numbers(course(history, catalogue, "kv_memory_mb=8"))["preemptions"] == 0


def test_steps_beyond_what_was_recorded_are_counted_and_told(stage, some_load, catalogue):
    one = stage(scheduler={"token_budget": 16})
    one.play(some_load(60, 9.0))
    answer = ask.simulate(one.history(), ("token_budget=500", "chunked_prefill=off"), catalogue)
    assert any("a guess" in notice for notice in answer.notices)


def test_a_token_budget_that_was_changed_meanwhile_is_told(stage, some_load, catalogue):
    one = stage()
    one.play(some_load(10, 9.0))
    history = one.history()
    assert ask.simulate(history, (), catalogue).notices == []
    history.steps[-1].step = msgspec.structs.replace(history.steps[-1].step, budget=77)
    (notice,) = ask.simulate(history, (), catalogue).notices
    assert "between 77 and 2048" in notice


def test_settings_that_were_changed_live_are_changed_again(stage, some_load, catalogue):
    one = stage(scheduler={"token_budget": 60})

    def between(step):
        if step == 40:
            one.configure({"scheduler.token_budget": 20, "scheduler.max_running": 2, "plugins.chunked_prefill.chunk_size": 8})
        elif step == 120:
            one.configure({"scheduler.token_budget": 60, "scheduler.max_running": 256})

    one.play(some_load(60, 9.0), between)
    history = one.history()
    assert [sorted(change.values) for change in history.changes] == [
        ["plugins.chunked_prefill.chunk_size", "scheduler.max_running", "scheduler.token_budget"],
        ["scheduler.max_running", "scheduler.token_budget"],
    ]
    same = course(history, catalogue)
    assert same.step_ids == recorded(history).step_ids
    assert ask.simulate(history, (), catalogue).notices == []
    asked = course(history, catalogue, "max_running=256", "token_budget=60", "chunked_prefill.chunk_size=16")
    assert max(map(len, asked.step_ids[40:120])) > 2 == max(map(len, same.step_ids[60:120]))
    assert asked.steps < same.steps


def bent(parts):
    """A machine on which steps of few rows wait for the weights, and many rows are cheaper by the row."""
    rows = sum(n for _, n in parts)
    attention = sum(n * (computed + n / 2) for computed, n in parts)
    return 0.001 + max(0.011, 0.0008 * rows**0.97) + 0.0003 * len(parts) + 4e-7 * attention


@pytest.mark.parametrize(
    ("wish", "other"),
    [
        ("max_running=3", {"scheduler": {"max_running": 3}}),
        ("chunked_prefill.slow_down=1.5", {"settings": {"chunked_prefill": {"mode": "adaptive", "slow_down": 1.5}}}),
        ("chunked_prefill=off", {"on": ("prefix_cache", "scheduling.fcfs", "recorder")}),
        ("prefix_cache=off", {"on": ("chunked_prefill", "scheduling.fcfs", "recorder")}),
    ],
)
def test_a_machine_that_follows_no_such_formula_is_predicted_within_15_percent(stage, some_load, catalogue, wish, other):
    adaptive = {"settings": {"chunked_prefill": {"mode": "adaptive"}}, "num_blocks": 4000}
    work = some_load(250, 9.0, shared=48)
    first = stage("first", **adaptive)
    first.play(work, seconds=bent)
    second = stage("second", **{**adaptive, **other})  # one at a time: a stage is the recorder's clock
    second.play(work, seconds=bent)
    real, predicted = numbers(recorded(second.history())), numbers(course(first.history(), catalogue, wish))
    for name in ("ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p99", "e2e_p99", "steps"):
        assert predicted[name] == pytest.approx(real[name], rel=0.15), name
