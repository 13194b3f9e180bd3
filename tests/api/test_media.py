"""Images in chats, over HTTP, with an engine that has no model: what reaches it, what is refused and how, and that nothing else notices."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import threading
import time
from pathlib import Path

import anyio
import media_kit as kit
import msgspec
import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from tiny_tokenizer import TEMPLATE, tiny_tokenizer

from tokenbus.core.front.events import EngineStarted
from tokenbus.core.front.tokenizer import Tokenizer
from tokenbus.core.media import MediaItem
from tokenbus.plugins.multimodal import processes
from tokenbus.plugins.multimodal.jobs import IN_IDLE_TIME, Done, Job
from tokenbus.plugins.multimodal.processes import Processes

pytestmark = pytest.mark.anyio

IMAGE_ID = 261
SETTINGS = {
    "max_images": 6,
    "max_item_mb": 2,
    "max_request_mb": 4,
    "item_seconds": 3.0,
    "max_pixels": 20_000_000,
    "item_memory_mb": 700,
}


@pytest.fixture(scope="session")
def image_tokenizer() -> Tokenizer:
    return tiny_tokenizer(special=("<image>",))


@pytest.fixture(scope="session")
def llava(tmp_path_factory) -> Path:
    return kit.llava_folder(tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture(scope="module")
async def api(serve, image_tokenizer, llava):
    settings = {"model": {"model": str(llava)}, "plugins": {"multimodal": SETTINGS}}
    async with serve(settings, tokenizer=image_tokenizer, template=kit.TEMPLATE, vocab_size=262) as harness:
        harness.multimodal = harness.engine.host.loaded["multimodal"]
        harness.service.bus.publish(EngineStarted(harness.engine.info, 0))
        with anyio.fail_after(100):
            while not (harness.multimodal._model and harness.multimodal._model[1]._processes.started):  # noqa: ASYNC110 - a thread does it
                await anyio.sleep(0.01)
        yield harness
        harness.multimodal._model[1].cache.check_integrity()


def ask(*parts, **fields):
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1, **fields}


async def send(api, *parts, **fields):
    body = io.BytesIO(json.dumps(ask(*parts, **fields)).encode())
    return await api.call("POST", "/v1/chat/completions", raw=body)


async def admitted(api, *parts, **fields):
    """What the engine got for one message with these parts."""
    answer = await send(api, *parts, **fields)
    assert answer.status == 200, answer.body
    return api.engine.admitted[-1]


async def refused(api, *parts, where="messages[0].content[0].image_url.url", status=400, **fields):
    """The error's message; nothing got to the engine, and the next request is answered."""
    before = len(api.engine.admitted)
    answer = await send(api, *parts, **fields)
    assert answer.status == status, answer.body
    assert len(api.engine.admitted) == before
    if where is not None:
        assert answer.error["param"] == where
    await api.check_well()
    return answer.error["message"]


def pixels(item: MediaItem) -> np.ndarray:
    tensor = item.tensors["pixel_values"]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def colour(item: MediaItem) -> np.ndarray:
    """uint8 [3]: the mean of a processed image, undone to what it was."""
    return ((pixels(item).mean(axis=(0, 2, 3)) * 0.5 + 0.5) * 255).round()


# ---- what reaches the engine ------------------------------------------------------------------------------------------------------


