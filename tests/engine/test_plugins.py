"""Switches and failing plugins in the engine: all or none, and what design.md says when one raises outside a request."""

from __future__ import annotations

from typing import Any, ClassVar

import anyio
import pytest
from engine_fakes import FakeWorker
from engine_harness import Harness, engine, request

from tokenbus.core.errors import ConflictError, NotFoundError, PluginError, PluginLoadError, WorkerError
from tokenbus.core.messages import PluginDisabled
from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.policy import FcfsPolicy

pytestmark = pytest.mark.anyio

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def plugin(name: str, *, fails_in: tuple[str, ...] = (), fails_at_load: bool = False, **info: Any) -> type[Plugin]:
    """A plugin that notes its calls and raises in the hooks named."""
    info = {"scope": "step", "lossless": True, **info}

    def note(hook: str) -> None:
        CALLS.append(f"{name}.{hook}")
        if hook in fails_in:
            raise ValueError("boom")

    class Made(Plugin):
        def __init__(self, settings: Any, role: Any) -> None:
            if fails_at_load:
                raise ValueError("no libboom")
            super().__init__(settings, role)

        @hookimpl
        def engine_started(self) -> None:
            note("engine_started")

        @hookimpl
        def engine_stopped(self) -> None:
            note("engine_stopped")

        @hookimpl
        def step_finished(self) -> None:
            note("step_finished")

        @hookimpl
        def request_added(self) -> None:
            note("request_added")

    Made.info = PluginInfo(name=name, summary="a test's", **info)
    return Made


async def run_one(e: Harness, request_id: str, **values: Any) -> None:
    await e.add(request(request_id, **values))
    await e.until_finished(request_id)


async def test_switching_on_and_off_starts_and_stops():
    async with engine(plugin("a"), plugin("b"), on=("a",)) as e:
        assert CALLS == ["a.engine_started"]
        assert await e.switch(a=False, b=True) == {"b"}
        assert CALLS == ["a.engine_started", "b.engine_started", "a.engine_stopped"]
        assert (await e.query("stats"))["loaded"] == ["b"]
        await run_one(e, "r", features=("b",), max_tokens=1)
        assert CALLS[3:] == ["b.request_added", "b.step_finished"]
        assert e.worker.orders[0].features == ("b",)


async def test_a_change_that_is_refused_changes_nothing():
    plugins = (
        plugin("good"),
        plugin("wont_start", fails_in=("engine_started",)),
        plugin("wont_load", fails_at_load=True),
        plugin("needy", requires=("absent",)),
        plugin("absent"),
        plugin("fixed", scope="engine"),
    )
    async with engine(*plugins) as e:
        before = await e.query("stats")
        for bad, words in [
            ("wont_start", "'wont_start' failed in engine_started: ValueError: boom"),
            ("wont_load", "no libboom"),
            ("needy", "needs 'absent'"),
            ("fixed", "scope engine"),
        ]:
            with pytest.raises(ConflictError, match=words):
                await e.switch(good=True, **{bad: True})
            assert await e.query("stats") == before, bad
        with pytest.raises(NotFoundError, match="did you mean 'good'"):
            await e.switch(absent=True, goood=True)
        assert await e.query("stats") == before
        assert CALLS.count("good.engine_started") == CALLS.count("good.engine_stopped")
        await run_one(e, "r", max_tokens=1)
        assert e.worker.orders[0].features is None  # the worker hears of no change


async def test_a_plugin_that_wont_start_at_start_is_a_start_error():
    with pytest.raises(PluginLoadError, match="failed in engine_started: ValueError: boom"):
        async with engine(plugin("bad", fails_in=("engine_started",)), on=("bad",)):
            pass


async def test_a_failing_plugin_that_nobody_claims_is_switched_off_with_its_dependents():
    plugins = (plugin("bad", fails_in=("step_finished",)), plugin("needs_bad", requires=("bad",)), plugin("other"))
    async with engine(*plugins, on=("bad", "needs_bad", "other")) as e:
        await run_one(e, "r", features=("bad", "needs_bad", "other"))
        assert e.finished["r"].reason == "length"  # it went on
        notice = await notice_of(e)
        assert (notice.name, notice.refuses_new, notice.error.plugin, notice.error.hook) == (
            "bad",
            False,
            "bad",
            "step_finished",
        )
        stats = await e.query("stats")
        assert stats["on"] == ["other"]
        assert CALLS.count("bad.step_finished") == 1
        await run_one(e, "s", features=("other",))
        assert e.finished["s"].reason == "length"


async def notice_of(e: Harness) -> PluginDisabled:
    await e.until(lambda: any(isinstance(message, PluginDisabled) for message in e.others))
    (notice,) = [message for message in e.others if isinstance(message, PluginDisabled)]
    return notice


