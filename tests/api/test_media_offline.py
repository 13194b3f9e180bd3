"""Media of Python callers, the journal's copy of items, and the limits of admission: what needs no decoding processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import media_kit as kit
import msgspec
import numpy as np
import pytest
from PIL import Image

from tokenbus.core import ipc
from tokenbus.core.config import from_mapping
from tokenbus.core.errors import FieldError, OverloadedError
from tokenbus.core.front.admission import Admitter, ParsedRequest, Prompt
from tokenbus.core.front.chat import check_messages
from tokenbus.core.front.client import EngineClient
from tokenbus.core.front.journal import Journal
from tokenbus.core.front.media import expand, media_of, own_prompt, place
from tokenbus.core.hook_answers import CHECKS
from tokenbus.core.host import Switches, make_host
from tokenbus.core.media import MediaItem, MediaPart, PreparedMedia, TensorBytes, check_spans
from tokenbus.core.messages import Add, EngineInfo, FrontMessage
from tokenbus.core.request import AdmittedRequest
from tokenbus.plugins.multimodal.fetch import Fetcher
from tokenbus.plugins.multimodal.images import RefusedError, from_object
from tokenbus.plugins.multimodal.intake import Cache, Intake
from tokenbus.plugins.multimodal.jobs import Done
from tokenbus.plugins.multimodal.settings import MultimodalSettings
from tokenbus.plugins.multimodal.sources import source_of

WHERE = "messages[0].content[0].image"


def item(size=8, **options):
    tensors = {"pixel_values": TensorBytes("uint8", (size,), bytes(size))}
    return MediaItem(kind="image", digest="0" * 64, start=0, length=0, tensors=tensors, **options)


def prepared(marker="<i>", text="[PP]", rows=2, kind="image"):
    made = msgspec.structs.replace(item(), kind=kind)
    return PreparedMedia(made, marker, text, "P", rows)


# ---- objects ----------------------------------------------------------------------------------------------------------------------


def own(value, most=1 << 20):
    return source_of(MediaPart("image", WHERE, value, own=True), most, 1 << 20)


def test_pictures_and_arrays_become_the_same_pixels():
    image = kit.noise(7, 5)
    source = own(image)
    assert (source.form, source.shape, source.data) == ("pixels", (5, 7), image.tobytes())
    assert own(np.asarray(image)).data == source.data
    assert own(np.asarray(image)[:, ::-1][:, ::-1]).data == source.data
    grey = own(np.full((5, 7), 9, np.uint8))
    assert grey.data == own(np.full((5, 7, 1), 9, np.uint8)).data == bytes([9] * 105)
    through = np.zeros((5, 7, 4), np.uint8)
    assert own(through).data == bytes([255] * 105)


def test_paths_and_bytes_are_files(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(kit.encoded(kit.noise()))
    for value in (path, str(path), path.read_bytes(), bytearray(path.read_bytes())):
        assert (own(value).form, own(value).data) == ("file", path.read_bytes())


def test_a_clients_path_is_no_file():
    with pytest.raises(FieldError, match="must be an object"):
        source_of(MediaPart("image", WHERE, "/etc/hostname"), 1 << 20, 1 << 20)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (5, "must be a PIL image, an array, a path or bytes"),
        (np.zeros((5, 7, 3)), "must be an array of uint8"),
        (np.zeros((5, 7, 2), np.uint8), "must be an array of uint8"),
        (np.zeros((0, 7, 3), np.uint8), "must be an array of uint8"),
        (np.zeros(5, np.uint8), "must be an array of uint8"),
        ("/there/is/nothing.png", "can't be read"),
        ("a\0b", "can't be read"),
        (Image.new("RGB", (2000, 2000)), "at most 1048576 pixels"),
    ],
)
def test_objects_of_a_wrong_kind(value, says):
    with pytest.raises(FieldError, match=says) as raised:
        own(value)
    assert raised.value.param == WHERE


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(bytes(5000))
    with pytest.raises(FieldError, match="has more than 4999 bytes"):
        own(path, 4999)
    assert own(path, 5000).size == 5000
    with pytest.raises(FieldError, match="more than 100 bytes"):
        own(Path("/dev/zero"), 100)


def test_a_truncated_picture_object_is_refused(tmp_path):
    path = tmp_path / "cut.png"
    path.write_bytes(kit.encoded(kit.noise(200, 200))[:3000])
    with Image.open(path) as image, pytest.raises(RefusedError, match="can't be read"):
        from_object(image, 1 << 20)


def test_own_messages_may_have_objects_and_those_of_clients_may_not():
    image = kit.noise()
    messages = [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}]
    (part,) = media_of(check_messages(messages, 10, own=True))
    assert (part.kind, part.where, part.value, part.own) == ("image", WHERE, image, True)
    with pytest.raises(FieldError, match="parts are of type text, image_url or input_audio, not 'image'"):
        check_messages(messages, 10)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "x"}, "has neither images nor audio"),
        ({"prompt": "x", "images": []}, "has neither images nor audio"),
        ({"images": [1]}, "must be a string"),
        ({"prompt": "x", "images": 1}, "must be a list"),
        ({"prompt": "x", "image": [1]}, "unknown field"),
    ],
)
def test_prompts_with_media_of_a_wrong_form(prompt, says):
    with pytest.raises(FieldError, match=says):
        own_prompt(prompt)


# ---- placing ----------------------------------------------------------------------------------------------------------------------


def ids(text):
    return [ord(character) for character in text]


def spelled(token):
    return ord(token) if len(token) == 1 else None


def test_markers_give_way_and_items_are_placed():
    items = [prepared(), prepared(text="(P-P)"), prepared(rows=1, text="P")]
    text = expand("a<i>b<i><i>", items)
    assert text == "a[PP]b(P-P)P"
    first, second, third = place(ids(text), items, spelled)
    assert [(one.start, one.length, one.embeds, one.rows) for one in (first, second, third)] == [
        (2, 2, (), 2),
        (7, 3, (0, 2), 2),
        (11, 1, (), 1),
    ]
    check_spans((first, second, third), len(text))


def test_kinds_are_placed_apart():
    sound = PreparedMedia(msgspec.structs.replace(item(), kind="audio"), "<a>", "QQ", "Q", 2)
    text = expand("<a><i><a>", [prepared(), sound, sound])
    placed = place(ids(text), [prepared(), sound, sound], spelled)
    assert [(one.kind, one.start) for one in placed] == [("audio", 0), ("image", 3), ("audio", 6)]


@pytest.mark.parametrize("text", ["", "<i>", "<i><i><i>"])
def test_as_many_markers_as_items(text):
    with pytest.raises(FieldError, match=f"places for {len(text) // 3} of the 2 images"):
        expand(text, [prepared()] * 2)


def test_a_placeholder_that_stands_in_a_text_is_an_error():
    with pytest.raises(FieldError, match="placeholder 'P' in it"):
        place(ids("P[PP]"), [prepared()], spelled)


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ([(0, 0, ())], "is empty"),
        ([(0, 3, ()), (2, 2, ())], "begins before 3"),
        ([(8, 3, ())], "behind the prompt's 10 tokens"),
        ([(0, 3, (3,))], "embeds"),
        ([(0, 3, (1, 1))], "embeds"),
        ([(0, 3, (2, 1))], "embeds"),
    ],
)
def test_spans_that_make_no_sense(spans, says):
    media = [MediaItem(kind="image", digest="", start=s, length=n, embeds=e) for s, n, e in spans]
    with pytest.raises(ValueError, match=says):
        check_spans(media, 10)


def test_the_hooks_answer_is_checked():
    check, part = CHECKS["prepare_media"], MediaPart("image", WHERE, None)

    def problem(answer):
        return check(answer, {"parts": [part]}, None)

    assert problem([prepared()]) is None
    assert "not a list" in problem(prepared())
    assert "prepared 0 of 1" in problem([])
    assert "made no image" in problem([prepared(kind="audio")])
    assert "placeholder 3 times" in problem([prepared(rows=3)])
    assert "no marker" in problem([prepared(marker="")])


# ---- admission, journal, wire -----------------------------------------------------------------------------------------------------

INFO = EngineInfo(
    version=1, model="m", architecture="A", dtype="float32", vocab_size=300, max_model_len=100, block_size=4, num_blocks=10,
    weights_bytes=0, kv_bytes_per_token=1, eos_token_ids=(0,), lossless=True,
)  # fmt: skip


def admit(media, *, n=1, on=("multimodal",), **limits):
    config = from_mapping({"limits": limits}, "test")
    host = make_host("front", config)
    host.load(on)
    admitter = Admitter(config, host, switches=lambda: Switches(frozenset(on), {}), info=lambda: INFO, tokenize=ids)
    parsed = ParsedRequest(endpoint="chat", prompts=[Prompt(ids("a[PP]b"), media=tuple(media))], n=n, max_tokens=2, group="g")
    return admitter.admit(parsed).requests


def placed(size):
    return msgspec.structs.replace(item(size), start=2, length=2)


def test_admitted_requests_have_the_items():
    first, second = admit([placed(8)], n=2)
    assert first.media == second.media == (placed(8),)
    assert first.fields == {"media": 1}
    assert admit([])[0].fields == {}


def test_processed_bytes_times_choices_are_bounded():
    admit([placed(1 << 20)], n=2, max_media_mb=2)
    with pytest.raises(FieldError, match=r"take 3.0 MiB once they are processed, times n=3; at most 2 MiB"):
        admit([placed(1 << 20)], n=3, max_media_mb=2)


def test_spans_are_checked_at_admission():
    with pytest.raises(FieldError, match="begins before"):
        admit([placed(8), placed(8)])


def test_items_are_kept_with_the_prompt_and_sent_again():
    """What an engine is given after another one's death, as it goes over the wire."""
    journal = Journal()
    request = AdmittedRequest(request_id="r", prompt=ids("a[PP]b"), max_tokens=5, media=(placed(8),))
    journal.admit([request])
    assert journal.media_bytes() == 8
    entry = journal.emit("r", [7])
    entry.begun = True
    frame = ipc.encode(Add([entry.as_sent()]))
    (sent,) = msgspec.msgpack.decode(frame[4:], type=FrontMessage).requests
    assert sent.media == (placed(8),)
    assert sent.resumed.tokens == [7]
    journal.end("r")
    assert journal.media_bytes() == 0


