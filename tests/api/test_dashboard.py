"""/dashboard and the stream behind it: who gets them, and what the page may load."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import anyio
import pytest

from tokenbus.core.errors import UnavailableError

pytestmark = pytest.mark.anyio

PAGE = "/dashboard"
EVENTS = "/v1/tokenbus/events"


async def page_of(api, **options):
    async with api.session.get(api.url + PAGE, **options) as response:
        return response.status, response.headers, await response.text()


async def test_the_page_may_load_nothing_but_itself(api):
    status, headers, text = await page_of(api)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (code,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'", "the browser would refuse it"
    assert "STYLE" not in re.findall(r"/\*\w+\*/", text)
    assert re.findall(r"https?:|(?:src|href)=\"(?!data:,|#)", text) == [], "nothing from anywhere else"
    assert re.findall(r"\son\w+=|\sstyle=", text) == [], "the policy would refuse these"


async def test_the_stream_has_frames_also_without_an_engine_that_answers(api):
    async def query(what, **_):
        raise UnavailableError(f"no engine that could be asked for {what}")

    api.engine.query, api.engine.ready = query, lambda: (False, "it restarts")
    api.engine.restarts = api.engine.suspects = 0
    async with api.session.get(api.url + EVENTS) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        with anyio.fail_after(5):
            line = await response.content.readline()
        frame = json.loads(line.removeprefix(b"data: "))
        assert frame["server"]["doubt"] == "it restarts"
        assert frame["info"]["model"] == "fake"
        assert "engine" not in frame
    async with api.session.head(api.url + EVENTS) as response:
        assert response.status == 200


async def test_without_an_admin_key_both_are_for_loopback_only(api):
    for path in (PAGE, EVENTS):
        for headers in ({"Host": "tokenbus.example"}, {"X-Forwarded-For": "10.0.0.1"}, {"Origin": "https://evil.example"}):
            assert (await api.call("GET", path, headers=headers)).status == 403


async def test_with_an_admin_key_the_page_is_for_anybody_and_the_stream_for_the_key(serve):
    async with serve({"server": {"admin_key": "secret", "api_key": ["client"]}}) as api:
        status, _, text = await page_of(api, headers={"Host": "tokenbus.example"})
        assert status == 200
        assert "secret" not in text
        assert (await api.call("GET", EVENTS)).status == 401
        assert (await api.call("GET", EVENTS, headers={"Authorization": "Bearer client"})).status == 401
        assert (await api.call("HEAD", EVENTS, headers={"Authorization": "Bearer secret"})).status == 200


async def test_switched_off_there_is_no_page(serve):
    async with serve({"features": {"disable": ["dashboard"]}}) as api:
        assert (await api.call("GET", PAGE)).status == 404
