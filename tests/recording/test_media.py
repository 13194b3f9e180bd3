"""Pictures and sounds in recordings of pretended steps: what is written of them, and how a simulation counts them."""

from __future__ import annotations

import random

import pytest
from stage import Ask, step_seconds

from tokenbus.core.config import from_mapping
from tokenbus.core.errors import ConfigError
from tokenbus.core.host import make_host
from tokenbus.core.media import MediaItem, TensorBytes
from tokenbus.core.recording.ask import RECORDED, SAME, WISHED, simulate
from tokenbus.core.recording.file import RecordingFile
from tokenbus.core.recording.frames import HASH_BYTES, Arrival, Media, Opened, Ordered
from tokenbus.core.recording.trace import trace
from tokenbus.plugins.recorder import media as recorder_media
from tokenbus.plugins.recorder import parts, writer

LENGTH = 24
ITEM_SECONDS = 0.4
"""What the pretended encoder takes for an item."""
PIXELS = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def catalogue():
    return make_host("engine", from_mapping({}, "test")).catalogue


def item(number, start, *, bidirectional=False, data=None):
    tensors = {"pixel_values": TensorBytes("uint8", (len(PIXELS),), data or bytes([number]) + PIXELS[1:])}
    return MediaItem(
        kind="image", digest=f"{number:064x}", start=start, length=LENGTH, bidirectional=bidirectional, tensors=tensors
    )


