"""Settings that change live, and plugins that come for one request: in the engine, and through the client, over an engine's death."""

from __future__ import annotations

import os
import signal

import engine_plugins
import pytest
from engine_fakes import FakeWorker, following
from engine_harness import engine, request
from test_client import client, first_token, read, settings, until
from test_client_switches import with_plugins
from test_plugins import plugin

from tokenbus.core import logs
from tokenbus.core.config import SchedulerConfig
from tokenbus.core.errors import ConflictError, FieldError, UnavailableError, WorkerError
from tokenbus.core.front.events import ChangeRefused, FeatureChange, SettingsChange
from tokenbus.core.messages import PluginDisabled, SetSettings
from tokenbus.core.plan import StepPlan
from tokenbus.plugins.chunked_prefill import ChunkedPrefill

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def unchanged():
    engine_plugins.SEEN.clear()
    yield
    logs.set_level("info")


async def change(e, **values):
    named = {name.replace("__", "."): value for name, value in values.items()}
    await e.call(lambda call_id: SetSettings(call_id, named))


async def test_the_next_step_obeys():
    fixed = {"plugins__chunked_prefill__mode": "fixed", "plugins__chunked_prefill__chunk_size": 3}
    async with engine(ChunkedPrefill, on=("chunked_prefill",), scheduler=SchedulerConfig(token_budget=16)) as e:
        plans: list[StepPlan] = []
        e.core.bus.listen(plans.append, StepPlan)
        await e.add(request("a", list(range(10, 30)), 1, features=("chunked_prefill",)))
        await e.until_finished("a")
        await change(e, **fixed)
        await e.add(request("b", list(range(10, 18)), 1, features=("chunked_prefill",)))
        await e.until_finished("b")
        await change(e, scheduler__token_budget=2)
        await e.add(request("c", list(range(10, 15)), 1, features=("chunked_prefill",)))
        await e.until_finished("c")
        assert [list(plan.num_tokens.values()) for plan in plans] == [[16], [4], [3], [3], [2], [2], [2], [1]]
        assert [plan.budget for plan in plans] == [16] * 5 + [2] * 3


async def test_the_worker_is_told_of_plugins_settings_once_and_again_after_a_failed_step():
    broken: set[int] = set()

    async def before(order):
        if order.step_id in broken:
            raise WorkerError("this step fails")

    worker = FakeWorker(before=before)
    async with engine(ChunkedPrefill, worker=worker) as e:

        async def serve(name):
            await e.add(request(name, max_tokens=1))
            await e.until_finished(name)
            return worker.orders[-1].settings

        assert await serve("a") == {}
        await change(e, plugins__chunked_prefill__chunk_size=3, scheduler__token_budget=9)
        assert await serve("b") == {"chunked_prefill": {"chunk_size": 3}}
        assert await serve("c") == {}
        broken.add(worker.orders[-1].step_id + 1)
        await change(e, plugins__chunked_prefill__chunk_size=4)
        assert await serve("d") == {"chunked_prefill": {"chunk_size": 4}}
        assert e.finished["d"].reason == "error"
        assert await serve("e") == {"chunked_prefill": {"chunk_size": 4}}
        assert await serve("f") == {}


async def test_a_smaller_cap_interrupts_nobody():
    async with engine(scheduler=SchedulerConfig(max_running=4), worker=FakeWorker(step_seconds=0.001)) as e:
        plans: list[StepPlan] = []
        e.core.bus.listen(plans.append, StepPlan)
        await e.add(*(request(name, max_tokens=30 if name in "abc" else 5) for name in "abcdefg"))
        await e.until(lambda: len(e.tokens.get("a", ())) > 2)
        await change(e, scheduler__max_running=1, scheduler__token_budget=1)
        await e.until_finished(*"abcdefg")
        assert {finish.reason for finish in e.finished.values()} == {"length"}
        assert sum(finish.preemptions for finish in e.finished.values()) == 0
        assert max(len(plan.num_tokens) for plan in plans) == 4
        assert {len(plan.num_tokens) for plan in plans[-10:]} == {1}


