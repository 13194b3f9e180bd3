"""What is written: all of it, nothing that was not to be, in files of a bounded size that a crash leaves readable."""

from __future__ import annotations

import os
import stat
import time

import msgspec
import pytest
from stage import Ask

from tokenbus.core.config import from_mapping
from tokenbus.core.errors import ConfigError
from tokenbus.core.host import make_host
from tokenbus.core.recording import frames
from tokenbus.core.recording.file import MAGIC, RecordingError, RecordingFile, RecordingWriter
from tokenbus.core.recording.hashing import KeyedHash
from tokenbus.core.recording.history import read
from tokenbus.plugins.recorder import parts, writer

HEADER = frames.Header(
    recording="ab" * 16, level="shape", created=1.0, version="0", model="m", max_model_len=64, block_size=4, num_blocks=16
)


def steps_of(file):
    return [frame for frame in file if isinstance(frame, frames.Step)]


def test_the_recording_tells_of_each_request_and_step_what_happened(stage, some_load):
    one = stage(scheduler={"max_running": 5, "token_budget": 40}, num_blocks=60)
    work = some_load(60, 12.0, shared=24)
    one.play(work)
    history = one.history()
    assert [step.step.step_id for step in history.steps] == [plan.step_id for plan in one.plans]
    for step, plan in zip(history.steps, one.plans, strict=True):
        names = [history.lives[serial].arrival.request_id for serial in step.serials]
        assert dict(zip(names, (run.n for run in step.runs), strict=True)) == plan.num_tokens
        assert sum(run.n for run in step.runs if run.prompt) == plan.num_prompt_tokens
        assert (step.step.budget, step.step.waiting, step.step.free_blocks) == (plan.budget, plan.waiting, plan.free_blocks)
        assert [history.lives[serial].arrival.request_id for serial in step.step.preempted] == list(plan.preempted)
    assert len(history.lives) == len(work)
    for life in history.lives.values():
        asked = work[int(life.arrival.request_id[1:])]
        assert (life.arrival.prompt, life.arrival.max_tokens) == (len(asked.prompt), asked.max_tokens)
        assert life.arrival.at >= asked.at
        assert life.outputs == len(one.outputs[life.arrival.request_id]) == sum(count for _, count in life.emitted)
        assert life.end is not None
        assert life.end.reason == "length"
    assert sum(life.end.preemptions for life in history.lives.values()) == sum(len(plan.preempted) for plan in one.plans) > 0
    assert any(life.cached for life in history.lives.values())
    header = history.header
    assert (header.model, header.dtype, header.block_size, header.num_blocks) == ("fake", "float32", 4, 60)
    assert header.config["plugins"]["chunked_prefill"] == {"mode": "fixed", "chunk_size": 16}
    assert header.features == ("chunked_prefill", "prefix_cache", "recorder", "scheduling.fcfs")


def test_accepted_drafts_are_kept_by_the_place_where_they_were_proposed(stage):
    one = stage(on=("chunked_prefill", "speculative.ngram", "recorder"))
    one.play([Ask(0.0, [300 + i for i in range(9)], 40)])
    (life,) = one.history().lives.values()
    assert life.drafted
    assert all(0 <= accepted <= proposed for proposed, accepted in life.drafted.values())
    assert life.outputs == 40


def test_a_shape_recording_holds_no_token_id_and_no_text(stage):
    secret = [710_001_001 + 7 * i for i in range(40)]
    values = {
        "fields": {"cache_salt": "my-salt-word", "stop": ["halt-word"], "logit_bias": {"710001001": 3.0}, "priority": 2},
        "tenant": "tenant-word",
        "seed": 987_654_321,
    }
    for level in ("shape", "full"):
        one = stage(level, level=level)
        one.play([Ask(0.0, secret, 6, values), Ask(0.1, secret, 6, values)])
        file = RecordingFile(one.close()[0])
        raw = b"".join(msgspec.msgpack.encode(frame) for frame in file) + msgspec.msgpack.encode(file.header)
        said = [word for word in (b"my-salt-word", b"halt-word", b"tenant-word", b"710001001") if word in raw]
        ids = [token for token in secret if msgspec.msgpack.encode(token) in raw]
        seeds = msgspec.msgpack.encode(987_654_321) in raw
        if level == "shape":
            assert (said, ids, seeds) == ([], [], False)
            lives = read([file.path]).lives
            assert lives[1].hashes[:72] == lives[2].hashes[:72]
            assert lives[1].arrival.fields == {"cache_salt": None, "stop": None, "logit_bias": None, "priority": 2}
            assert lives[2].cached == 36
        else:
            assert ids == secret
            assert seeds


def test_hashes_are_equal_for_equal_beginnings_under_one_key_only():
    hashed, other = KeyedHash(), KeyedHash()
    a, b = list(range(20)), [*range(16), 99, 98, 97, 96]
    assert hashed.blocks(a, 4)[:32] == hashed.blocks(b, 4)[:32]
    assert hashed.blocks(a, 4)[32:] != hashed.blocks(b, 4)[32:]
    assert hashed.blocks([1, *a[1:]], 4)[-8:] != hashed.blocks(a, 4)[-8:], "a block's hash depends on all before it"
    assert hashed.blocks(a, 4) == hashed.blocks(a, 4, hashed.blocks(a[:9], 4))
    assert not {hashed.blocks(a, 4)[i : i + 8] for i in range(0, 40, 8)} & {
        other.blocks(a, 4)[i : i + 8] for i in range(0, 40, 8)
    }
    assert hashed.of(b"tenant", b"x") != hashed.of(b"salt", b"x")


