"""A third party's plugin as the API sees it: its fields, its filter, its route, its failures."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from tokenbus.core.contexts import Route
from tokenbus.core.errors import FieldError
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

pytestmark = pytest.mark.anyio


class Upper:
    def __init__(self, stop_at: str, fails: bool) -> None:
        self.stop_at, self.fails, self.held = stop_at, fails, ""

    def feed(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """Holds back one character, so that `final` matters."""
        if self.fails:
            raise ValueError("broken filter")
        text = self.held + text
        self.held, text = ("", text) if final else (text[-1:], text[:-1])
        if self.stop_at and self.stop_at in text:
            return text.partition(self.stop_at)[0].upper(), "shouted enough"
        return text.upper(), None


class Shout(Plugin):
    info = PluginInfo(name="shout", summary="upper case", scope="request", lossless=False, claims={"shout"}, default=False)

    @hookimpl
    def check_fields(self, fields, request):
        if fields["shout"] == "boom":
            raise RuntimeError("cannot check")
        if not isinstance(fields["shout"], dict):
            raise FieldError("shout", "must be an object")
        return {"shout": {"at": "", "fails": False, **fields["shout"]}}

    @hookimpl
    def text_filter(self, request):
        return Upper(request.fields["shout"]["at"], request.fields["shout"]["fails"])

    @hookimpl
    def http_routes(self):
        async def hello(request):
            return web.json_response({"hello": request.path})

        return [Route("GET", "/shout", hello), Route("GET", "/shout/admin", hello, admin=True)]


@pytest.fixture
async def api(serve):
    async with serve({"server": {"client_features": ["shout"]}}) as harness:
        host = harness.engine.host
        host.add(Shout)
        harness.engine.switches = host.change_switches(harness.engine.switches, {"shout": True})
        host.load({"shout"})
        yield harness
        await harness.check_well()


async def test_filter_sees_all_text_in_order(api):
    for answer in (await api.complete("abc é", shout={"x": 1}), await api.complete("abc é", shout={"x": 1}, stop="zzz")):
        assert (answer.text, answer.choice["finish_reason"]) == ("ABC É", "stop")
    events = await api.stream_completion("abc é", shout={"x": 1})
    assert events.text() == "ABC É"
    assert api.engine.admitted[-1].fields == {"shout": {"x": 1, "at": "", "fails": False}}
    assert (await api.complete("abc")).text == "abc"


async def test_filter_stops(api):
    answer = await api.complete("one two three", shout={"at": "w"})
    assert (answer.text, answer.choice["stop_reason"]) == ("ONE T", "shouted enough")
    last = await api.complete("one w", shout={"at": "w"})  # the match is complete only at the end
    assert (last.text, last.choice["stop_reason"], last.choice["finish_reason"]) == ("ONE ", "shouted enough", "stop")


async def test_off_for_one_request(api):
    answer = await api.complete("abc", shout={"x": 1}, tokenbus={"features": {"shout": False}})
    assert (answer.status, answer.error["plugin"]) == (400, "shout")


async def test_check_that_refuses_and_check_that_raises(api):
    refused = await api.complete(shout=True)
    assert (refused.status, refused.error["param"], refused.error["plugin"]) == (400, "shout", "shout")
    failed = await api.complete(shout="boom")
    assert (failed.status, failed.error["plugin"], failed.error["hook"]) == (500, "shout", "check_fields")
    assert [refusal.kind for refusal in api.refusals] == ["FieldError", "PluginError"]


async def test_filter_that_raises_ends_its_request_only(api):
    failed = await api.complete("abc", shout={"fails": True})
    assert (failed.status, failed.error["plugin"], failed.error["hook"]) == (500, "shout", "text_filter")
    await api.until(lambda: not api.engine.open)
    assert [(record.finish_reason, record.error_kind) for record in api.records] == [("error", "PluginError")]


async def test_routes(api):
    assert (await api.call("GET", "/shout")).body == {"hello": "/shout"}
    assert (await api.call("POST", "/shout")).status == 405
    assert (await api.call("GET", "/shout/admin", headers={"Origin": "https://evil.example"})).status == 403
    await api.call("POST", "/v1/tokenbus/features", {"features": {"shout": False}})
    assert (await api.call("GET", "/shout")).status == 404


async def test_c61_nothing_grows_with_requests_served(api):
    async def serve_some(count):
        for index in range(count):
            await api.complete("ab", max_tokens=1 + index % 2, n=1 + index % 2)
            await api.complete(nope=1)
        for kept in (api.engine.admitted, api.engine.ended, api.records, api.refusals):
            kept.clear()
        gc.collect()
        return len(gc.get_objects())

    warm = await serve_some(150)
    assert await serve_some(500) < warm + 100


# ---- nonsense -------------------------------------------------------------------------------------------------------------------


class Odd(Plugin):
    """Answers in Python's terms what the field says."""

    info = PluginInfo(name="odd", summary="", scope="request", lossless=False, claims={"odd"})
    asked_for_routes: list[str] = []
    routes: Any = ()

    @hookimpl
    def check_fields(self, fields, request):
        return {"set": {"odd": {1}}, "list": [1], "foreign": {"shout": {}}}.get(fields["odd"])

    @hookimpl
    def text_filter(self, request):
        feeds = {
            "text only": lambda text, final: text,
            "bytes": lambda text, final: (b"x", None),
            "reason": lambda text, final: ("", 5),
        }
        asked = request.fields["odd"]
        return "no filter" if asked == "filter" else SimpleNamespace(feed=feeds[asked])

    @hookimpl
    def http_routes(self):
        self.asked_for_routes.append(self.info.name)
        return self.routes


