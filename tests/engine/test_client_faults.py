"""What can't be sent, who is no longer there to be told, and messages that arrive back to back: front and engine still agree."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from engine_harness import request
from test_client import client, first_token, read, settings, until

from tokenbus.core.bus import Bus
from tokenbus.core.errors import (
    ConfigError,
    ConflictError,
    ErrorInfo,
    FieldError,
    PluginError,
    PluginLoadError,
    RequestError,
    TooLargeError,
    UnavailableError,
)
from tokenbus.core.front import supervisor
from tokenbus.core.front.admission import Admitter, ParsedRequest, Prompt
from tokenbus.core.front.client import EngineClient
from tokenbus.core.front.events import FeatureChange
from tokenbus.core.host import Switches, make_host
from tokenbus.core.messages import PluginDisabled, Reply, SetFeatures, StepOutput
from tokenbus.core.plan import Kernels

pytestmark = pytest.mark.anyio

NAMES = ("A", "B", "Limit", "Kernel", "Unplain")


def with_plugins(kind: str = "fake", **sections):
    return settings(kind, features={"load": [f"engine_plugins:{name}" for name in NAMES]}, **sections)


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800", [3 + 4j]], ids=["object", "large", "surrogate", "complex"])
async def test_a_request_that_cant_be_encoded_ends_alone(value: Any):
    async with client(with_plugins("slow"), on=("a",)) as c:
        (other,) = c.submit([request("other", max_tokens=20)])
        with pytest.raises(TooLargeError, match="can't be handed to the engine"):
            c.submit([request("good"), request("bad", features=("a",), fields={"x": value})])
        assert c.open_requests == len(c.journal) == 1
        with pytest.raises(RequestError):
            await c.query("plans", last=value)
        assert len(await read(other)) == 20
        assert c.restarts == 0


async def test_a_request_that_is_too_long_ends_alone(monkeypatch):
    monkeypatch.setattr(supervisor, "encode", lambda message: encode(message, 10_000))
    async with client(with_plugins(), on=("a",)) as c:
        with pytest.raises(TooLargeError, match="over the wire's limit of 10000"):
            c.submit([request("long", features=("a",), fields={"x": "y" * 10_000})])
        assert len(await read(c.submit([request("short")])[0])) == 3


encode = supervisor.encode


async def test_settings_that_cant_be_sent_are_a_start_error():
    async with client(with_plugins(plugins={"a": {"x": object()}}), wait=False) as c:
        with pytest.raises(ConfigError, match="the settings can't be sent"):
            await c.wait_ready()


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("made", PluginError, "'unplain' failed in check_fields.*'odd'.*is not plain data"),
        ({1}, FieldError, "'odd': is not plain data"),
        (2**64, FieldError, "'odd': has an integer beyond 64 bits"),
    ],
)
async def test_admission_says_whose_value_it_is(value: Any, error: type[Exception], words: str):
    async with client(with_plugins(), on=("unplain",)) as c:
        admitter = Admitter(c.config, c.host, switches=lambda: c.switches, info=lambda: c.info, tokenize=lambda text: [1])
        parsed = ParsedRequest(endpoint="generate", prompts=[Prompt([1])], fields={"odd": value}, group="g")
        with pytest.raises(error, match=words):
            admitter.admit(parsed)
        assert admitter.admit(
            ParsedRequest(endpoint="generate", prompts=[Prompt([1])], fields={"odd": [1]}, group="g")
        ).requests


# ---- switches -------------------------------------------------------------------------------------------------------------------


async def test_a_change_whose_asker_has_left_counts_in_both_processes(monkeypatch):
    async with client(with_plugins(), on=("a",)) as c:
        posted, post = anyio.Event(), c._supervisor.post
        monkeypatch.setattr(c._supervisor, "post", lambda message: posted.set() or post(message))
        changes: list[FeatureChange] = []
        c.bus.listen(changes.append, FeatureChange)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(c.set_features, {"a": False, "b": True}, "gone")
            await posted.wait()
            tasks.cancel_scope.cancel()
        assert (await c.query("stats"))["on"] == ["b"]  # the wire is in order: the change's reply came before this one's
        assert c.switches.on == set(c.host.loaded) == {"b"}
        assert [(change.changes, change.who) for change in changes] == [({"a": False, "b": True}, "gone")]
        await c.set_features({"a": True}, "me")
        assert c.switches.on == {"a", "b"}


async def test_a_change_asked_for_while_another_is_on_its_way_counts_on_it():
    async with client(with_plugins()) as c:
        states: list[Switches] = []

        async def switch(**changes: bool) -> None:
            states.append(await c.set_features(changes, "me"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: switch(a=True))
            tasks.start_soon(lambda: switch(b=True))
            tasks.start_soon(lambda: switch(a=False))
        assert [state.on for state in states] == [{"a"}, {"a", "b"}, {"b"}]
        assert c.switches.on == set(c.host.loaded) == {"b"}
        assert (await c.query("stats"))["on"] == ["b"]


@pytest.mark.parametrize("reply_first", [True, False])
async def test_a_reply_and_a_disabled_plugin_back_to_back_apply_in_the_order_of_the_wire(monkeypatch, reply_first: bool):
    async with client(with_plugins(), on=("a",)) as c:
        posted: list[SetFeatures] = []
        monkeypatch.setattr(c._supervisor, "post", lambda message: posted.append(message) or True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(c.set_features, {"b": True}, "me")
            await until(lambda: bool(posted))
            error = ErrorInfo(kind="PluginError", message="boom", plugin="a", hook="step_finished")
            disabled = PluginDisabled(
                "a", error, refuses_new=False, switches=Switches(frozenset({"b"} if reply_first else ()), {"a": "boom"})
            )
            reply = Reply(posted[0].call_id, switches=Switches(frozenset({"a", "b"} if reply_first else {"b"}), {}))
            for message in (reply, disabled) if reply_first else (disabled, reply):
                c.engine_message(message)
            assert c.switches.on == {"b"}
        assert c.switches.on == set(c.host.loaded) == {"b"}
        monkeypatch.undo()


async def test_a_refused_change_takes_back_what_the_front_prepared(monkeypatch):
    async with client(with_plugins(), on=("a",)) as c:
        posted: list[SetFeatures] = []
        monkeypatch.setattr(c._supervisor, "post", lambda message: posted.append(message) or True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(c.set_features, {"b": True}, "gone")
            await until(lambda: bool(posted))
            tasks.cancel_scope.cancel()
        assert set(c.host.loaded) == {"a", "b"}
        c.engine_message(Reply(posted[0].call_id, error=ConflictError("no").to_wire()))
        assert c.switches.on == set(c.host.loaded) == {"a"}
        monkeypatch.undo()


async def test_bad_settings_of_a_plugin_refuse_its_switch():
    async with client(with_plugins(plugins={"b": {"no_such": 1}}), on=("a",)) as c:
        with pytest.raises(ConflictError, match=r"\[plugins.b\].*no_such"):
            await c.set_features({"b": True, "a": False}, "me")
        assert c.switches.on == set(c.host.loaded) == {"a"}
        assert (await c.query("stats"))["on"] == ["a"]


async def test_a_failed_limit_lets_those_pass_that_dont_use_it():
    async with client(with_plugins("slow"), on=("a",)) as c:
        c.refusing["a"] = ErrorInfo(kind="PluginError", message="boom")
        with pytest.raises(UnavailableError, match="'a' has failed"):
            c.submit([request("uses", features=("a",), fields={"x": 1})])
        await first_token(c.submit([request("not", features=("a",))])[0])


async def test_what_holds_follows_the_kernels_in_force():
    async with client(with_plugins(), on=("kernel",)) as c:
        assert c.info is not None
        assert c.info.lossless
        c.engine_message(StepOutput(step_id=1, kernels=Kernels(attention="odd", lossless=False, reason="not invariant")))
        assert (c.info.lossless, c.info.lossless_reason) == (False, "not invariant")
        c.engine_message(StepOutput(step_id=2))
        c.engine_message(StepOutput(step_id=3, kernels=Kernels(attention="torch", lossless=True)))
        assert (c.info.lossless, c.info.lossless_reason) == (True, "")


async def test_a_plugin_that_wont_start_in_the_front_is_a_start_error():
    config = settings(features={"load": ["engine_plugins:FrontFails"]})
    made = EngineClient(config, Bus(), make_host("front", config), Switches(frozenset({"front_fails"})))
    with pytest.raises(PluginLoadError, match="'front_fails' failed in front_started: ValueError: no front"):
        await made.run()