def test_media_of_all_open_requests_are_bounded():
    """One alone always fits; what is too much together may come again."""

    def request(name):
        return AdmittedRequest(request_id=name, prompt=ids("a[PP]b"), max_tokens=5, media=(placed(3 << 19),))

    config, journal = from_mapping({"limits": {"max_open_media_mb": 3}}, "test"), Journal()
    client: Any = SimpleNamespace(config=config, journal=journal)
    EngineClient._check_room_for_media(client, [request(name) for name in "abc"])
    journal.admit([request("a")])
    EngineClient._check_room_for_media(client, [request("b")])
    journal.admit([request("b")])
    with pytest.raises(OverloadedError, match="no room for more"):
        EngineClient._check_room_for_media(client, [request("c")])
    EngineClient._check_room_for_media(client, [AdmittedRequest(request_id="d", prompt=[1], max_tokens=1)])
    journal.end("a")
    EngineClient._check_room_for_media(client, [request("c")])


# ---- a request's whole ------------------------------------------------------------------------------------------------------------


class Eyes:
    markers = placeholders = {"image": "P"}


class Jobs:
    """Each takes `rows` rows, and as long as `wait` does."""

    def __init__(self, rows=2, wait=lambda: None):
        self.rows, self.wait = rows, wait

    def run(self, job, seconds):
        self.wait()
        return Done(item=item(), text="P" * self.rows, rows=self.rows)


