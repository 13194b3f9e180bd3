"""The page in a real browser: a live server, its switches, the keyboard, light and dark, a thousand requests."""

from __future__ import annotations

import json
import threading

import pytest
import synthetic

pytestmark = [pytest.mark.browser, pytest.mark.anyio, pytest.mark.timeout(240)]

READY = "document.getElementById('state').textContent === 'ready'"
FOCUSED = "document.activeElement.id || document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"


def switch(name: str) -> str:
    return f"""document.querySelector('[data-plugin="{name}"]')"""


def is_on(name: str, on: bool) -> str:
    return f"{switch(name)}?.getAttribute('aria-checked') === '{str(on).lower()}'"


async def colour_at(tab, canvas: str, x: str, y: str) -> list[int]:
    """One pixel of a canvas, in its own coordinates."""
    pen = f"document.getElementById('{canvas}').getContext('2d')"
    return await tab.eval(f"[...{pen}.getImageData({x}, {y}, 1, 1).data]")


async def test_a_live_server_is_shown_and_switched(tab, serve_demo, tmp_path):
    with serve_demo() as server:
        await tab.go(server.url + "/dashboard")
        await tab.until(READY)
        stories = [f"Story {i}: once upon a time in a very distant land there lived" for i in range(3)]
        threads = [threading.Thread(target=server.complete, args=(s,), kwargs={"max_tokens": 150}) for s in stories]
        for thread in threads:
            thread.start()
        await tab.until("document.getElementById('t-running').textContent === '3'")
        await tab.until("/^3 requests/.test(document.getElementById('timeline-note').textContent)")
        assert "decoding" in await tab.until("document.getElementById('timeline').getAttribute('aria-label')")
        assert await tab.until(
            "[...document.querySelectorAll('#requests tbody tr')].filter(r => r.cells[1].textContent === 'decode').length === 3"
        )
        await tab.screenshot(tmp_path / "live.png")

        await tab.until(is_on("prefix_cache", on=True))
        await tab.eval(f"{switch('prefix_cache')}.focus()")
        await tab.press(" ")
        await tab.until(is_on("prefix_cache", on=False))
        features = server.call("/v1/tokenbus/features")[1]["features"]
        assert features["prefix_cache"]["on"] is False
        await tab.until("document.getElementById('events').textContent.includes('prefix_cache off (by loopback 127.0.0.1)')")

        await tab.eval(f"{switch('quantization.int8')}.click()")
        refusal = await tab.until(
            "!document.getElementById('refusal').hidden && document.getElementById('refusal').textContent"
        )
        assert refusal.startswith("quantization.int8 was not switched on: ")
        assert tab.problems.pop().startswith("Failed to load resource: the server responded with a status of 409")
        tab.problems = [problem for problem in tab.problems if not problem.endswith("/v1/tokenbus/experiments")]
        for thread in threads:
            thread.join()
        await tab.until("document.getElementById('t-running').textContent === '0'")
        await tab.until("document.getElementById('latency').rows[1].cells[5].textContent === '3'")
        assert tab.problems == []
    await tab.until("document.getElementById('state').textContent === 'reconnecting'")


async def test_the_stream_is_taken_up_again(tab):
    engine = synthetic.Engine(5, 0)
    async with synthetic.serve(engine) as url:
        await tab.go(url + "/dashboard")
        await tab.until(READY)
        before = engine.frames
    await tab.until("document.getElementById('state').textContent === 'reconnecting'")
    port = int(url.rpartition(":")[2])
    async with synthetic.serve(engine, port=port):
        await tab.until(READY)
        assert engine.frames > before


async def test_everything_is_reached_by_keyboard(tab):
    async with synthetic.serve(synthetic.Engine(90, 30)) as url:
        await tab.go(url + "/dashboard")
        await tab.until(is_on("speculative.ngram", on=True))
        seen = []
        for _ in range(13):
            await tab.press("Tab")
            seen.append(await tab.eval(FOCUSED))
            assert await tab.eval("document.activeElement.matches(':focus-visible')"), seen
        assert seen == [
            "Skip to the timeline", "pause", "axis", "fit", "timeline-scroll", "which", "requests-scroll", "chunked_prefill",
            "prefix_cache", "quantization.int8", "sampling.penalties", "scheduling.priority", "speculative.ngram",
        ]  # fmt: skip
        await tab.eval("document.getElementById('fit').focus()")
        await tab.press("Enter")
        assert await tab.eval("document.getElementById('fit').getAttribute('aria-pressed')") == "true"
        await tab.eval(f"{switch('scheduling.priority')}.focus()")
        await tab.press("Enter")
        await tab.until(is_on("scheduling.priority", on=True))
        assert await tab.eval(FOCUSED) == "scheduling.priority", "the list is brought up to date in place"
        await tab.eval("document.getElementById('pause').focus()")
        await tab.press(" ")
        note = await tab.text("timeline-note")
        await tab.eval("new Promise(done => setTimeout(done, 700))")
        assert await tab.text("timeline-note") == note
        assert tab.problems == []