class OtherOdd(Odd):
    info = PluginInfo(name="odd.other", summary="", scope="request", lossless=False, claims={"other"})


@pytest.fixture
async def odd_api(serve, monkeypatch):
    monkeypatch.setattr(Odd, "asked_for_routes", [])
    async with serve() as harness:
        host = harness.engine.host
        for cls in (Odd, OtherOdd):
            host.add(cls)
        harness.engine.switches = host.change_switches(harness.engine.switches, {"odd": True})
        host.load({"odd", "odd.other"})
        yield harness
        await harness.check_well()


@pytest.mark.parametrize(
    ("field", "hook"),
    [
        ("set", "check_fields"),
        ("list", "check_fields"),
        ("foreign", "check_fields"),
        ("filter", "text_filter"),
        ("text only", "text_filter"),
        ("bytes", "text_filter"),
        ("reason", "text_filter"),
    ],
)
async def test_a_nonsensical_answer_ends_its_request_only(odd_api, field, hook):
    failed = await odd_api.complete("abc", odd=field)
    assert (failed.status, failed.error["plugin"], failed.error["hook"]) == (500, "odd", hook)
    assert (await odd_api.complete("abc")).text == "abc"


async def test_routes_are_asked_for_once_while_the_plugin_is_on(odd_api, monkeypatch):
    monkeypatch.setattr(Odd, "routes", [Route("GET", "/odd", lambda request: None)])
    monkeypatch.setattr(OtherOdd, "routes", ())
    for _ in range(3):
        assert (await odd_api.call("POST", "/odd")).status == 405
    await odd_api.call("POST", "/v1/tokenbus/features", {"features": {"odd.other": True}})
    assert (await odd_api.call("POST", "/odd")).status == 405
    assert Odd.asked_for_routes == ["odd", "odd.other"]
    await odd_api.call("POST", "/v1/tokenbus/features", {"features": {"odd": False}})
    assert (await odd_api.call("POST", "/odd")).status == 404
    await odd_api.call("POST", "/v1/tokenbus/features", {"features": {"odd": True}})
    assert (await odd_api.call("POST", "/odd")).status == 405
    assert Odd.asked_for_routes == ["odd", "odd.other", "odd"]


@pytest.mark.parametrize("routes", [5, ["/x"], [Route("GET", "/odd", None)]])
async def test_nonsensical_routes_are_none(odd_api, routes):
    odd_api.engine.host.loaded["odd"].routes = routes
    for _ in range(2):
        assert (await odd_api.call("GET", "/odd")).status == 404
    assert Odd.asked_for_routes == ["odd"]