async def test_an_image_becomes_placeholders_and_tensors(api, image_tokenizer):
    request = await admitted(api, kit.text_part("look: "), kit.image_part(kit.encoded(kit.noise())), kit.text_part(" well?"))
    (item,) = request.media
    text = image_tokenizer.encode_now(
        "<|im_start|>user\nlook: " + "<image>" * kit.ROWS + " well?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.prompt == text
    assert (item.kind, item.length, item.rows, item.embeds) == ("image", kit.ROWS, kit.ROWS, ())
    assert request.prompt[item.start : item.end] == [IMAGE_ID] * kit.ROWS
    assert request.prompt.count(IMAGE_ID) == kit.ROWS
    assert pixels(item).shape == (1, 3, kit.SIDE, kit.SIDE)
    assert request.fields == {"media": 1}
    assert len(item.digest) == 64


async def test_tensors_are_those_of_the_models_own_processor(api, llava):
    from transformers import AutoImageProcessor

    image = kit.noise(61, 45, seed=3)
    request = await admitted(api, kit.image_part(kit.encoded(image)))
    expected = AutoImageProcessor.from_pretrained(str(llava), backend="pil", local_files_only=True)(image, return_tensors="np")
    assert np.array_equal(pixels(request.media[0]), expected["pixel_values"])


async def test_several_interleaved_with_text_keep_their_order(api):
    red, blue = (kit.encoded(Image.new("RGB", (20, 20), c)) for c in ((255, 0, 0), (0, 0, 255)))
    request = await admitted(
        api, kit.text_part("a"), kit.image_part(red), kit.text_part("b"), kit.image_part(blue), kit.image_part(red)
    )
    first, second, third = request.media
    assert first.end + 1 == second.start
    assert second.end == third.start
    assert [colour(item).tolist() for item in request.media] == [[255, 0, 0], [0, 0, 255], [255, 0, 0]]
    assert first.digest == third.digest != second.digest


async def test_the_same_image_again_is_not_processed_again(api):
    part = kit.image_part(kit.encoded(kit.noise(seed=77)))
    processes = api.multimodal._model[1]._processes
    first = await admitted(api, part)
    jobs = processes.jobs
    again = await admitted(api, kit.text_part("and "), part)
    assert processes.jobs == jobs
    assert first.media[0].digest == again.media[0].digest
    assert first.media[0].start != again.media[0].start


async def test_digests_tell_sizes_and_transparency_apart(api):
    values = np.random.default_rng(5).integers(0, 256, (30, 150, 3), dtype=np.uint8)
    wide, tall = Image.fromarray(values), Image.fromarray(values.reshape(150, 30, 3))
    through = Image.fromarray(np.dstack([values, np.full((30, 150), 128, np.uint8)]))
    digests = [(await admitted(api, kit.image_part(kit.encoded(one)))).media[0].digest for one in (wide, tall, through)]
    assert len(set(digests)) == 3


async def test_choices_share_the_items_and_counts_include_them(api):
    part = kit.image_part(kit.encoded(kit.noise()))
    answer = await send(api, part, n=2)
    first, second = api.engine.admitted[-2:]
    assert first.media[0] is second.media[0]
    assert answer.body["usage"]["prompt_tokens"] == len(first.prompt) > kit.ROWS
    counted = await api.call("POST", "/tokenize", {"messages": ask(part)["messages"]})
    assert counted.body["tokens"] == first.prompt


async def test_a_marker_that_a_client_writes_is_text(api, image_tokenizer):
    request = await admitted(api, kit.text_part("<image> is a word"), kit.image_part(kit.encoded(kit.noise())))
    assert request.prompt.count(IMAGE_ID) == kit.ROWS
    assert len(request.media) == 1
    plain = await api.chat("a <image> without one", max_tokens=1)
    assert plain.status == 200
    assert IMAGE_ID not in api.engine.admitted[-1].prompt
    message = await refused(
        api, kit.text_part("<image>"), kit.image_part(kit.encoded(kit.noise())), where="messages",
        tokenbus={"trusted_content": True},
    )  # fmt: skip
    assert "places for 2 of the 1 images" in message


async def test_a_template_of_strings_gets_the_marker_in_the_text(serve, image_tokenizer, llava):
    settings = {"model": {"model": str(llava)}}
    async with serve(settings, tokenizer=image_tokenizer, template=TEMPLATE, vocab_size=262) as harness:
        part = kit.image_part(kit.encoded(kit.noise()))
        request = await admitted(harness, kit.text_part("see "), part, kit.text_part("."))
    text = "<|im_start|>user\nsee " + "<image>" * kit.ROWS + ".<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt == image_tokenizer.encode_now(text)


async def test_a_template_of_parts_gets_texts_as_parts(serve, tokenizer):
    parts = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
    template = "{% for m in messages %}" + parts + "{% endfor %}"
    async with serve(template=template) as harness:
        assert (await harness.chat("a text", temperature=0)).text == "a text"


# ---- odd, but right ---------------------------------------------------------------------------------------------------------------


def near(found: np.ndarray, expected: tuple[int, int, int]) -> bool:
    return bool(np.abs(found - np.array(expected)).max() <= 2)


def _palette_with_hole() -> bytes:
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    return kit.encoded(image, transparency=1)


def _animated() -> bytes:
    frames = [Image.new("RGB", (20, 20), (250, 10, 10)), Image.new("RGB", (20, 20), (10, 250, 10))]
    return kit.encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])