async def test_every_control_and_picture_has_a_name(tab):
    async with synthetic.serve(synthetic.Engine(5, 5)) as url:
        await tab.go(url + "/dashboard")
        await tab.until(is_on("speculative.ngram", on=True))
        await tab.until("!!document.querySelector('.experiment')")
        tree = (await tab.send("Accessibility.getFullAXTree"))["nodes"]
        nameless = [
            node["role"]["value"]
            for node in tree
            if node["role"]["value"] in {"button", "switch", "combobox", "textbox", "img", "region"}
            and not node.get("ignored")
            and not node.get("name", {}).get("value")
        ]
        assert nameless == []
        assert await tab.eval("document.querySelectorAll('h1').length") == 1


async def test_light_and_dark(tab, tmp_path):
    pages = {}
    async with synthetic.serve(synthetic.Engine(14, 9)) as url:
        await tab.go(url + "/dashboard")
        for scheme in ("light", "dark"):
            await tab.scheme(scheme)
            await tab.until("!!document.querySelector('.experiment')")
            await tab.eval("new Promise(done => setTimeout(done, 600))")
            await tab.screenshot(tmp_path / f"{scheme}.png")
            page = await tab.eval("getComputedStyle(document.body).backgroundColor")
            pages[scheme] = (page, await colour_at(tab, "kv", "3", "3"))
        assert tab.problems == []
    assert pages["light"] == ("rgb(244, 245, 247)", [0, 114, 178, 255])
    assert pages["dark"] == ("rgb(13, 17, 23)", [86, 180, 233, 255])


async def test_a_thousand_requests(tab, tmp_path):
    async with synthetic.serve(synthetic.Engine(1000, 300)) as url:
        await tab.go(url + "/dashboard")
        await tab.until("parseInt(document.getElementById('timeline-note').textContent) >= 900")
        await tab.until("parseInt(document.getElementById('timeline-note').textContent.split(' to ')[1]) >= 60")
        await tab.screenshot(tmp_path / "thousand.png")
        assert await tab.text("t-running") == "1,000"
        assert await tab.eval("document.querySelectorAll('#requests tbody tr').length") < 30
        assert await tab.text("requests-note") == "1024 listed; 276 more are open"
        top = await tab.eval("document.querySelector('#requests tbody').rows[1].cells[0].textContent")
        await tab.eval("document.getElementById('requests-scroll').focus()")
        await tab.press("End")
        await tab.until(f"document.querySelector('#requests tbody').rows[1].cells[0].textContent !== {json.dumps(top)}")
        await tab.until("[...document.querySelector('#requests tbody').rows].some(r => r.cells[1].textContent === 'waiting')")
        assert await tab.eval("document.getElementById('timeline').height") <= 310, "only what is in view is drawn"
        await tab.eval("document.getElementById('fit').click()")
        await tab.until("(([a, b]) => a === b)(document.getElementById('timeline-note').textContent.match(/\\d+/g))")
        assert tab.problems == []


async def test_no_experiments_no_section(tab):
    async with synthetic.serve(synthetic.Engine(2, 0), experiments=False) as url:
        await tab.go(url + "/dashboard")
        await tab.until(is_on("speculative.ngram", on=True))
        assert await tab.eval("document.getElementById('experiments-part').hidden") is True
        assert [problem for problem in tab.problems if "404" not in problem] == []


async def test_an_admin_key_is_asked_for_and_stays_in_the_tab(tab):
    async with synthetic.serve(synthetic.Engine(2, 0), key="secret") as url:
        await tab.go(url + "/dashboard")
        await tab.until("!document.getElementById('key-form').hidden")
        await tab.until("document.activeElement.id === 'key'")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until("document.getElementById('key-problem').textContent === 'This key is not the right one.'")
        await tab.eval("document.getElementById('key').focus()")
        await tab.type("secret")
        await tab.press("Enter")
        await tab.until(READY)
        await tab.until(is_on("speculative.ngram", on=True))
        assert await tab.eval("document.getElementById('key-form').hidden") is True
        assert await tab.eval("localStorage.length + document.cookie.length") == 0
        assert await tab.eval("document.getElementById('key').value") == ""
        await tab.eval("document.getElementById('forget').click()")
        await tab.until("!document.getElementById('key-form').hidden")
        assert await tab.eval("sessionStorage.length") == 0
        assert [problem for problem in tab.problems if "401" not in problem] == []