def asks(count, *, bidirectional=False, different=4, gap=0.3):
    """Every second request has a picture, of some that come again."""
    draw = random.Random(3)
    made = []
    for i in range(count):
        head = [draw.randrange(200, 900) for _ in range(draw.randint(3, 30))]
        if i % 2:
            media = (item(i // 2 % different, len(head), bidirectional=bidirectional),)
            made.append(Ask(gap * i, [*head, *[7] * LENGTH, *head[:5]], 6, {"media": media}))
        else:
            made.append(Ask(gap * i, head, 12))
    return made


class Encoding:
    """A pretended encoder that keeps everything: a stage's execution, and its step times."""

    def __init__(self, one):
        self.one, self.known = one, set()
        one.execute = self.execute

    def new(self, num_tokens):
        found = set()
        for name, n in num_tokens.items():
            request = self.one.scheduler.requests[name]
            first = request.computed
            found |= {i.digest for i in request.admitted.media if i.start < first + n and i.end > first}
        return found - self.known

    def seconds(self, parts):
        """Of the step that was planned last, before it runs."""
        return step_seconds(parts) + ITEM_SECONDS * len(self.new(self.one.plans[-1].num_tokens))

    def execute(self, order):
        new = self.new(order.num_tokens)
        self.known |= new
        result = self.one._pretend(order)
        result.counters["multimodal.encoded_items"] = len(new)
        return result


def recorded(stage, name="recordings", work=None, **options):
    one = stage(name, **options)
    one.play(work or asks(30), seconds=Encoding(one).seconds)
    return one


# ---- what is written --------------------------------------------------------------------------------------------------------------


def test_a_shape_recording_holds_spans_and_hashes_and_nothing_of_a_picture(stage):
    one = recorded(stage)
    (path,) = one.close()
    arrivals = [frame for frame in RecordingFile(path) if isinstance(frame, Arrival)]
    having = [frame for frame in arrivals if frame.spans]
    assert len(having) == 15
    assert all(len(frame.media) == HASH_BYTES for frame in having)
    assert len({frame.media for frame in having}) == 4
    assert not any(frame.media for frame in arrivals if not frame.spans)
    data = b"".join(repr(frame).encode() for frame in RecordingFile(path))
    assert PIXELS[1:40] not in data
    assert f"{3:064x}".encode() not in data


def test_a_full_recording_keeps_digests_and_of_the_tensors_nothing_unless_asked_to(stage):
    frames = {}
    for name, keep in (("without", False), ("with", True)):
        (path,) = recorded(stage, name, level="full", recorder={"media": keep}).close()
        frames[name] = list(RecordingFile(path))
        orders = [frame.order for frame in frames[name] if isinstance(frame, Ordered)]
        items = [one for order in orders for new in order.new for one in new.media]
        assert len(items) == 15
        assert not any(one.tensors for one in items)
        assert len({one.digest for one in items}) == 4
    assert not any(isinstance(frame, Media) for frame in frames["without"])
    kept = [frame for frame in frames["with"] if isinstance(frame, Media)]
    assert sorted(int(frame.digest, 16) for frame in kept) == [0, 1, 2, 3]
    assert all(frame.tensors == item(int(frame.digest, 16), 0).tensors for frame in kept)


def test_each_part_has_the_pictures_that_it_needs(stage, monkeypatch):
    monkeypatch.setattr(parts, "MIB", 6000)
    monkeypatch.setattr("tokenbus.core.recording.file.BLOCK_BYTES", 2000)
    work = [Ask(0.01 * i, [200 + i, *[7] * LENGTH, 5], 200, {"media": (item(i % 3, 1),)}) for i in range(6)]
    files = recorded(stage, work=work, level="full", recorder={"media": True, "max_file_mb": 1, "max_total_mb": 100}).close()
    assert len(files) > 1
    for path in files:
        seen = set()
        for frame in RecordingFile(path):
            if isinstance(frame, Media):
                assert frame.digest not in seen
                seen.add(frame.digest)
            if isinstance(frame, Ordered | Opened):
                new = frame.order.new if isinstance(frame, Ordered) else frame.requests
                assert seen.issuperset(one.digest for request in new for one in request.media)
    assert len(seen) == 3


def test_what_is_too_large_for_a_block_is_not_kept(stage, monkeypatch):
    monkeypatch.setattr(recorder_media, "LARGEST", len(PIXELS) - 1)
    (path,) = recorded(stage, level="full", recorder={"media": True}).close()
    assert not any(isinstance(frame, Media) for frame in RecordingFile(path))


def test_the_backlog_counts_their_bytes(stage, monkeypatch):
    monkeypatch.setattr(writer, "MEDIA_CAPACITY", 2 * len(PIXELS))
    blocked, seen = writer.threading.Event(), []
    original = parts.Parts.write
    monkeypatch.setattr(parts.Parts, "write", lambda self, note: (blocked.wait(60), original(self, note)))
    for name, keep in (("without", False), ("with", True)):
        one = stage(name, level="full", recorder={"media": keep})
        one.play([Ask(0.0, [200 + i, *[7] * LENGTH, 5], 3, {"media": (item(i, 1),)}) for i in range(4)])
        seen.append(one.bus.backlog)
        blocked.set()
        one.close()
        assert one.bus.backlog == 0
        blocked.clear()
    assert seen[0] < 0.01
    assert seen[1] == 2


def test_pictures_are_kept_at_level_full_only(stage):
    with pytest.raises(ConfigError, match='media = true needs level = "full"'):
        stage(recorder={"media": True})


# ---- simulation -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
def test_with_unchanged_settings_every_plan_and_every_time_comes_out_again(stage, catalogue, bidirectional):
    one = recorded(stage, work=asks(60, bidirectional=bidirectional))
    history = one.history()
    assert sum(run.media for step in history.steps for run in step.runs) == 4 * LENGTH
    answer = simulate(history, [], catalogue)
    assert answer.fit.p90_error < 1e-6
    for name, value in answer.columns[RECORDED].items():
        assert answer.columns[SAME][name] == pytest.approx(value, rel=1e-3), name


def test_encoding_takes_its_time_in_another_plan_too(stage, catalogue):
    """Pictures that are all different, with a budget of one a step, and of two."""
    budgets = {f"of {count}": {"encoder_budget": count * LENGTH} for count in (1, 2)}
    runs, work = {}, [Ask(0.0, [200 + i, *[7] * LENGTH, 5, 6 + i], 5, {"media": (item(i, 1),)}) for i in range(8)]
    for name, scheduler in budgets.items():
        options = {"settings": {"chunked_prefill": {"mode": "fixed", "chunk_size": 64}}, "scheduler": scheduler}
        runs[name] = recorded(stage, name, work=work + asks(20, gap=2.0), **options).history()
    answer = simulate(runs["of 1"], [f"encoder_budget={2 * LENGTH}"], catalogue)
    wished, real = answer.columns[WISHED], simulate(runs["of 2"], [], catalogue).columns[RECORDED]
    assert real["steps"] < answer.columns[RECORDED]["steps"]
    assert wished["steps"] == real["steps"]
    assert wished["ttft_p50"] == pytest.approx(real["ttft_p50"], rel=0.1)


def test_a_span_that_is_larger_than_the_step_asked_for_is_an_error_of_its_request(stage, catalogue):
    one = recorded(stage, work=asks(20, bidirectional=True))
    answer = simulate(one.history(), [f"token_budget={LENGTH - 1}"], catalogue)
    assert answer.columns[SAME]["errors"] == 0
    assert answer.columns[WISHED]["errors"] == 10


def test_items_that_were_known_before_the_recording_began_are_not_counted_as_encoded(stage):
    one = stage(on=("chunked_prefill", "prefix_cache", "scheduling.fcfs"))
    encoding, work = Encoding(one), asks(12, different=1)

    def switch(step):
        if step == 40:
            one.switch(recorder=True)

    one.play(work, between=switch, seconds=encoding.seconds)
    history = one.history()
    assert any(life.arrival.spans for life in history.lives.values())
    assert sum(run.media for step in history.steps for run in step.runs) == 0


def test_a_timeline_shows_what_was_encoded(stage):
    document = trace(recorded(stage).history())
    spans = [event["args"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert sum(found.get("encoded", 0) for found in spans) == 4
    assert sum(found.get("media_tokens", 0) for found in spans) == 4 * LENGTH