def _webp_frames() -> bytes:
    frames = [Image.new("RGB", (20, 20), (250, 10, 10)), Image.new("RGB", (20, 20), (10, 250, 10))]
    return kit.encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)


ODD = {
    "animated gif: first frame": (_animated, (250, 10, 10)),
    "animated webp: first frame": (_webp_frames, (250, 10, 10)),
    "cmyk": (lambda: kit.encoded(Image.new("CMYK", (20, 20), (0, 255, 255, 0)), "JPEG"), (254, 0, 0)),
    "alpha over white": (lambda: kit.encoded(Image.new("RGBA", (20, 20), (0, 0, 0, 0))), (255, 255, 255)),
    "half alpha over white": (lambda: kit.encoded(Image.new("RGBA", (20, 20), (255, 0, 0, 51))), (255, 204, 204)),
    "grey and alpha": (lambda: kit.encoded(Image.new("LA", (20, 20), (0, 0))), (255, 255, 255)),
    "palette": (lambda: kit.encoded(Image.new("RGB", (20, 20), (200, 100, 50)).quantize(4)), (200, 100, 50)),
    "palette with a hole": (_palette_with_hole, (255, 255, 255)),
    "16 bits": (lambda: kit.encoded(Image.fromarray(np.full((20, 20), 257 * 77, np.uint16))), (77, 77, 77)),
    "16 bits, white": (lambda: kit.encoded(Image.fromarray(np.full((20, 20), 65535, np.uint16))), (255, 255, 255)),
    "1 bit": (lambda: kit.encoded(Image.new("1", (20, 20), 1)), (255, 255, 255)),
    "grey": (lambda: kit.encoded(Image.new("L", (20, 20), 9)), (9, 9, 9)),
    "one pixel": (lambda: kit.encoded(Image.new("RGB", (1, 1), (7, 8, 9))), (7, 8, 9)),
    "bmp": (lambda: kit.encoded(Image.new("RGB", (20, 20), (7, 8, 9)), "BMP"), (7, 8, 9)),
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_but_valid_images_become_the_documented_picture(api, name):
    make, expected = ODD[name]
    request = await admitted(api, kit.image_part(make(), "image/anything"))
    assert near(colour(request.media[0]), expected), colour(request.media[0])


@pytest.mark.parametrize(("orientation", "turn"), [(3, Image.Transpose.ROTATE_180), (6, Image.Transpose.ROTATE_270)])
async def test_exif_orientation_is_applied(api, orientation, turn):
    image = kit.noise(40, 40, seed=2)
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = await admitted(api, kit.image_part(kit.encoded(image, "PNG", exif=exif)))
    expected = await admitted(api, kit.image_part(kit.encoded(image.transpose(turn))))
    unturned = await admitted(api, kit.image_part(kit.encoded(image)))
    assert np.array_equal(pixels(turned.media[0]), pixels(expected.media[0]))
    assert not np.array_equal(pixels(turned.media[0]), pixels(unturned.media[0]))


async def test_exif_that_cannot_be_read_is_ignored(api):
    image = kit.noise(40, 40, seed=2)
    broken = await admitted(api, kit.image_part(kit.encoded(image, "PNG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")))
    plain = await admitted(api, kit.image_part(kit.encoded(image)))
    assert np.array_equal(pixels(broken.media[0]), pixels(plain.media[0]))


async def test_a_wrong_media_type_of_an_image_does_no_harm(api):
    request = await admitted(api, kit.image_part(kit.encoded(Image.new("RGB", (9, 9), (1, 2, 3)), "BMP"), "image/jpeg"))
    assert near(colour(request.media[0]), (1, 2, 3))


# ---- bad input --------------------------------------------------------------------------------------------------------------------

BAD = {
    "not an image": (lambda: b"hello, I am a text", "is not an image"),
    "a pdf": (lambda: b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj", "is not an image"),
    "an svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is not an image"),
    "truncated png": (lambda: kit.encoded(kit.noise(200, 200))[:3000], "damaged or cut short"),
    "truncated jpeg": (lambda: kit.encoded(kit.noise(200, 200), "JPEG")[:3000], "damaged or cut short"),
    "a head only": (lambda: kit.encoded(kit.noise())[:30], "image"),
    "zero size": (lambda: kit.bomb(0, 0), "image"),
    "30000 x 30000 in a few KB": (kit.bomb, "30000 x 30000 pixels; at most 20000000"),
    "1 x 900000000": (lambda: kit.bomb(1, 900_000_000), "900000000 pixels; at most 20000000"),
    "declared and not there": (lambda: kit.bomb(4000, 4000), "damaged or cut short"),
    "empty": (lambda: b"", "is empty"),
    "too many bytes": (lambda: b"\x89PNG\r\n\x1a\n" + os.urandom(2_200_000), "bytes; at most 2097152 are allowed"),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_images_are_clear_errors(api, name):
    make, says = BAD[name]
    message = await refused(api, kit.image_part(make()))
    assert says in message
    assert message.startswith("'messages[0].content[0].image_url.url': ")


async def test_the_error_names_the_part_that_is_at_fault(api):
    good, bad = kit.image_part(kit.encoded(kit.noise())), kit.image_part(b"bad")
    messages = [
        {"role": "user", "content": [good]},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": [good, bad]},
    ]
    answer = await api.chat(messages)
    assert answer.status == 400
    assert answer.error["param"] == "messages[2].content[1].image_url.url"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,@@@@", "is not valid base64"),
        ("data:image/png;base64,aGVsbG8", "is not valid base64"),
        ("data:image/png;base64,héllo", "is not valid base64"),
        ("data:image/png,plain", "must be of the form data:image"),
        ("data:text/plain;base64,aGVsbG8=", "is of type 'text/plain', not image/..."),
        ("data:audio/wav;base64,aGVsbG8=", "is of type 'audio/wav', not image/..."),
        ("data:image/png;base64", "must be of the form data:image"),
        ("data:image/png;base64,", "is empty"),
        ("http://example.com/a.png", "this server fetches nothing"),
        ("https://127.0.0.1/a.png", "this server fetches nothing"),
        ("file:///etc/passwd", "this server fetches nothing"),
        ("/etc/passwd", "this server fetches nothing"),
        ("", "this server fetches nothing"),
    ],
)  # fmt: skip
async def test_bad_urls(api, url, says):
    assert says in await refused(api, {"type": "image_url", "image_url": {"url": url}})


