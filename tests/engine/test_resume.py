"""What the engine does for a crash: it says what it is about to run, and goes on with requests that another engine had."""

from __future__ import annotations

import os
import signal
from typing import Any, ClassVar

import anyio
import pytest
from engine_fakes import HANG, FakeWorker
from engine_harness import engine, request
from test_client import client, first_token, read, settings, until

from tokenbus.core.errors import EngineDiedError
from tokenbus.core.messages import Heartbeat, StepBegins
from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.request import Resumed

pytestmark = pytest.mark.anyio

CALLS: list[tuple[str, Any]] = []


class Lingers(Plugin):
    info: ClassVar[PluginInfo] = PluginInfo(name="lingers", summary="a test's", scope="step", lossless=False, claims={"x"})

    @hookimpl
    def engine_started(self) -> None:
        CALLS.append(("started", None))

    @hookimpl
    def engine_stopped(self) -> None:
        CALLS.append(("stopped", None))

    @hookimpl
    def request_added(self, request: Any) -> None:
        CALLS.append(("added", list(request.tokens)))


class WontStart(Lingers):
    info: ClassVar[PluginInfo] = PluginInfo(name="wont_start", summary="a test's", scope="step", lossless=False, claims={"y"})

    @hookimpl
    def engine_started(self) -> None:
        raise ValueError("no")


async def test_a_step_is_told_before_it_runs_and_only_when_there_is_something_new():
    there: list[bool] = []

    async def before(order: StepInput) -> None:
        if order.step_id == 1:  # it computes now: the message is there
            with anyio.fail_after(5):
                while isinstance(message := await e.channel.receive(), Heartbeat):
                    pass
            there.append(isinstance(message, StepBegins))
            e.begun.append(message)

    async with engine(worker=FakeWorker(before=before)) as e:
        await e.add(request("a", [1, 2, 3], 5), request("b", [7], 2))
        await e.until_finished("a", "b")
        assert there == [True]
        assert [step.runs for step in e.begun] == [{"a": (0, 3), "b": (0, 1)}, {"a": (4, 5)}]
        assert [step.step_id for step in e.begun] == [1, 3], "the others had the requests of the step before, decoding"
        assert [step.taken for step in e.begun] == [2, 2]


async def test_a_resumed_request_goes_on_after_its_last_token():
    async with engine() as e:
        resumed = Resumed(tokens=[31, 32], cached_tokens=1, preemptions=2, notes={"p": "why"})
        await e.add(request("a", max_tokens=5, resumed=resumed))
        await e.until_finished("a")
        assert e.tokens["a"] == [33, 34, 35]
        assert e.worker.orders[0].new[0].tokens == [10, 20, 30, 31, 32]
        assert e.worker.orders[0].new[0].num_prompt_tokens == 3
        finish = e.finished["a"]
        assert (finish.reason, finish.cached_tokens, finish.preemptions, finish.notes) == ("length", 1, 2, {"p": "why"})


async def test_a_preemption_is_told_before_the_step_that_needs_the_blocks():
    async with engine(num_blocks=6, block_size=4) as e:
        await e.add(request("a", [1, 2, 3, 4], 16), request("b", [5, 6, 7, 8], 16))
        await e.until_finished("a", "b")
        told = [name for step in e.begun for name in step.preempted]
        assert told
        for name in ("a", "b"):
            assert told.count(name) == e.finished[name].preemptions


async def test_a_request_may_be_asked_to_come_back():
    async with engine() as e:
        await e.add(request("a", max_tokens=5, resumed=Resumed(tokens=[31], until=2)))
        await e.until_finished("a")
        assert (e.tokens["a"], e.finished["a"].reason) == ([32], "length")
        await e.add(request("a", max_tokens=5, resumed=Resumed(tokens=[31, 32])))
        await e.until(lambda: len(e.ends) == 2)
        assert e.tokens["a"] == [32, 33, 34, 35]
        assert await e.query("integrity") == {"ok": True, "problem": ""}


async def test_a_resumed_request_has_the_plugins_it_had_though_they_are_off():
    CALLS.clear()
    async with engine(Lingers) as e:
        await e.add(request("a", max_tokens=3, features=("lingers",), fields={"x": 1}, resumed=Resumed(tokens=[31])))
        await e.until_finished("a")
        assert e.finished["a"].features == ("lingers",)
        assert (await e.query("stats"))["loaded"] == []
        assert CALLS == [("started", None), ("added", [10, 20, 30, 31]), ("stopped", None)]
        await e.add(request("new", features=("lingers",), fields={"x": 1}))  # so has one that was admitted before it went off
        await e.until_finished("new")
        assert (e.finished["new"].reason, e.finished["new"].features) == ("length", ("lingers",))
        assert (await e.query("stats"))["loaded"] == []


async def test_a_plugin_that_wont_start_again_ends_the_request():
    async with engine(WontStart) as e:
        await e.add(request("a", features=("wont_start",), fields={"y": 1}, resumed=Resumed(tokens=[31])), request("b"))
        await e.until_finished("a", "b")
        error = e.finished["a"].error
        assert error is not None
        assert (error.kind, error.plugin, error.hook) == ("UnavailableError", "wont_start", "engine_started")
        assert e.finished["b"].reason == "length"
        assert (await e.query("stats"))["loaded"] == []


async def test_what_no_longer_fits_ends_with_an_error():
    async with engine(num_blocks=2, block_size=4) as e:
        await e.add(request("a", max_tokens=20, resumed=Resumed(tokens=[31, 32, 33, 34, 35])))
        await e.until_finished("a")
        error = e.finished["a"].error
        assert error is not None
        assert "prompt and output have 8 tokens; with what is still to come a request has room for 8" in error.message


# ---- the client, with real processes and the fake worker ------------------------------------------------------------------------


async def test_streams_that_drain_go_on_after_a_death_too():
    async with client(settings("slow")) as c:
        (stream,) = c.submit([request("a", max_tokens=100)])
        await first_token(stream)
        c.begin_drain()
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        assert await c.drain(20)
        assert len(await read(stream)) == 99
        assert c.restarts == 1


async def test_new_requests_wait_while_suspects_are_tried():
    async with client(settings("slow")) as c:
        streams = c.submit([request(f"r{i}", max_tokens=30) for i in range(6)])
        for stream in streams:
            await first_token(stream)
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        await until(lambda: c.restarts == 1)
        assert c.suspects == 6
        (new,) = c.submit([request("new", [5], 3)])
        assert await read(new) == [6, 7, 8]
        assert c.suspects == 0
        for stream in streams:
            assert len(await read(stream)) == 29
            assert stream.resumptions == 1
        assert new.resumptions == 0


async def test_a_request_that_hangs_steps_ends_alone():
    async with client(settings("slow", supervision={"step_deadline": 0.5, "restart_backoff_max": 0.1})) as c:
        good = c.submit([request(f"r{i}", max_tokens=40) for i in range(3)])
        for stream in good:
            await first_token(stream)
        (bad,) = c.submit([request("bad", [HANG])])
        with pytest.raises(EngineDiedError, match=r"died twice .* alone: a step took longer than 0.5 s"):
            await read(bad)
        for stream in good:
            assert len(await read(stream)) == 39
        assert c.restarts == 3
        assert c.ready() == (True, "ok")
