"""Front and engine agree on what is on, whatever happens."""

from __future__ import annotations

import os
import signal

import engine_plugins
import pytest
from engine_harness import request
from test_client import client, first_token, read, settings, until

from tokenbus.core.config import Config
from tokenbus.core.errors import ConflictError, NotFoundError, PluginError, UnavailableError
from tokenbus.core.front.events import FeatureChange

pytestmark = pytest.mark.anyio

NAMES = ("A", "B", "FrontFails", "EngineFails", "StepFails", "Limit")


@pytest.fixture(autouse=True)
def nothing_seen():
    engine_plugins.SEEN.clear()


def with_plugins(kind: str = "fake", **sections) -> Config:
    return settings(kind, features={"load": [f"engine_plugins:{name}" for name in NAMES]}, **sections)


async def test_switches_change_in_both_processes_and_survive_a_restart():
    async with client(with_plugins(), on=("a",)) as c:
        changes: list[FeatureChange] = []
        c.bus.listen(changes.append, FeatureChange)
        assert engine_plugins.SEEN == ["+a"]
        state = await c.set_features({"a": False, "b": True}, "me")
        assert state is c.switches
        assert (state.on, state.reasons) == ({"b"}, {"a": "switched off live"})
        assert engine_plugins.SEEN == ["+a", "+b", "-a"]
        assert set(c.host.loaded) == {"b"}
        assert (await c.query("stats"))["on"] == ["b"]
        assert [(change.changes, change.who, change.state) for change in changes] == [({"a": False, "b": True}, "me", state)]
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        await until(lambda: c.restarts == 1)
        assert (await c.query("stats"))["on"] == ["b"]
    assert engine_plugins.SEEN[-1] == "-b"


@pytest.mark.parametrize("bad", ["front_fails", "engine_fails"])
async def test_a_change_that_one_process_refuses_changes_neither(bad: str):
    async with client(with_plugins(), on=("a",)) as c:
        before = await c.query("stats")
        with pytest.raises(ConflictError, match=f"plugin '{bad}' failed in {bad.removesuffix('_fails')}_started"):
            await c.set_features({"b": True, "a": False, bad: True}, "me")
        with pytest.raises(NotFoundError):
            await c.set_features({"b": True, "nonsense": True}, "me")
        assert c.switches.on == {"a"}
        assert set(c.host.loaded) == {"a"}
        assert await c.query("stats") == before
        assert engine_plugins.SEEN.count("+b") == engine_plugins.SEEN.count("-b")
        assert engine_plugins.SEEN.count("-a") == 0


async def test_a_plugin_stays_loaded_for_the_requests_admitted_with_it():
    async with client(with_plugins("slow"), on=("a",)) as c:
        (stream,) = c.submit([request("r", features=("a",), fields={"x": 1}, max_tokens=250)])
        await first_token(stream)
        await c.set_features({"a": False}, "me")
        assert "a" in c.host.loaded
        assert (await c.query("stats"))["loaded"] == ["a"]
        stream.cancel()
        await read(stream)
        assert stream.finish is not None
        assert stream.finish.features == ("a",)
        assert "a" not in c.host.loaded
        assert (await c.query("stats"))["loaded"] == []
        # one that was admitted with it, but is on its way when it goes
        late = c.submit([request("late", features=("a",), fields={"x": 1})])
        assert len(await read(late[0])) == 3
        assert late[0].finish is not None
        assert late[0].finish.features == ("a",)
        await until(lambda: "a" not in c.host.loaded)
        assert (await c.query("stats"))["loaded"] == []


async def test_a_plugin_that_fails_in_the_engine_goes_off_in_the_front_too():
    async with client(with_plugins(), on=("b", "step_fails")) as c:
        assert len(await read(c.submit([request("r", features=("b", "step_fails"))])[0])) == 3
        await until(lambda: c.switches.on == {"b"})
        assert "switched off after it failed: plugin 'step_fails' failed in step_finished" in c.switches.reasons["step_fails"]
        assert engine_plugins.SEEN == ["+b", "+step_fails", "-step_fails"]


async def test_a_failed_limit_refuses_requests_until_it_is_switched_off_by_hand():
    async with client(with_plugins(), on=("limit",)) as c:
        with pytest.raises(PluginError, match="no limit"):
            await read(c.submit([request("r", features=("limit",), max_tokens=100)])[0])
        await until(lambda: "limit" in c.refusing)
        with pytest.raises(UnavailableError, match="'limit' has failed") as refused:
            c.submit([request("s", features=("limit",))])
        assert refused.value.plugin == "limit"
        await c.set_features({"limit": False}, "me")
        assert len(await read(c.submit([request("t")])[0])) == 3


async def test_a_switch_that_the_engines_death_interrupts_changes_nothing():
    async with client(with_plugins("slow"), on=("a",)) as c:
        (stream,) = c.submit([request("r", max_tokens=250)])
        await first_token(stream)
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        with pytest.raises(UnavailableError):
            await c.set_features({"b": True}, "me")
        assert len(await read(stream)) == 249
        assert stream.resumptions == 1
        assert c.switches.on == {"a"}
        assert set(c.host.loaded) == {"a"}