@pytest.mark.parametrize(
    ("part", "where", "says"),
    [
        ({"type": "image_url", "image_url": "data:..."}, "image_url", "must be an object"),
        ({"type": "image_url"}, "image_url", "is required"),
        ({"type": "image_url", "image_url": {}}, "image_url.url", "must be a string"),
        ({"type": "image_url", "image_url": {"url": 5}}, "image_url.url", "must be a string"),
        ({"type": "image_url", "image_url": {"url": "x", "size": 5}}, "image_url.size", "unknown field"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "high"}}, "image_url.detail", 'only "auto" can be applied'),
        ({"type": "image_url", "image_url": {"url": "x"}, "cache": 1}, "cache", "unknown field"),
        ({"type": "image", "image": "/etc/passwd"}, None, "parts are of type text, image_url or input_audio, not 'image'"),
        ({"type": "video_url", "video_url": {}}, None, "parts are of type text, image_url or input_audio, not 'video_url'"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio", "reads no audio, only image"),
    ],
)
async def test_parts_of_a_wrong_form(api, part, where, says):
    place = "messages[0].content[0]"
    assert says in await refused(api, part, where=f"{place}.{where}" if where else place)


async def test_200_images(api):
    part = kit.image_part(kit.encoded(Image.new("RGB", (4, 4))))
    message = await refused(api, *[part] * 200, where="messages[0].content[6].image_url")
    assert "200 parts of kind image; at most 6 are allowed" in message


