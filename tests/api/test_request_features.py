"""What a request runs with: the server's switches, the client's wishes, an arm's flags; and who decided what."""

from __future__ import annotations

import sys

import anyio
import pytest

from tokenbus.core.front.features import Overrides, check_overrides
from tokenbus.core.host import Switches
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

pytestmark = pytest.mark.anyio

SEEN: list[str] = []


class Loud(Plugin):
    """Off until somebody asks for it."""

    info = PluginInfo(name="loud", summary="", scope="request", lossless=False, claims={"volume"})

    @hookimpl
    def front_started(self, front):
        SEEN.append("+loud")

    @hookimpl
    def front_stopped(self):
        SEEN.append("-loud")

    @hookimpl
    def check_fields(self, fields, request):
        return {"volume": fields["volume"] + 1}


class Needy(Plugin):
    info = PluginInfo(name="needy", summary="", scope="request", lossless=True, requires={"loud"})


class Quiet(Plugin):
    info = PluginInfo(name="quiet", summary="", scope="request", lossless=True, conflicts={"loud"})


class Reader(Plugin):
    info = PluginInfo(name="reader", summary="", scope="request", lossless=True, slot="tool_calls")


class Shared(Plugin):
    info = PluginInfo(name="shared", summary="", scope="request", lossless=True, slot="scheduling")


class Broken(Plugin):
    info = PluginInfo(name="broken", summary="", scope="request", lossless=True)

    @hookimpl
    def front_started(self, front):
        raise OSError("no such device")


class Step(Plugin):
    info = PluginInfo(name="step", summary="", scope="step", lossless=True)


MINE = (Loud, Needy, Quiet, Reader, Shared, Broken, Step)


@pytest.fixture
async def api(serve):
    SEEN.clear()
    sys.modules["request_features_plugins"] = sys.modules[__name__]
    features = {"load": [f"request_features_plugins:{cls.__name__}" for cls in MINE]}
    allowed = ["chunked_prefill", *(cls.info.name for cls in MINE)]
    async with serve({"server": {"client_features": allowed}, "features": features}) as harness:
        yield harness
        assert harness.service.host.loaded.keys() == harness.engine.switches.on
        await harness.check_well()


def wish(**features):
    return {"features": features}


async def test_a_plugin_that_is_off_comes_for_one_request_and_goes_with_it(api):
    off = await api.complete("x", volume=10)
    assert off.error["param"] == "volume"
    assert '{"loud": true}} switches it on for this request' in off.error["message"]
    answer = await api.complete("x", volume=10, tokenbus=wish(loud=True))
    admitted = api.engine.admitted[-1]
    assert admitted.fields == {"volume": 11}
    assert admitted.pinned == {"loud": True}
    assert "loud" in answer.headers["x-tokenbus-features"].split(",")
    assert "loud" in answer.body["tokenbus"]["features"]
    assert answer.body["tokenbus"]["switches"] == {"loud": {"on": True, "source": "client"}}
    assert SEEN == ["+loud", "-loud"]
    await api.call("POST", "/v1/tokenbus/features", {"features": {"loud": True}})
    answer = await api.complete("x", volume=1, tokenbus=wish(loud=True))
    assert answer.status == 200
    assert SEEN == ["+loud", "-loud", "+loud"]


async def test_it_stays_while_any_request_has_it(api):
    api.engine.hold = True
    async with anyio.create_task_group() as tasks:
        for prompt in ("abc", "q"):
            tasks.start_soon(lambda prompt=prompt: api.complete(prompt, tokenbus=wish(loud=True)))
        await api.until(lambda: len(api.engine.open) == 2)
        api.engine.resume()
        api.engine.hold_after = 1  # "q" ends, "abc" has two more to come
        await api.until(lambda: len(api.engine.open) == 1)
        assert SEEN == ["+loud"]
        api.engine.resume()
    assert SEEN == ["+loud", "-loud"]


@pytest.mark.parametrize(
    ("features", "param", "reason"),
    [
        ({"needy": True}, "needy", "needs 'loud', which is off for this request"),
        ({"loud": True, "quiet": True}, "loud", "it conflicts with 'quiet'"),
        ({"reader": True}, "reader", "its slot 'tool_calls' is held by 'tools.auto'"),
        ({"shared": True}, "shared", "the slot 'scheduling' serves all of them"),
        ({"step": True}, "step", "scope step"),
        ({"broken": True}, "broken", "can't be started: plugin 'broken' failed in front_started: OSError: no such device"),
        ({"loude": True}, "loude", "did you mean 'loud'"),
    ],
)
async def test_a_wish_that_cant_be_met_is_refused_with_the_reason(api, features, param, reason):
    answer = await api.complete("x", tokenbus=wish(**features))
    assert (answer.status, answer.error["param"]) == (400, f"tokenbus.features.{param}")
    assert reason in answer.error["message"]
    assert api.engine.admitted == []