async def test_one_wrong_value_and_none_is_applied():
    async with engine(ChunkedPrefill) as e:
        before = await e.query("stats")
        with pytest.raises(FieldError):
            await change(e, scheduler__max_running=3, scheduler__token_budget=0)
        with pytest.raises(ConflictError):
            await change(e, scheduler__max_running=3, cache__block_size=8)
        assert await e.query("stats") == before


async def test_values_reach_both_processes_and_the_next_engine():
    logs.configure_logs("json", "info")
    async with client(settings("slow", scheduler={"max_running": 4, "max_waiting": 4})) as c:
        told: list[SettingsChange | ChangeRefused] = []
        c.bus.listen(told.append, SettingsChange, ChangeRefused)
        values = {"scheduler.max_running": 2, "scheduler.max_waiting": 1, "server.log_level": "warning",
                  "plugins.chunked_prefill.chunk_size": 9}  # fmt: skip
        await c.set_settings(values, "me")
        (event,) = told
        assert isinstance(event, SettingsChange)
        assert (event.after, event.who, event.before["scheduler.max_running"]) == (values, "me", 4)
        assert logs._least == logs.LEVELS["warning"]
        assert c.capacity == 3
        running = (await c.query("stats"))["settings"]
        assert {name: running[name] for name in values} == values
        (stream,) = c.submit([request("r", max_tokens=250)])
        await first_token(stream)
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await c.set_settings({"scheduler.max_running": 9}, "me")
        assert isinstance(told[-1], ChangeRefused)
        assert told[-1].asked == {"scheduler.max_running": 9}
        assert len(await read(stream)) == 249
        assert (await c.query("stats"))["settings"] == running
        assert c.capacity == 3
        with pytest.raises(FieldError):
            await c.set_settings({"scheduler.max_running": "9"}, "me")
        assert [type(event) for event in told] == [SettingsChange, ChangeRefused, ChangeRefused]


# ---- plugins for one request ------------------------------------------------------------------------------------------------------


async def test_a_plugin_comes_for_a_request_in_the_engine_and_goes_with_it():
    guest = plugin("guest", scope="request", lossless=False)
    async with engine(guest, plugin("resident"), on=("resident",)) as e:
        await e.add(request("a", features=("guest", "resident"), pinned={"guest": True}), request("b", features=("resident",)))
        await e.until_finished("a", "b")
        assert e.finished["a"].features == ("guest", "resident")
        assert e.worker.orders[0].new[0].features == ("guest", "resident")
        assert e.worker.orders[0].features is None  # the switches have not changed
        assert (await e.query("stats"))["loaded"] == ["resident"]


async def test_one_that_cant_be_had_ends_that_request_and_is_refused_from_then_on():
    async with engine(plugin("bad", scope="request", fails_in=("engine_started",))) as e:
        await e.add(request("a", features=("bad",), pinned={"bad": True}), request("b"))
        await e.until_finished("a", "b")
        error = e.finished["a"].error
        assert error is not None
        assert (error.kind, error.plugin, error.hook) == ("UnavailableError", "bad", "engine_started")
        assert e.finished["b"].reason == "length"
        await e.until(lambda: any(isinstance(message, PluginDisabled) for message in e.others))
        (notice,) = [message for message in e.others if isinstance(message, PluginDisabled)]
        assert (notice.switches.on, notice.switches.failed) == (frozenset(), {"bad"})
        assert "switched off after it failed" in notice.switches.reasons["bad"]