async def test_a_failing_plugin_that_is_claimed_ends_those_requests_and_refuses_new_ones():
    async with engine(plugin("bad", fails_in=("step_finished",), claims=("x",)), on=("bad",)) as e:
        await e.add(
            request("uses", features=("bad",), fields={"x": 1}, max_tokens=50), request("not", features=("bad",), max_tokens=5)
        )
        await e.until_finished("uses", "not")
        error = e.finished["uses"].error
        assert error is not None
        assert (error.kind, error.plugin, error.hook) == ("PluginError", "bad", "step_finished")
        assert e.finished["not"].reason == "length"
        assert (await notice_of(e)).refuses_new
        assert (await e.query("stats"))["on"] == ["bad"]
        assert await e.switch(bad=False) == frozenset()  # by hand


async def test_a_failing_plugin_that_enforces_something_is_never_switched_off():
    async with engine(plugin("limit", fails_in=("step_finished",), enforces=True), on=("limit",)) as e:
        await run_one(e, "r", features=("limit",), max_tokens=50)
        error = e.finished["r"].error
        assert error is not None
        assert error.plugin == "limit"
        assert (await notice_of(e)).refuses_new
        assert (await e.query("stats"))["on"] == ["limit"]


async def test_a_plugin_that_fails_on_one_request_ends_only_that():
    async with engine(plugin("bad", scope="request", fails_in=("request_added",)), on=("bad",)) as e:
        await e.add(request("its", features=("bad",)), request("other"))
        await e.until_finished("its", "other")
        error = e.finished["its"].error
        assert error is not None
        assert (error.plugin, error.hook) == ("bad", "request_added")
        assert e.finished["other"].reason == "length"
        assert e.others == []


class BrokenPolicy(FcfsPolicy):
    def peek(self, now: float) -> Any:
        raise ValueError("boom")


class Broken(Plugin):
    info: ClassVar[PluginInfo] = PluginInfo(
        name="scheduling.broken", summary="a test's", scope="step", lossless=True, slot="scheduling", claims=("x",)
    )

    @hookimpl
    def scheduling_policy(self) -> FcfsPolicy:
        return BrokenPolicy()


async def test_a_failing_scheduling_policy_gives_way_to_cores():
    async with engine(Broken, on=("scheduling.broken",)) as e:
        await run_one(e, "r", features=("scheduling.broken",), fields={"x": 1})
        assert e.finished["r"].reason == "length"
        notice = await notice_of(e)
        assert (notice.name, notice.refuses_new) == ("scheduling.broken", False)
        assert (await e.query("stats"))["on"] == []


async def test_a_plugin_that_breaks_a_whole_step_on_the_worker_is_dealt_with():
    async def before(order: StepInput) -> None:
        if order.step_id == 1:
            raise PluginError("plugin 'bad' failed in worker: boom", plugin="bad", hook="worker")

    async with engine(plugin("bad"), on=("bad",), worker=FakeWorker(before=before)) as e:
        await run_one(e, "r", features=("bad",))
        assert e.finished["r"].reason == "error"
        assert not (await notice_of(e)).refuses_new
        await run_one(e, "s")
        assert e.finished["s"].reason == "length"


async def test_plugins_that_the_worker_cant_take_are_switched_off_again():
    async def before(order: StepInput) -> None:
        if order.features is not None and "bad" in order.features:
            raise WorkerError("step failed: PluginLoadError: plugin 'bad' can't be started")

    async with engine(plugin("good"), plugin("bad", claims=("x",)), on=("good",), worker=FakeWorker(before=before)) as e:
        assert await e.switch(bad=True) == {"good", "bad"}
        await run_one(e, "r", features=("bad", "good"), fields={"x": 1})
        assert e.finished["r"].reason == "error"
        notice = await notice_of(e)
        assert (notice.name, notice.refuses_new) == ("bad", False)
        await run_one(e, "s", features=("good",))
        assert e.finished["s"].reason == "length"
        assert (await e.query("stats"))["on"] == ["good"]
        assert CALLS.count("bad.engine_stopped") == 1


async def test_another_kernel_set_waits_until_no_request_is_open():
    """Attention works for the whole batch: a backend with other bits would change answers that have begun."""
    entered, gate = anyio.Event(), anyio.Event()

    async def before(_order):
        entered.set()
        await gate.wait()

    other, same = plugin("attention.other", slot="attention", lossless=False), plugin("attention.same", slot="attention")
    async with engine(other, same, worker=FakeWorker(before=before)) as e:
        await e.add(request("a", max_tokens=3))
        await entered.wait()
        asked = anyio.Event()

        async def refused():
            with pytest.raises(ConflictError, match="1 requests are open, and another kernel set"):
                await e.switch(**{"attention.other": True})
            asked.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            await e.arrived(1)
            gate.set()
            await asked.wait()
        await e.until_finished("a")
        assert await e.switch(**{"attention.same": True}) == {"attention.same"}
        assert await e.switch(**{"attention.other": True}) == {"attention.other"}
