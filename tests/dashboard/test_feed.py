"""The feed: frames while somebody views, nothing while nobody does, and a slow viewer misses frames rather than hold anybody up."""

from __future__ import annotations

import json
from types import SimpleNamespace

import anyio
import pytest

from tokenbus.core.bus import Bus
from tokenbus.core.config import SchedulerConfig
from tokenbus.core.errors import OverloadedError, UnavailableError
from tokenbus.core.front import feed as module
from tokenbus.core.front.events import EngineDied, FeatureChange, RequestRecord, RequestRefused
from tokenbus.core.front.feed import Feed, percentiles
from tokenbus.core.host import Switches
from tokenbus.core.messages import WatchReply

pytestmark = pytest.mark.anyio


class FakeClient:
    """What the feed uses of `EngineClient`."""

    def __init__(self) -> None:
        self.info = None
        self.state = "ready"
        self.open_requests = 3
        self.restarts = 1
        self.suspects = 0
        self.asked: list[bool] = []
        self.answer: WatchReply | Exception = reply()
        self.gate = anyio.Event()
        self.gate.set()

    def ready(self):
        return True, "ok"

    async def query(self, what, *, slow):
        assert what == "watch"
        self.asked.append(slow)
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def reply(**changes) -> WatchReply:
    values = {
        "steps": [], "lost": 0, "ids": [], "open": 3, "running": 2, "waiting": 1, "free_blocks": 5, "retained_blocks": 1,
        "num_blocks": 8, "allocation_failures": 0, "requests": None, "blocks": None,
    }  # fmt: skip
    return WatchReply(**(values | changes))


def record(**changes) -> RequestRecord:
    values = {
        "request_id": "r", "group": "g", "endpoint": "chat", "tenant": "", "arm": "", "arrival": 1000.0, "prompt_tokens": 10,
        "cached_tokens": 4, "output_tokens": 5, "finish_reason": "stop", "ttft": 0.2, "e2e": 1.0, "gaps": (0.1, 0.2, 0.3, 0.2),
    }  # fmt: skip
    return RequestRecord(**(values | changes))


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(module, "PERIOD", 0.01)
    monkeypatch.setattr(module.time, "time", lambda: 1010.0)
    bus, client = Bus(), FakeClient()
    return SimpleNamespace(bus=bus, client=client, feed=Feed(client, bus, lambda: SchedulerConfig(max_running=7)))


async def frames(viewer, most: int) -> list[dict]:
    found = []
    with anyio.fail_after(5):
        async for frame in viewer:
            found.append(json.loads(bytes(frame)))
            if len(found) == most:
                break
    return found


async def test_frames_come_while_somebody_views_and_the_engine_is_left_alone_otherwise(made):
    assert made.client.asked == []
    viewer = made.feed.join()
    first, second = await frames(viewer, 2)
    assert first["server"] == {"state": "ready", "doubt": "", "open": 3, "restarts": 1, "suspects": 0}
    assert first["engine"]["running"] == 2
    assert first["limits"]["max_running"] == 7
    assert "limits" not in second, "the slow part comes about once a second"
    assert made.client.asked[:2] == [True, False]
    made.feed.leave(viewer)
    await anyio.sleep(0.03)
    asked = len(made.client.asked)
    await anyio.sleep(0.05)
    assert len(made.client.asked) == asked
    made.feed.leave(viewer)


async def test_all_viewers_share_one_question_and_a_new_one_starts_with_the_slow_part(made):
    one = made.feed.join()
    await frames(one, 3)
    asked = len(made.client.asked)
    two = made.feed.join()
    first = (await frames(two, 1))[0]
    assert "latency" in first
    assert len(made.client.asked) <= asked + 2
    made.feed.leave(one)
    assert len(await frames(two, 3)) == 3, "it goes on for the other"
    made.feed.leave(two)


