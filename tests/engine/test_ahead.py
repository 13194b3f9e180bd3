"""The loop with a step in flight while it plans the next one: `scheduler.ahead`."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from engine_fakes import EOS, FAIL_STEP, WORKER_DIES, FakeWorker, following
from engine_harness import Harness, engine, request
from test_engine import Gate
from test_plugins import plugin

from tokenbus.core.config import SchedulerConfig, from_mapping
from tokenbus.core.engine.main import _plans_ahead
from tokenbus.core.errors import ConflictError, EngineDiedError
from tokenbus.core.messages import Cancel, Failed, Query, SetFeatures, SetSettings, Shutdown
from tokenbus.core.plan import StepPlan, StepResult
from tokenbus.core.worker.base import WorkerInfo
from tokenbus.plugins.chunked_prefill import ChunkedPrefill
from tokenbus.plugins.prefix_cache import PrefixCache
from tokenbus.plugins.scheduling.priority import Priority

pytestmark = pytest.mark.anyio


def reports(e: Harness) -> list[Any]:
    return [output.report for output in e.outputs if output.report is not None and output.report.num_requests]


def planned_ahead(e: Harness) -> int:
    return sum(report.ahead for report in reports(e))


def waits(e: Harness) -> Counter[str]:
    return Counter(report.waited for report in reports(e) if report.waited)


async def two_in_flight(e: Harness, gate: Gate) -> None:
    """One computes, one waits."""
    await gate.entered.wait()
    with anyio.fail_after(10):
        while len(e.worker.orders) < len(e.worker.ran) + 1:
            await anyio.lowlevel.checkpoint()


async def test_the_next_step_is_sent_while_one_computes_and_no_third():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), ahead=True) as e:
        told: list[StepPlan | StepResult] = []
        e.core.bus.listen(told.append, StepPlan, StepResult)
        await e.add(request("a", [1, 2, 3], 4), request("b", [50], 2))
        for computing in range(1, 4):
            await two_in_flight(e, gate)
            assert len(e.worker.orders) == computing + 1
            assert [type(event) for event in told].count(StepPlan) == computing + 1
            await gate.step()
        await gate.entered.wait()
        gate.go.set()
        await e.until_finished("a", "b")
        assert e.tokens == {"a": following([3], 4), "b": [51, 52]}
        assert [order.num_tokens for order in e.worker.orders] == [{"a": 3, "b": 1}, {"a": 1, "b": 1}, {"a": 1}, {"a": 1}]
        assert [order.ahead for order in e.worker.orders] == [False, True, True, True]
        assert planned_ahead(e) == 3
        assert len(e.outputs) == 4  # one message a step


async def test_without_it_no_step_is_sent_early():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate)) as e:
        await e.add(request("a", max_tokens=2))
        await gate.entered.wait()
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        assert len(e.worker.orders) == 1
        await gate.step()
        await gate.entered.wait()
        gate.go.set()
        await e.until_finished("a")
        assert planned_ahead(e) == 0


async def test_a_stop_token_costs_one_token_in_vain():
    async with engine(ahead=True) as e:
        await e.add(request("c", [897], 9), request("d", [10], 9))
        await e.until_finished("c", "d")
        assert e.tokens == {"c": [898, 899], "d": following([10], 9)}
        assert (e.finished["c"].reason, e.finished["c"].stop_token) == ("stop", EOS)
        assert sum(report.ahead_discarded for report in reports(e)) == 1
        assert (await e.query("stats"))["free_blocks"] == 64


async def test_cancels_and_new_requests_count_from_the_next_plan_on():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), ahead=True) as e:
        await e.add(request("a", max_tokens=100))
        await two_in_flight(e, gate)
        await e.channel.send(Cancel(["a"]))
        await e.add(request("b", max_tokens=3))
        await e.arrived(2)
        await gate.step()
        await two_in_flight(e, gate)
        assert e.worker.orders[2].num_tokens == {"b": 3}
        assert e.worker.orders[2].dropped == ["a"]
        assert e.worker.orders[2].ahead
        while "b" not in e.finished:
            gate.go.set()
            await e.receive()
        assert e.finished["a"].reason == "cancelled"
        assert e.tokens == {"a": following([30], 1), "b": following([30], 3)}
        assert await e.query("integrity") == {"ok": True, "problem": ""}


async def test_switches_wait_for_an_engine_at_rest_and_questions_do_not():
    gate = Gate()
    async with engine(ChunkedPrefill, worker=FakeWorker(before=gate), ahead=True) as e:
        await e.add(request("a", max_tokens=30))
        await two_in_flight(e, gate)
        await e.channel.send(Query(1, "integrity", {}))
        await e.channel.send(SetFeatures(2, {"chunked_prefill": True}))
        await e.add(request("b", max_tokens=2))
        await e.arrived(3)
        await gate.step()
        await e.until(lambda: len(e.others) == 1)
        assert e.others[0].value == {"ok": True, "problem": ""}
        await gate.entered.wait()
        assert (len(e.worker.orders), len(e.worker.ran)) == (2, 2), "nothing is planned while the change waits"
        assert list(e.core.scheduler.requests) == ["a"], "nor does what came behind it get ahead of it"
        await gate.step()
        await e.until(lambda: len(e.others) == 2)
        assert e.others[1].switches.on == {"chunked_prefill"}
        await gate.entered.wait()
        assert e.worker.orders[2].features == ("chunked_prefill",)
        assert e.worker.orders[2].num_tokens == {"a": 1, "b": 3}
        gate.go.set()
        while len(e.finished) < 2:
            gate.go.set()
            await e.receive()
        assert waits(e) == {"message": 1, "switches": 1}
        assert planned_ahead(e) > 20


async def test_settings_wait_too():
    async with engine(ChunkedPrefill, worker=FakeWorker(step_seconds=0.001), on=("chunked_prefill",), ahead=True) as e:
        await e.add(request("a", max_tokens=80))
        for size in (3, 4):
            await e.call(lambda call_id, size=size: SetSettings(call_id, {"plugins.chunked_prefill.chunk_size": size}))
        await e.until_finished("a")
        assert [order.settings for order in e.worker.orders if order.settings] == [
            {"chunked_prefill": {"chunk_size": 3}},
            {"chunked_prefill": {"chunk_size": 4}},
        ]
        assert not any(order.ahead for order in e.worker.orders if order.settings)
        assert planned_ahead(e) > 50
        assert e.tokens["a"] == following([30], 80)


async def test_shutdown_ends_it_once_both_steps_are_over():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), shutdown=False, ahead=True) as e:
        await e.add(request("a", max_tokens=100))
        await two_in_flight(e, gate)
        await e.channel.send(Shutdown())
        await e.arrived(1)
        await gate.step()
        await gate.entered.wait()
        gate.go.set()
    assert len(e.worker.orders) == 2
    assert e.worker.closed


async def test_it_stops_when_the_front_closes_its_end_in_the_middle():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), shutdown=False, ahead=True) as e:
        await e.add(request("a", max_tokens=100))
        await two_in_flight(e, gate)
        e.channel.close()
        while e.core._mailbox._send.statistics().open_send_streams:  # the reader has seen it
            await anyio.lowlevel.checkpoint()
        await gate.step()
        await gate.entered.wait()
        gate.go.set()
        with anyio.fail_after(10):
            while not e.worker.closed:  # noqa: ASYNC110 - on the engine's own end
                await anyio.sleep(0.001)
    assert len(e.worker.orders) == 2


async def test_deadlines_are_kept_between_any_two_results():
    async with engine(worker=FakeWorker(step_seconds=0.005), ahead=True) as e:
        now = time.time()
        await e.add(request("a", max_tokens=200, deadline=now + 0.1, arrival=now))
        await e.until_finished("a")
        error = e.finished["a"].error
        assert error is not None
        assert error.kind == "DeadlineError"
        assert planned_ahead(e) > 3
        assert (await e.query("stats"))["free_blocks"] == 64


# ---- steps that fail, engines that die ----------------------------------------------------------------------------------------------


async def test_a_failed_step_ends_its_own_requests_and_nobody_else():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), ahead=True) as e:
        await e.add(request("bad", [FAIL_STEP, 1], 9), request("with-it", [5], 9))
        await gate.entered.wait()
        await two_in_flight(e, gate)
        await e.add(request("other", [7], 4))
        await gate.step()
        while "other" not in e.finished:
            gate.go.set()
            await e.receive()
        assert {e.finished[name].error.message for name in ("bad", "with-it")} == {"the fake step failed"}
        assert e.tokens == {"other": [8, 9, 10, 11]}
        assert waits(e) == {"failed": 1} or waits(e) == {}
        assert (await e.query("stats"))["free_blocks"] == 64
        assert await e.query("integrity") == {"ok": True, "problem": ""}


async def test_who_joined_behind_a_failing_step_lives_on():
    """`other` is in the step behind the one that fails: the worker takes it over, and it runs in the next one."""
    gate = Gate()
    limits = SchedulerConfig(token_budget=4, max_running=3)
    async with engine(worker=FakeWorker(before=gate), scheduler=limits, ahead=True) as e:
        await e.add(request("bad", [FAIL_STEP, 1, 2, 3], 9), request("other", [7, 8], 4))
        await two_in_flight(e, gate)
        assert [order.num_tokens for order in e.worker.orders] == [{"bad": 4}, {"bad": 1, "other": 2}]
        while "other" not in e.finished:
            gate.go.set()
            await e.receive()
        assert e.worker.orders[2].num_tokens == {"other": 2}
        assert e.worker.orders[2].new == []
        assert e.worker.orders[2].dropped == ["bad"]
        assert e.tokens == {"other": following([8], 4)}
        assert waits(e) == {"failed": 1}


async def test_a_dying_worker_ends_the_engine_with_two_steps_in_flight():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), expect=EngineDiedError, ahead=True) as e:
        await e.add(request("bad", [WORKER_DIES, 1], 9))
        await two_in_flight(e, gate)
        await gate.step()
        failed = await e.receive()
        assert isinstance(failed, Failed)
        assert "signal 9" in failed.error.message


async def test_what_is_told_before_a_step_names_all_that_is_in_flight():
    gate = Gate()
    limits = SchedulerConfig(token_budget=4, max_running=3)
    async with engine(worker=FakeWorker(before=gate), scheduler=limits, ahead=True) as e:
        await e.add(request("a", [1, 2, 3, 4], 3), request("b", [7, 8], 4))
        await two_in_flight(e, gate)
        while "b" not in e.finished:
            gate.go.set()
            await e.receive()
        first, second, *later = e.begun
        assert (first.runs, first.steps) == ({"a": (0, 4)}, 2)
        assert (second.runs, second.steps) == ({"a": (0, 5), "b": (0, 2)}, 2)
        assert [step.runs.keys() for step in later] == [{"b"}], "a is in none of them any more"
        assert later[0].steps == 2


async def test_the_heartbeat_tells_of_the_step_that_computes():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), ahead=True) as e:
        await e.add(request("a", max_tokens=4))
        await two_in_flight(e, gate)
        assert e.core._pulse()[0] == e.worker.ran[-1].step_id == 1
        await gate.step()
        await two_in_flight(e, gate)
        step_id, age, _ = e.core._pulse()
        assert step_id == e.worker.ran[-1].step_id == 2
        assert age > 0
        while "a" not in e.finished:
            gate.go.set()
            await e.receive()


async def test_a_plugin_that_fails_is_dealt_with_at_rest():
    plugins = (plugin("bad", fails_in=("step_finished",)),)
    async with engine(*plugins, on=("bad",), ahead=True) as e:
        await e.add(request("a", max_tokens=20, features=("bad",)))
        await e.until_finished("a")
        assert e.core.scheduler.switches.on == frozenset()
        assert waits(e)["plugin"] == 1
        assert planned_ahead(e) > 10
        assert e.tokens["a"] == following([30], 20)


# ---- everything at once -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_random_loads_give_what_they_give_one_step_at_a_time(seed: int):
    """Cancels, stops, preemptions, switches and questions at any moment: nothing is lost, and answers are what they are."""
    rng = random.Random(seed)
    plugins = (ChunkedPrefill, PrefixCache, Priority)
    limits = SchedulerConfig(token_budget=24, max_running=6)
    async with engine(*plugins, worker=FakeWorker(), num_blocks=24, scheduler=limits, ahead=True) as e:
        asked: dict[str, tuple[list[int], int]] = {}
        cancelled: set[str] = set()
        head = [100 + i for i in range(8)]
        for number in range(150):
            name = f"r{number}"
            prompt = [*(head if rng.random() < 0.5 else ()), *(rng.randrange(100, 600) for _ in range(rng.randint(1, 20)))]
            if rng.random() < 0.2:
                prompt[-1] = 900 - rng.randint(2, 8)  # it ends by the end token
            asked[name] = prompt, rng.randint(1, 24)
            on = tuple(sorted(e.core.scheduler.switches.on))
            fields = {"priority": rng.randint(-2, 2)} if "scheduling.priority" in on else {}
            await e.add(request(name, *asked[name], features=on, fields=fields))
            if rng.random() < 0.15:
                cancelled.add(other := f"r{rng.randrange(number + 1)}")
                await e.channel.send(Cancel([other]))
            if rng.random() < 0.15:
                with contextlib.suppress(ConflictError):
                    await e.switch(**{rng.choice(plugins).info.name: rng.random() < 0.6})
            if rng.random() < 0.2:
                assert await e.query("integrity") == {"ok": True, "problem": ""}
            await e.until(lambda: len(asked) - len(e.finished) < 12)
        await e.until_finished(*asked)
        assert sorted(e.ends) == sorted(asked), "each ended once"
        for name, (prompt, count) in asked.items():
            whole = following(prompt, count)
            whole = whole[: whole.index(EOS)] if EOS in whole else whole
            got = e.tokens.get(name, [])
            assert got == whole[: len(got)]
            assert name in cancelled or got == whole
        stats = await e.query("stats")
        assert (stats["open"], stats["free_blocks"]) == (0, 24)
        assert planned_ahead(e) > 100
        assert {"message", "switches", "blocks"} <= waits(e).keys()
        assert sum(report.ahead_discarded for report in reports(e)) > 5
        assert sum(report.preempted for report in reports(e)) > 0


def test_the_setting_wins_over_what_the_worker_says():
    def info(ahead: bool) -> WorkerInfo:
        return WorkerInfo(
            model="", architecture="", dtype="", vocab_size=1, max_model_len=1, eos_token_ids=(), weights_bytes=0, kv_bytes_per_token=1,
            free_bytes=1, lossless=True, ahead=ahead,
        )  # fmt: skip

    found = {
        (wish, says): _plans_ahead(from_mapping({"scheduler": {"ahead": wish}}, "test"), info(says))
        for wish in ("auto", "on", "off")
        for says in (False, True)
    }
    assert found == {
        ("auto", False): False, ("auto", True): True, ("on", False): True, ("on", True): True, ("off", False): False, ("off", True): False,
    }  # fmt: skip