async def test_bytes_of_all_images_are_bounded(api):
    big = b"\x89PNG\r\n\x1a\n" + os.urandom(1_800_000)
    message = await refused(api, *[kit.image_part(big)] * 3, where="messages[0].content[2].image_url.url")
    assert "the media up to here have" in message


async def test_the_body_limit_comes_before_all_others(serve):
    async with serve({"limits": {"max_body_bytes": 10_000}}) as harness:
        answer = await send(harness, kit.image_part(os.urandom(20_000)))
        assert answer.status == 413
        await harness.check_well()


async def test_media_that_do_not_fit_the_context(api):
    part = kit.image_part(kit.encoded(kit.noise()))
    message = await refused(api, *[part] * 6, kit.text_part("x" * 450), where="messages")
    assert "the limit is 512 tokens" in message


async def test_media_is_no_field(api):
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "media": 3}),
        ("/v1/completions", {"prompt": "x", "media": [{"kind": "image"}]}),
    ):
        answer = await api.call("POST", path, body)
        assert answer.status == 400
        assert answer.error["param"] == "media"
        assert "is no field of its own" in answer.error["message"]


async def test_an_unexpected_failure_is_the_plugins(api, monkeypatch):
    processes = api.multimodal._model[1]._processes
    monkeypatch.setattr(processes, "run", lambda job, seconds: Done(fault="KeyError: 'x'"))
    answer = await send(api, kit.image_part(kit.encoded(kit.noise(seed=99))))
    assert answer.status == 500
    assert (answer.error["plugin"], answer.error["hook"]) == ("multimodal", "prepare_media")
    assert "KeyError" in answer.error["message"]
    await api.check_well()


# ---- fetched ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def pictures(api, monkeypatch):
    """A server of one picture, from which the server under test may fetch; private addresses are allowed."""
    data = kit.encoded(Image.new("RGB", (20, 20), (10, 20, 30)))

    async def answer(request):
        return web.Response(body=data if request.path == "/a.png" else b"no image", content_type="image/png")

    async with kit.listening(answer) as server:
        intake = api.multimodal._model[1]
        changed = msgspec.structs.replace(intake._settings, fetch_hosts=(server.at,), fetch_private=True)
        monkeypatch.setattr(intake, "_settings", changed)
        monkeypatch.setattr(intake._fetcher, "_settings", changed)
        yield server


def url_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


async def test_urls_of_a_listed_host_are_fetched(api, pictures):
    red = kit.image_part(kit.encoded(Image.new("RGB", (20, 20), (255, 0, 0))))
    url = url_part(f"{pictures.url}/a.png")
    request = await admitted(api, url, red, url)
    colours = [(10, 20, 30), (255, 0, 0), (10, 20, 30)]
    assert all(near(colour(item), want) for item, want in zip(request.media, colours, strict=True))
    assert sorted(pictures.hits) == ["/a.png"] * 2


async def test_one_url_of_several_that_cannot_be_had_is_named(api, pictures):
    good, bad = url_part(f"{pictures.url}/a.png"), url_part("http://127.0.0.1:1/b.png")
    message = await refused(api, good, bad, where="messages[0].content[1].image_url.url")
    assert "fetches nothing from '127.0.0.1', port 1" in message
    assert "is not an image" in await refused(api, url_part(f"{pictures.url}/b.png"))