async def test_one_that_fails_while_it_is_there_is_told():
    bad = plugin("bad", scope="request", fails_in=("step_finished",), lossless=False, claims=("x",))
    async with engine(bad) as e:
        values = {"features": ("bad",), "pinned": {"bad": True}, "max_tokens": 9}
        await e.add(request("uses", fields={"x": 1}, **values), request("not", **values))
        await e.until_finished("uses", "not")
        error = e.finished["uses"].error
        assert error is not None
        assert (error.plugin, error.hook) == ("bad", "step_finished")
        assert e.finished["not"].reason == "length"
        assert e.core.scheduler.switches.failed == {"bad"}
        await e.add(request("late", fields={"x": 1}, **values))
        await e.until_finished("late")
        error = e.finished["late"].error
        assert error is not None
        assert "'bad' failed while the request was on its way" in error.message
        assert await e.switch(bad=True) == {"bad"}
        assert e.core.scheduler.switches.failed == frozenset()


async def test_one_that_the_worker_cant_load_is_told():
    class Worker(FakeWorker):
        async def execute(self, order):
            result = await super().execute(order)
            for new in order.new:
                if "bad" in new.features:
                    result.sampled.pop(new.request_id)
                    error = WorkerError("plugin 'bad' can't be started", plugin="bad").to_wire()
                    result.errors[new.request_id] = type(error)(kind="PluginLoadError", message=error.message, plugin="bad")
            return result

    async with engine(plugin("bad", scope="request"), worker=Worker()) as e:
        await e.add(request("a", features=("bad",), pinned={"bad": True}), request("b"))
        await e.until_finished("a", "b")
        assert e.finished["a"].reason == "error"
        assert e.finished["b"].reason == "length"
        assert e.core.scheduler.switches.failed == {"bad"}


async def test_what_computes_attention_is_the_engines_own_business():
    """A request that was admitted under another holder of the slot runs with the present one, and its end says so."""
    odd, other = plugin("attention.odd", slot="attention", lossless=False), plugin("attention.other", slot="attention")
    async with engine(odd, other, on=("attention.other",)) as e:
        await e.add(request("a", features=("attention.odd",)))
        await e.until_finished("a")
        assert e.finished["a"].features == ("attention.other",)
        assert await e.switch(**{"attention.other": False}) == frozenset()
        await e.add(request("b", features=("attention.odd",)))
        await e.until_finished("b")
        assert (e.finished["b"].reason, e.finished["b"].features) == ("length", ())


async def test_both_processes_load_it_and_the_next_engine_too():
    async with client(with_plugins("slow")) as c:
        with c.hold_plugins() as hold:
            hold.load(frozenset({"b"}), c.switches.on)
            assert engine_plugins.SEEN == ["+b"]
            (stream,) = c.submit([request("r", features=("b",), pinned={"b": True}, max_tokens=100)])
        await first_token(stream)
        assert set(c.host.loaded) == {"b"}
        assert (await c.query("stats"))["loaded"] == ["b"]
        await c.set_features({"b": True}, "me")
        await c.set_features({"b": False}, "me")
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        assert len(await read(stream)) == 99
        assert stream.finish is not None
        assert stream.finish.features == ("b",)
        assert stream.resumptions == 1
        await until(lambda: not c.host.loaded)
        assert engine_plugins.SEEN == ["+b", "-b"]
        assert (await c.query("stats"))["loaded"] == []


async def test_what_failed_off_is_off_in_the_front_too_and_on_record():
    async with client(with_plugins("fake")) as c:
        changes: list[FeatureChange] = []
        c.bus.listen(changes.append, FeatureChange)
        with c.hold_plugins() as hold:
            hold.load(frozenset({"engine_fails"}), c.switches.on)
            (stream,) = c.submit([request("r", features=("engine_fails",), pinned={"engine_fails": True})])
        with pytest.raises(UnavailableError, match="can't be started"):
            await read(stream)
        await until(lambda: c.switches.failed == {"engine_fails"})
        assert (changes[-1].who, changes[-1].changes) == ("engine: plugin 'engine_fails' failed", {"engine_fails": False})
        assert await read(c.submit([request("s", [5])])[0]) == following([5], 3)
        await until(lambda: not c.host.loaded)
