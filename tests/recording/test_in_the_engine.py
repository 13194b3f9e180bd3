"""The recorder in a real EngineCore: it hears every step, is flushed at the end, and holds admission rather than steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

import anyio
from engine_fakes import FAIL_STEP, FakeWorker, following
from engine_harness import engine, request

from tokenbus.core.bus import Bus
from tokenbus.core.messages import Cancel
from tokenbus.core.recording import file, history
from tokenbus.core.recording.frames import End, Given, Ordered, Step
from tokenbus.plugins.recorder import Recorder, parts, writer

pytestmark = pytest.mark.anyio


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """The plugin, with its default folder in a place of this test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "model_hash", lambda config: "")
    return Recorder


def recordings(tmp_path):
    return sorted((tmp_path / "recordings").glob("*.tbrec"))


async def test_everything_is_on_disk_when_the_engine_has_ended(recorder, tmp_path):
    async with engine(recorder, on=("recorder",)) as core:
        await core.add(*(request(f"r{i}", max_tokens=5, features=("recorder",)) for i in range(4)))
        await core.until_finished("r0", "r1", "r2", "r3")
        plans = (await core.query("plans"))["plans"]
    found = history.read(recordings(tmp_path))
    assert [step.step.step_id for step in found.steps] == [plan["step_id"] for plan in plans]
    assert [life.end.reason for life in found.lives.values()] == ["length"] * 4
    assert [life.outputs for life in found.lives.values()] == [5] * 4
    assert found.header.features == ("recorder",)
    assert not found.notices


async def test_a_step_that_fails_is_recorded_as_that(recorder, tmp_path):
    async with engine(recorder, on=("recorder",)) as core:
        await core.add(request("good", features=("recorder",)))
        await core.until_finished("good")
        await core.add(request("bad", [FAIL_STEP, 2], features=("recorder",)))
        await core.until_finished("bad")
        await core.add(request("next", features=("recorder",)))
        await core.until_finished("next")
    frames = list(file.RecordingFile(recordings(tmp_path)[0]))
    assert [frame.failed for frame in frames if isinstance(frame, Step)].count(True) == 1
    assert [frame.reason for frame in frames if isinstance(frame, End)] == ["length", "error", "length"]
    assert not [frame for frame in frames if isinstance(frame, Ordered | Given)]


async def test_it_can_be_switched_on_and_off_while_requests_run(recorder, tmp_path):
    gate = anyio.Event()

    async def wait(order):
        if order.step_id == 3:
            await gate.wait()

    async with engine(recorder, worker=FakeWorker(before=wait), num_blocks=64) as core:
        await core.add(request("long", max_tokens=40))
        await core.until(lambda: len(core.tokens.get("long", ())) >= 2)
        gate.set()
        assert "recorder" in await core.switch(recorder=True)
        await core.add(request("short", max_tokens=3, features=("recorder",)))
        await core.until_finished("short")
        assert "recorder" not in await core.switch(recorder=False)
        await core.until_finished("long")
    found = history.read(recordings(tmp_path))
    assert {life.arrival.request_id: life.partial for life in found.lives.values()} == {"long": True, "short": False}
    assert core.tokens["long"] == following([10, 20, 30], 40)


async def test_while_the_recorder_is_far_behind_new_requests_are_held_and_running_ones_go_on(recorder, monkeypatch):
    monkeypatch.setattr(writer, "CAPACITY", 4)
    blocked = writer.threading.Event()
    original = parts.Parts.write
    monkeypatch.setattr(parts.Parts, "write", lambda self, note: (blocked.wait(60), original(self, note)))
    async with engine(recorder, on=("recorder",)) as core:
        await core.add(request("first", max_tokens=12, features=("recorder",)))
        await core.until_finished("first")
        assert core.core.bus.backlog >= 1
        late = request("late", features=("recorder",), deadline=time.time() + 0.05)
        await core.add(request("held", features=("recorder",)), request("left", features=("recorder",)), late)
        stats = await core.query("stats")
        assert stats["open"] == 0
        await core.channel.send(Cancel(["left"]))
        await core.until_finished("left")
        assert core.finished["left"].reason == "cancelled"
        await core.until_finished("late")
        assert core.finished["late"].error.kind == "DeadlineError"
        assert "held" not in core.finished
        blocked.set()
        await core.until_finished("held")
        assert core.tokens["held"] == following([10, 20, 30], 3)


async def test_a_backlog_is_asked_for_until_a_closed_listener_is_done():
    bus, behind = Bus(), [0.5]
    assert bus.backlog == 0
    listener = bus.listen(lambda _: None, int, backlog=lambda: behind[0])
    bus.listen(lambda _: None, int, backlog=lambda: 0.2)
    assert bus.backlog == 0.5
    listener.close()
    assert bus.backlog == 0.5
    behind[0] = 0.0
    assert bus.backlog == 0.2
    behind[0] = 0.9
    assert bus.backlog == 0.2