# ---- switched off, text-only --------------------------------------------------------------------------------------------------------


async def test_off_means_an_error_that_names_the_plugin(api):
    await api.engine.set_features({"multimodal": False}, "test")
    try:
        message = await refused(api, kit.image_part(kit.encoded(kit.noise())), where="messages[0].content[0].image_url")
        assert "the plugin that honours it, 'multimodal', is off (switched off live)" in message
    finally:
        await api.engine.set_features({"multimodal": True}, "test")
        api.multimodal = api.engine.host.loaded["multimodal"]
    await admitted(api, kit.image_part(kit.encoded(kit.noise())))


async def test_a_text_only_model_is_named(serve, tmp_path):
    folder = tmp_path / "only-text"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    async with serve({"model": {"model": str(folder)}}) as harness:
        message = await refused(harness, kit.image_part(kit.encoded(kit.noise())), where="messages[0].content[0].image_url")
        assert "the model 'only-text' reads text only" in message


async def test_a_model_without_its_processor_says_so(serve, llava, tmp_path, image_tokenizer):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text((llava / "config.json").read_text())
    async with serve(
        {"model": {"model": str(folder)}}, tokenizer=image_tokenizer, template=kit.TEMPLATE, vocab_size=262
    ) as harness:
        message = await refused(harness, kit.image_part(kit.encoded(kit.noise())))
        assert "its processor can't be loaded" in message


# ---- others go on, memory stays flat ------------------------------------------------------------------------------------------------


async def test_others_are_answered_while_images_are_processed(api):
    """Many images that take long; text requests meanwhile are answered before the last of them is."""
    slow = [kit.image_part(kit.encoded(Image.new("RGB", (3000, 3000), (i, 0, 0)))) for i in range(4)]
    ended = []

    async def images():
        answer = await send(api, *slow)
        assert answer.status == 200
        ended.append("images")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(images)
        for index in range(3):
            assert (await api.complete(f"text {index}")).text == f"text {index}"
            ended.append("text")
    assert ended == ["text"] * 3 + ["images"]


async def test_a_job_that_takes_too_long_is_killed(api):
    """The process is really gone, and the next image is processed by another."""
    hello = api.multimodal._model[1]._processes._hello
    assert hello.cpu_seconds == SETTINGS["item_seconds"]

    quick = Processes(folder=hello.folder, config=hello.config, count=1, cpu_seconds=0.05, memory_mb=hello.memory_mb)

    def job(data):
        return Job(kind="image", form="file", data=data, max_bytes=1 << 24, max_pixels=50_000_000, max_seconds=1.0)

    try:
        long = kit.encoded(kit.noise(5000, 5000), "BMP")
        done = await anyio.to_thread.run_sync(quick.run, msgspec.structs.replace(job(long), max_bytes=1 << 30), 60.0)
        assert done.refused is not None
        assert "takes more than 0.05 s of CPU time" in done.refused
        assert await anyio.to_thread.run_sync(_children, quick._process.pid) == 0
    finally:
        quick.close()