async def test_what_the_bus_told_is_shown(made):
    for index in range(100):
        made.bus.publish(record(ttft=(index + 1) / 100, arm="x/a,y/b" if index < 10 else ""))
    made.bus.publish(record(finish_reason="error", error_kind="DeadlineError", ttft=None, gaps=()))
    made.bus.publish(record(arrival=10.0))
    made.bus.publish(RequestRefused("chat", 429, "OverloadedError"))
    made.bus.publish(FeatureChange({"prefix_cache": False}, Switches(frozenset()), "admin key", 1005.0))
    made.bus.publish(EngineDied("killed", 2, 0.5))
    viewer = made.feed.join()
    frame = (await frames(viewer, 1))[0]
    made.feed.leave(viewer)
    assert frame["latency"]["ttft"] == {"count": 100, "p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    assert frame["latency"]["inter_token"]["count"] == 400
    assert frame["finished"] == {"stop": 100, "DeadlineError": 1}, "the one that is older than the window isn't counted"
    assert frame["ended"]["cached_tokens"] == 404
    assert frame["refused"] == {"429 OverloadedError": 1}
    assert [event["text"] for event in frame["events"]] == [
        "prefix_cache off (by admin key)",
        "engine died: killed; 2 open requests",
    ]
    assert frame["arms"]["x/a"]["requests"] == 10
    assert frame["arms"]["x/a"]["inter_token"]["p50"] == pytest.approx((1.0 - 0.06) / 4)
    assert list(frame["arms"]) == ["x/a", "y/b"]


async def test_gaps_of_a_long_answer_are_thinned_out_evenly(made):
    made.bus.publish(record(gaps=tuple(float(i) for i in range(1000))))
    viewer = made.feed.join()
    latency = (await frames(viewer, 1))[0]["latency"]["inter_token"]
    made.feed.leave(viewer)
    assert latency["count"] == 32
    assert latency["p50"] == pytest.approx(500, abs=40)


async def test_a_slow_viewer_misses_frames_and_is_told(made):
    slow, quick = made.feed.join(), made.feed.join()
    await frames(quick, module.QUEUE + 4)
    found = await frames(slow, 1)
    assert found[0]["missed_frames"] >= 3
    assert "server" in (await frames(slow, 1))[0]
    made.feed.leave(slow)
    made.feed.leave(quick)


async def test_frames_go_on_while_the_engine_is_busy_and_its_late_answer_is_not_lost(made):
    made.client.gate = anyio.Event()
    viewer = made.feed.join()
    busy = await frames(viewer, 3)
    assert all("engine" not in frame for frame in busy)
    assert len(made.client.asked) == 1, "one question at a time"
    made.client.gate.set()
    with anyio.fail_after(5):
        while "engine" not in (await frames(viewer, 1))[0]:
            pass
    made.feed.leave(viewer)


async def test_frames_go_on_without_an_engine(made):
    made.client.answer = UnavailableError("it restarts")
    made.client.state = "restarting"
    viewer = made.feed.join()
    frame = (await frames(viewer, 1))[0]
    assert frame["server"]["state"] == "restarting"
    assert "engine" not in frame
    made.feed.leave(viewer)


async def test_it_ends_when_the_server_has_drained(made):
    viewer = made.feed.join()
    await frames(viewer, 1)
    made.client.state = "draining"
    assert (await frames(viewer, 2))[-1]["server"]["state"] in {"ready", "draining"}, "open requests are still shown"
    made.client.open_requests = 0
    with anyio.fail_after(5):
        async for _ in viewer:
            pass
    made.feed.leave(viewer)


async def test_there_are_so_many_viewers_and_no_more(made):
    viewers = [made.feed.join() for _ in range(module.MOST_VIEWERS)]
    with pytest.raises(OverloadedError, match="close one"):
        made.feed.join()
    for viewer in viewers:
        made.feed.leave(viewer)


async def test_a_bug_in_a_frame_ends_the_streams_and_the_next_viewer_gets_a_new_one(made, monkeypatch):
    monkeypatch.setattr(module.History, "shown", lambda self, now: 1 / 0)
    viewer = made.feed.join()
    failing = made.feed._task
    assert await frames(viewer, 1) == []
    with pytest.raises(ZeroDivisionError):
        await failing
    made.feed.leave(viewer)
    monkeypatch.undo()
    viewer = made.feed.join()
    assert (await frames(viewer, 1))[0]["server"]["state"] == "ready"
    made.feed.leave(viewer)


def test_percentiles_are_by_nearest_rank():
    assert percentiles([]) == {"count": 0}
    assert percentiles([3.0]) == {"count": 1, "p50": 3.0, "p95": 3.0, "p99": 3.0, "max": 3.0}
    assert percentiles(range(1, 201))["p99"] == 198