def test_only_the_owner_can_read_a_recording(stage):
    one = stage()
    one.play([Ask(0.0, [300, 301], 2)])
    (path,) = one.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# ---- files ----------------------------------------------------------------------------------------------------------------------


def write(path, count=5, flush=True):
    made = RecordingWriter(path, HEADER)
    for i in range(count):
        made.write(frames.Step(i, float(i), 0.5, [1, i + 1], [1]))
        if flush:
            made.flush()
    made.close()
    return made


def test_a_torn_end_is_skipped_with_a_notice_wherever_it_is_torn(tmp_path):
    whole = write(tmp_path / "whole.tbrec").path.read_bytes()
    head = write(tmp_path / "head.tbrec", 0).path.stat().st_size
    seen = set()
    for size in range(head, len(whole)):
        torn = tmp_path / f"{size}.tbrec"
        torn.write_bytes(whole[:size])
        file = RecordingFile(torn)
        steps = steps_of(file)
        assert [step.step_id for step in steps] == list(range(len(steps)))
        seen.add(len(steps))
        assert len(file.notices) == (size != head) or len(steps) < 5
        if file.notices:
            assert "torn" in file.notices[0]
    assert seen == {0, 1, 2, 3, 4}
    garbled = tmp_path / "garbled.tbrec"
    garbled.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    file = RecordingFile(garbled)
    assert len(steps_of(file)) == 4
    assert "torn" in file.notices[0]


def test_damage_before_the_end_is_an_error(tmp_path):
    path = write(tmp_path / "whole.tbrec").path
    head = write(tmp_path / "head.tbrec", 0).path.stat().st_size
    data = bytearray(path.read_bytes())
    data[head + 10] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordingError, match="damaged"):
        list(RecordingFile(path))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else entirely", MAGIC, MAGIC + b"\x05\x00\x00\x00"])
def test_what_is_no_recording_is_said_to_be_none(tmp_path, content):
    path = tmp_path / "x.tbrec"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=r"not a recording|without a header"):
        RecordingFile(path)


def test_another_format_is_refused_with_both_named(tmp_path):
    made = RecordingWriter(tmp_path / "x.tbrec", msgspec.structs.replace(HEADER, format=9))
    made.close()
    with pytest.raises(RecordingError, match=r"format 9.*reads format 1"):
        RecordingFile(made.path)


def test_a_recording_goes_on_in_another_file_and_the_oldest_are_deleted(stage, some_load, monkeypatch):
    monkeypatch.setattr(parts, "MIB", 6000)
    monkeypatch.setattr("tokenbus.core.recording.file.BLOCK_BYTES", 2000)
    work = some_load(400, 10.0)
    one = stage("kept", recorder={"max_file_mb": 1, "max_total_mb": 100})
    one.play(work)
    files = one.close()
    assert len(files) > 3
    assert all(path.stat().st_size < 2 * 6000 for path in files)
    whole = read(files)
    assert [step.step.step_id for step in whole.steps] == [plan.step_id for plan in one.plans]
    assert len(whole.lives) == len(work)
    assert not any(life.partial for life in whole.lives.values())
    alone = read(files[2:3])
    assert any(life.partial for life in alone.lives.values())
    assert alone.header.recording == whole.header.recording
    with pytest.raises(RecordingError, match="does not follow"):
        read([files[0], files[2]])

    few = stage("capped", recorder={"max_file_mb": 1, "max_total_mb": 3})
    (few.folder).mkdir()
    (few.folder / "notes.tbrec").write_bytes(b"a file of somebody's own" * 1000)
    few.play(work)
    few.close()
    left = [path for path in few.files() if path.name != "notes.tbrec"]
    assert sum(path.stat().st_size for path in left) <= 4 * 6000
    assert left[-1].name.endswith(files[-1].name[-10:])
    assert (few.folder / "notes.tbrec").exists()
    assert read(left).steps[-1].step.step_id == few.plans[-1].step_id


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"level": "text"}, "level"), ({"max_total_mb": 100, "max_file_mb": 64}, "twice"), ({"folder": "x"}, "folder")],
)
def test_settings_are_checked(settings, why):
    host = make_host("engine", from_mapping({"plugins": {"recorder": settings}}, "test"))
    with pytest.raises(ConfigError, match=why):
        host.load(("recorder",))


# ---- back-pressure and faults ---------------------------------------------------------------------------------------------------


def test_a_disk_that_cant_be_written_switches_the_recorder_off_and_nothing_else(stage, some_load):
    one = stage()
    one.folder.write_text("a file where the folder should be")
    one.play(some_load(3, 10.0))
    deadline = time.monotonic() + 30
    while (one.writer.error is None or one.bus.backlog) and time.monotonic() < deadline:
        os.sched_yield()
    assert isinstance(one.writer.error, OSError)
    assert one.bus.backlog == 0, "what comes later is given up as it comes"
    one.play([Ask(0.0, [300, 301], 2)])
    assert {name for name, _ in one.failures} == {"recorder"}, "what the engine is told, which then switches it off"
    assert [len(tokens) for tokens in one.outputs.values()][1:] == [asked.max_tokens for asked in some_load(3, 10.0)][1:]


def test_the_backlog_counts_what_is_not_on_disk(stage, monkeypatch):
    one = stage()
    monkeypatch.setattr(writer, "CAPACITY", 10)
    blocked = writer.threading.Event()
    original = parts.Parts.write
    monkeypatch.setattr(parts.Parts, "write", lambda self, note: (blocked.wait(60), original(self, note)))
    one.play([Ask(0.0, [300, 301, 302], 30)])
    assert one.bus.backlog > 1
    blocked.set()
    one.close()
    assert one.bus.backlog == 0
    assert len(read(one.files()).steps) == one.steps