def _pids(pid: int) -> list[int]:
    """Of its children."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _children(pid: int) -> int:
    deadline = time.monotonic() + 10
    while (found := len(_pids(pid))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


async def test_jobs_take_idle_time_unless_there_is_none(api, monkeypatch):
    """A job that does not come to its end in idle time is ended, and done anew beside all others; so is the next one."""
    hello = api.multimodal._model[1]._processes._hello
    own = Processes(folder=hello.folder, config=hello.config, count=1, cpu_seconds=20.0, memory_mb=hello.memory_mb)
    large = kit.encoded(kit.noise(3000, 3000), "BMP")
    job = Job(kind="image", form="file", data=large, max_bytes=1 << 30, max_pixels=1 << 30, max_seconds=1.0)
    policies: set[int] = set()

    def watched() -> Done:
        ended = threading.Event()

        def watch():
            while not ended.wait(0.001):
                for pid in _pids(own._process.pid):
                    with contextlib.suppress(OSError):
                        policies.add(os.sched_getscheduler(pid))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            return own.run(job, 60.0)
        finally:
            ended.set()
            thread.join()

    monkeypatch.setattr(processes, "PATIENCE", 0.2)
    monkeypatch.setattr(processes, "BUSY", 0.0)
    try:
        own.warm_up()
        first = await anyio.to_thread.run_sync(watched)
        assert (first.rows, own.beside_others, os.SCHED_IDLE in policies) == (kit.ROWS, 0, True)
        policies.clear()
        monkeypatch.setattr(processes, "PATIENCE", 0.02)
        monkeypatch.setattr(processes, "BUSY", 1e9)
        second = await anyio.to_thread.run_sync(watched)
        assert (second, own.beside_others, own.jobs) == (first, 1, 3)
        assert await anyio.to_thread.run_sync(_children, own._process.pid) == 0
        policies.clear()
        third = await anyio.to_thread.run_sync(watched)
        assert (third, own.beside_others, own.jobs) == (first, 2, 4)
        assert policies == {os.SCHED_OTHER}
    finally:
        own.close()


async def test_a_job_whose_front_gives_up_ends(api, monkeypatch):
    monkeypatch.setattr(processes, "BUSY", 1e9)
    hello = api.multimodal._model[1]._processes._hello
    own = Processes(folder=hello.folder, config=hello.config, count=1, cpu_seconds=20.0, memory_mb=hello.memory_mb)
    large = kit.encoded(kit.noise(5000, 5000), "BMP")
    job = Job(kind="image", form="file", data=large, max_bytes=1 << 30, max_pixels=1 << 30, max_seconds=1.0)
    try:
        with pytest.raises(TimeoutError):
            await anyio.to_thread.run_sync(own._ask, job, IN_IDLE_TIME, time.monotonic() + 60, 0.2)
        began = time.monotonic()
        assert _children(own._process.pid) == 0
        assert time.monotonic() - began < 5  # it has 20 s of CPU time, and 100 s of wall time
    finally:
        own.close()


async def test_a_picture_that_needs_too_much_memory_is_refused_and_nothing_else_dies(api):
    hello = api.multimodal._model[1]._processes._hello
    small = Processes(folder=hello.folder, config=hello.config, count=1, cpu_seconds=20.0, memory_mb=64)

    def job(size):
        return Job(
            kind="image", form="file", data=kit.encoded(Image.new("RGB", (size, size)), compress_level=1), max_bytes=1 << 24,
            max_pixels=1 << 30, max_seconds=1.0,
        )  # fmt: skip

    try:
        done = await anyio.to_thread.run_sync(small.run, job(6000), 60.0)
        assert done.refused is not None
        assert "64 MiB of memory" in done.refused
        again = await anyio.to_thread.run_sync(small.run, job(40), 60.0)
        assert (again.refused, again.rows) == (None, kit.ROWS)
        assert small.started == 1
    finally:
        small.close()


def rss_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


async def test_memory_stays_flat_under_bad_input(api):
    bad = [kit.image_part(make()) for make, _ in BAD.values()]
    for part in bad:
        await send(api, part)
    before = rss_mb()
    for _ in range(4):
        for part in bad:
            assert (await send(api, part)).status == 400
    assert rss_mb() - before < 30


async def test_streams_work_too(api):
    events = await api.stream("/v1/chat/completions", ask(kit.text_part("hi "), kit.image_part(kit.encoded(kit.noise()))))
    assert events.done
    assert events.reasons()[-1] == "length"


async def test_base64_of_any_length_is_what_it_says(api):
    """Padding and a part of the alphabet are no matter of luck."""
    data = kit.encoded(Image.new("RGB", (5, 5), (9, 9, 9)))
    text = base64.b64encode(data + b"x").decode()
    request = await admitted(api, {"type": "image_url", "image_url": {"url": f"data:;base64,{text}", "detail": "auto"}})
    assert near(colour(request.media[0]), (9, 9, 9))