def intake(jobs, **settings):
    return Intake(MultimodalSettings(**settings), Eyes(), "m", jobs, Fetcher(MultimodalSettings(**settings)))


def files(count):
    return [MediaPart("image", f"part {index}", bytes([index]), own=True) for index in range(count)]


def test_tokens_of_all_media_are_bounded():
    assert [one.rows for one in intake(Jobs(), max_tokens=6).prepare(files(3))] == [2, 2, 2]
    with pytest.raises(FieldError, match="up to here take 6 tokens; at most 5") as raised:
        intake(Jobs(), max_tokens=5).prepare(files(4))
    assert raised.value.param == "part 2"


def test_time_for_all_media_is_bounded(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tokenbus.plugins.multimodal.intake.time.monotonic", lambda: now[0])

    def a_second():
        now[0] += 1.0

    assert len(intake(Jobs(wait=a_second), request_seconds=2.5).prepare(files(3))) == 3
    with pytest.raises(FieldError, match=r"were not processed within 2.5 s") as raised:
        intake(Jobs(wait=a_second), request_seconds=2.5).prepare(files(4))
    assert raised.value.param == "part 3"


def test_equal_files_of_a_request_are_processed_once():
    asked = []
    same = [*files(1), *files(1)]
    assert len(intake(Jobs(wait=lambda: asked.append(1))).prepare(same)) == 2
    assert len(asked) == 1


# ---- cache ------------------------------------------------------------------------------------------------------------------------


def test_the_cache_keeps_what_was_used_last_and_no_more_than_fits():
    cache = Cache(30)
    for key in (b"a", b"b", b"c"):
        cache.put(key, Done(item=item(10)))
    assert cache.get(b"a") is not None
    cache.put(b"d", Done(item=item(10)))
    assert [key for key in (b"a", b"b", b"c", b"d") if cache.get(key) is not None] == [b"a", b"c", b"d"]
    cache.put(b"large", Done(item=item(31)))
    assert cache.get(b"large") is None
    cache.put(b"a", Done(item=item(10)))
    cache.check_integrity()
    assert cache.bytes == 30
    none = Cache(0)
    none.put(b"a", Done(item=item(1)))
    assert none.get(b"a") is None