async def test_wishes_count_together(api):
    answer = await api.complete("x", tokenbus=wish(loud=True, needy=True))
    assert {"loud", "needy"} <= set(answer.body["tokenbus"]["features"])


async def test_what_failed_comes_back_only_by_the_operators_hand(api):
    now = api.engine.switches
    api.engine.switches = Switches(now.on, {**now.reasons, "loud": "switched off after it failed: boom"}, frozenset({"loud"}))
    answer = await api.complete("x", tokenbus=wish(loud=True))
    assert (answer.status, answer.error["code"]) == (400, "FeatureOffError")
    assert "boom" in answer.error["message"]
    assert "switches it on" not in (await api.complete("x", volume=1)).error["message"]
    await api.call("POST", "/v1/tokenbus/features", {"features": {"loud": True}})
    assert api.engine.switches.failed == frozenset()
    assert (await api.complete("x", tokenbus=wish(loud=True))).status == 200


async def test_why_a_plugin_did_less_than_it_could(api):
    answer = await api.complete("abc", prompt_logprobs=1)
    assert answer.body["tokenbus"]["switches"] == {
        "prefix_cache": {"on": True, "source": "server", "because": "skipped: prompt logprobs"}
    }


# ---- arms -----------------------------------------------------------------------------------------------------------------------


class OneArm:
    """Stands for experiments: every request is given to arm "b"."""

    headers = ()

    def __init__(self, features):
        self.features = features

    def assign(self, parsed):
        return Overrides("b", self.features)

    def note(self, *args):
        """What becomes of the request is nobody's business here."""

    not_given = refused = dropped = note


def give(api, **features):
    api.service.experiments = OneArm(features)


async def test_an_arm_decides_what_the_client_leaves_open(api):
    give(api, loud=True, prefix_cache=False)
    answer = await api.complete("x", volume=1, tokenbus=wish(chunked_prefill=False))
    admitted = api.engine.admitted[-1]
    assert (admitted.arm, answer.headers["x-tokenbus-arm"], api.records[-1].arm) == ("b", "b", "b")
    assert admitted.pinned == {"loud": True, "prefix_cache": False, "chunked_prefill": False}
    assert not {"prefix_cache", "chunked_prefill"} & set(admitted.features)
    assert answer.body["tokenbus"]["arm"] == "b"
    assert answer.body["tokenbus"]["switches"] == {
        "loud": {"on": True, "source": "arm:b"},
        "prefix_cache": {"on": False, "source": "arm:b", "because": "switched off by the arm"},
        "chunked_prefill": {"on": False, "source": "client", "because": "switched off by the client"},
    }
    give(api)
    answer = await api.complete("x")
    assert (answer.headers["x-tokenbus-arm"], "switches" in answer.body["tokenbus"]) == ("b", False)


@pytest.mark.parametrize(
    ("flags", "client", "reason"),
    [
        ({"chunked_prefill": False}, {"chunked_prefill": True}, "the client switched 'chunked_prefill' on"),
        ({"needy": True}, {}, "'needy' needs 'loud'"),
        ({"loud": True}, {"quiet": True}, "conflicts with 'quiet'"),
        ({"step": True}, {}, "scope step"),
        ({"nobody": True}, {}, "no plugin is called 'nobody'"),
        ({"broken": True}, {}, "no such device"),
    ],
)
async def test_an_arm_is_applied_as_a_whole_or_not_at_all(api, flags, client, reason):
    give(api, prefix_cache=False, **flags)
    answer = await api.complete("x", tokenbus=wish(**client))
    assert answer.status == 200
    assert (answer.headers["x-tokenbus-arm"], api.records[-1].arm) == ("default", "")
    states = answer.body["tokenbus"]["switches"]
    assert states["prefix_cache"]["on"]
    assert states["prefix_cache"]["source"] == "server"
    assert reason in states["prefix_cache"]["because"]
    for name, on in client.items():
        assert states[name] == {"on": on, "source": "client"}


async def test_an_arm_can_be_looked_at_before_it_starts(api):
    host, switches = api.service.host, api.engine.switches
    assert check_overrides(host, switches, Overrides("b", {"loud": True, "needy": True})) is None
    assert "needs 'loud'" in (check_overrides(host, switches, Overrides("b", {"needy": True})) or "")
