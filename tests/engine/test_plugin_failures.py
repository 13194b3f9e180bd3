"""Failures outside any one request: whom they end, what goes off, and what the front is told."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import msgspec
import pytest
from engine_fakes import FakeWorker
from engine_harness import Harness, engine, request
from structlog.testing import capture_logs
from test_plugins import notice_of, plugin, run_one

from tokenbus.core.config import SchedulerConfig
from tokenbus.core.errors import ConflictError, ErrorInfo, PluginError, TooLargeError
from tokenbus.core.messages import PluginDisabled, Reply, SetFeatures
from tokenbus.core.plan import Kernels, StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

pytestmark = pytest.mark.anyio


async def test_a_failed_limit_ends_only_those_that_use_it():
    async with engine(plugin("limit", fails_in=("step_finished",), enforces=True, claims=("x",)), on=("limit",)) as e:
        values = {"features": ("limit",), "max_tokens": 5}
        await e.add(request("uses", fields={"x": 1}, **values), request("not", **values))
        await e.until_finished("uses", "not")
        assert e.finished["uses"].error is not None
        assert e.finished["not"].reason == "length"
        notice = await notice_of(e)
        assert (notice.refuses_new, notice.switches.on) == (True, {"limit"})


async def test_a_failed_attention_backend_gives_way_to_cores_whoever_claims_it():
    """Its step ends with an error that names it; later requests work."""

    async def before(order: StepInput) -> None:
        if "attention.odd" in (order.features or ("attention.odd",)) and order.step_id <= 2:
            raise PluginError("attend: boom", plugin="attention.odd", hook="attention_backend")

    odd = plugin("attention.odd", slot="attention", claims=("x",), enforces=True)
    async with engine(odd, plugin("good"), on=("attention.odd",), worker=FakeWorker(before=before)) as e:
        assert await e.switch(good=True) == {"attention.odd", "good"}
        await run_one(e, "r", features=("attention.odd",), fields={"x": 1})
        error = e.finished["r"].error
        assert error is not None
        assert (error.kind, error.plugin, error.hook) == ("PluginError", "attention.odd", "attention_backend")
        notice = await notice_of(e)
        assert (notice.name, notice.refuses_new, notice.switches.on) == ("attention.odd", False, {"good"})  # and only it
        await run_one(e, "s")
        assert e.finished["s"].reason == "length"
        assert e.worker.orders[-3].features == ("good",)


async def test_a_backend_fails_whose_plugin_is_kept_for_another_failure():
    async def before(order: StepInput) -> None:
        if order.step_id == 3:
            raise PluginError("attend: boom", plugin="attention.odd", hook="attention_backend")

    odd = plugin("attention.odd", slot="attention", enforces=True, fails_in=("step_finished",))
    async with engine(odd, on=("attention.odd",), worker=FakeWorker(before=before)) as e:
        await run_one(e, "r", max_tokens=2)
        assert (await e.query("stats"))["on"] == ["attention.odd"]
        await run_one(e, "s")
        assert e.finished["s"].reason == "error"
        await e.until(lambda: sum(isinstance(message, PluginDisabled) for message in e.others) == 2)
        kept, off = [message for message in e.others if isinstance(message, PluginDisabled)]
        assert (kept.refuses_new, off.refuses_new, off.switches.on) == (True, False, frozenset())
        await run_one(e, "t")
        assert e.finished["t"].reason == "length"


async def test_a_backend_that_could_not_be_had_is_told_with_what_computes_instead():
    class Tells(FakeWorker):
        async def execute(self, order: StepInput):
            result = await super().execute(order)
            if order.step_id == 1:
                error = ErrorInfo(kind="PluginError", message="no backend", plugin="attention.odd", hook="attention_backend")
                result.kernels = Kernels(attention="torch", lossless=False, reason="who knows", error=error)
            return result

    async with engine(plugin("attention.odd", slot="attention"), on=("attention.odd",), worker=Tells()) as e:
        await run_one(e, "r", features=("attention.odd",))
        assert e.finished["r"].reason == "length"
        kernels = e.outputs[0].kernels
        assert kernels is not None
        assert (kernels.attention, kernels.lossless, kernels.reason) == ("torch", False, "who knows")
        assert (await notice_of(e)).switches.reasons == {"attention.odd": "switched off after it failed: no backend"}


class Fussy(Plugin):
    """Its settings are wrong."""

    class Settings(msgspec.Struct):
        must_be_given: int

    info = PluginInfo(name="fussy", summary="", scope="step", lossless=True)


class Rude(Plugin):
    """Raises what is meant for clients."""

    info = PluginInfo(name="rude", summary="", scope="step", lossless=True)

    @hookimpl
    def engine_started(self):
        from tokenbus.core.errors import RequestError

        raise RequestError("go away")


@pytest.mark.parametrize(("name", "words"), [("fussy", r"\[plugins.fussy\].*must_be_given"), ("rude", "go away")])
async def test_what_cant_be_switched_on_is_a_conflict_and_changes_nothing(name: str, words: str):
    async with engine(Fussy, Rude, plugin("a"), plugin("b"), on=("a",)) as e:
        before = await e.query("stats")
        with pytest.raises(ConflictError, match=words) as refused:
            await e.switch(b=True, a=False, **{name: True})
        assert refused.value.plugin == name
        assert await e.query("stats") == before


async def test_a_plugin_that_went_off_and_fails_for_its_last_requests_is_told_once():
    lingers = plugin("lingers", fails_in=("step_finished",), lossless=False, claims=("x",))

    async def hold(order: StepInput) -> None:
        if order.step_id == 1:
            await release.wait()

    release = anyio.Event()
    with capture_logs() as logs:
        async with engine(lingers, on=("lingers",), worker=FakeWorker(before=hold)) as e:
            values = {"features": ("lingers",), "max_tokens": 9}
            await e.add(request("uses", fields={"x": 1}, **values), request("not", **values))
            await until(lambda: bool(e.worker.orders))
            await e.channel.send(SetFeatures(1, {"lingers": False}))
            await e.arrived(1)
            release.set()
            await e.until_finished("uses", "not")
            assert e.finished["not"].reason == "length"
            assert e.finished["not"].features == ("lingers",)
            error = e.finished["uses"].error
            assert error is not None
            assert (error.plugin, error.hook) == ("lingers", "step_finished")
    told = [entry for entry in logs if entry["event"] == "plugin_failed_after_it_went_off"]
    assert [(entry["log_level"], entry["plugin"], entry["ended_requests"]) for entry in told] == [("error", "lingers", 1)]


async def test_every_message_tells_what_is_on_when_it_is_sent():
    """A switch change that comes between a failed step and its consequences: the last message has the last word."""

    async def before(order: StepInput) -> None:
        if order.step_id == 1:
            await until(lambda: len(harness[0].core._mailbox) == 1)
            raise PluginError("boom", plugin="bad", hook="worker")

    harness: list[Harness] = []
    async with engine(plugin("bad"), plugin("other"), on=("bad",), worker=FakeWorker(before=before)) as e:
        harness.append(e)
        await e.add(request("r", features=("bad",)))
        await until(lambda: bool(e.worker.orders))
        await e.channel.send(SetFeatures(1, {"other": True}))
        await e.until(lambda: len(e.others) == 2)
        reply, notice = e.others
        assert isinstance(reply, Reply)
        assert isinstance(notice, PluginDisabled)
        assert reply.switches is not None
        assert (reply.switches.on, notice.switches.on) == ({"bad", "other"}, {"other"})
        assert (await e.query("stats"))["on"] == ["other"]


async def until(condition) -> None:
    while not condition():
        await anyio.lowlevel.checkpoint()


async def test_an_answer_that_is_too_long_ends_the_question_only(monkeypatch):
    from tokenbus.core import ipc

    async with engine(scheduler=SchedulerConfig(plan_history=10_000)) as e:
        await run_one(e, "r", max_tokens=40)
        monkeypatch.setattr(e.core._channel, "_max_frame", 2000)
        with pytest.raises(TooLargeError, match=r"a Reply of .* bytes"):
            await e.query("plans")
        monkeypatch.setattr(e.core._channel, "_max_frame", ipc.MAX_FRAME)
        assert len((await e.query("plans"))["plans"]) == 40
