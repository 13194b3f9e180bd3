"""What an operator sees of pictures in requests, and what nobody does: records, metrics, log lines, errors. And OpenAI's own client."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import media_kit as kit
import openai
import pytest
import structlog
from structlog.testing import capture_logs
from tiny_tokenizer import tiny_tokenizer

from tokenbus.core.media import MediaItem, MediaPart, TensorBytes

pytestmark = pytest.mark.anyio

PICTURE = kit.encoded(kit.noise(400, 300, seed=7))
BASE64 = base64.b64encode(PICTURE).decode()
TENSOR_BYTES = 3 * kit.SIDE * kit.SIDE * 4


@pytest.fixture(scope="module")
def llava(tmp_path_factory) -> Path:
    return kit.llava_folder(tmp_path_factory.mktemp("models") / "tiny-llava")


@pytest.fixture(scope="module")
async def api(serve, llava):
    tokenizer = tiny_tokenizer(special=("<image>",))
    async with serve({"model": {"model": str(llava)}}, tokenizer=tokenizer, template=kit.TEMPLATE, vocab_size=262) as harness:
        yield harness


@pytest.fixture
def logs():
    """Everything that is logged."""
    structlog.reset_defaults()
    with capture_logs() as entries:
        yield entries


def metric(text: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


async def metrics(api) -> str:
    async with api.session.get(f"{api.url}/metrics") as response:
        return await response.text()


async def test_records_metrics_and_the_log_tell_of_them(api, logs):
    before = await metrics(api)
    parts = [kit.text_part("these: "), kit.image_part(PICTURE), kit.image_part(PICTURE)]
    answer = await api.chat([{"role": "user", "content": parts}], max_tokens=2, n=2)
    assert answer.status == 200, answer.body
    for record in api.records[-2:]:
        assert (record.media, record.media_tokens, record.media_bytes) == (2, 2 * kit.ROWS, 2 * TENSOR_BYTES)
        assert 0 < record.media_seconds < record.e2e
    (entry,) = [entry for entry in logs if entry["event"] == "request_finished"]
    assert (entry["media"], entry["media_tokens"]) == (2, 2 * kit.ROWS)
    assert entry["media_seconds"] > 0
    after = await metrics(api)

    def more(name: str) -> float:
        return metric(after, name) - metric(before, name)

    assert more('tokenbus_media_items_total{kind="image",source="processed"}') == 1
    assert more('tokenbus_media_items_total{kind="image",source="cache"}') == 1
    assert more("tokenbus_media_tokens_total") == 2 * kit.ROWS
    assert more("tokenbus_media_seconds_count") == 1
    assert metric(after, "tokenbus_media_open_bytes") == 0


async def test_a_request_without_any_says_nothing_of_media(api, logs):
    assert (await api.chat("hi", max_tokens=1)).status == 200
    (entry,) = [entry for entry in logs if entry["event"] == "request_finished"]
    assert not any(name.startswith("media") for name in entry)
    assert api.records[-1].media_seconds == 0


def image(value):
    return {"type": "image_url", "image_url": value}


def bodies():
    """Requests with the file where it does not belong, or cut, or called otherwise."""
    url = kit.data_url(PICTURE)

    def chat(*parts):
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}

    yield "a string for an object", *chat(image(url))
    yield "another media type", *chat(image({"url": url.replace("image/png", "text/html")}))
    yield "no media type", *chat(image({"url": f"data:{BASE64}"}))
    yield "a file as a URL", *chat(image({"url": BASE64}))
    yield "a file as a host", *chat(image({"url": f"https://{BASE64}.example.com/"}))
    yield "rubbish", *chat(image({"url": f"{url}!!!"}))
    yield "cut short", *chat(image({"url": url[: len(url) // 2 - len(url) // 2 % 4]}))
    yield "as a detail", *chat(image({"url": url, "detail": BASE64}))
    yield "as a name of a field", *chat(image({"url": url, BASE64: 1}))
    yield "as a type", *chat({"type": BASE64, "image_url": {"url": url}})
    yield "another type", *chat({"type": "video_url", "video_url": {"url": url}})
    yield "a list of them", *chat(image({"url": [url, url]}))
    yield "a name in a part", *chat({**kit.text_part("x"), BASE64: url})
    yield "as a role", "/v1/chat/completions", {"messages": [{"role": BASE64, "content": "x"}]}
    yield "as contents", "/v1/chat/completions", {"messages": [{"role": "user", "content": {"image": url}}]}
    yield "as a prompt", "/v1/completions", {"prompt": [{"image": url}]}
    yield "as a field", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "image": url}
    yield "as a name", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], BASE64: 1}
    yield "as the model", "/v1/chat/completions", {"model": BASE64, "messages": [{"role": "user", "content": "x"}]}
    yield "media", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "media": [url]}
    yield "to tokenize", "/tokenize", {"messages": [{"role": "user", "content": [image(url)]}]}


@pytest.mark.parametrize(("path", "body"), [body[1:] for body in bodies()], ids=[body[0] for body in bodies()])
async def test_no_answer_and_no_log_line_has_a_file_in_it(api, logs, path, body):
    answer = await api.call("POST", path, body)
    assert 400 <= answer.status < 500, answer.body
    said = json.dumps(answer.body) + repr(logs)
    assert len(said) < 5000
    longest = BASE64[1000:1220]
    assert not any(longest[i : i + 24] in said for i in range(0, 196, 4))
    await api.check_well()


async def test_openais_client_sends_pictures(api):
    talk = [{"role": "user", "content": [kit.text_part("what is "), kit.image_part(PICTURE), kit.text_part("?")]}]
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model="tiny", messages=talk, max_tokens=3)
        assert answer.usage.prompt_tokens == len(api.engine.admitted[-1].prompt)
        assert [item.rows for item in api.engine.admitted[-1].media] == [kit.ROWS]
        stream = await client.chat.completions.create(model="tiny", messages=talk, max_tokens=3, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        with pytest.raises(openai.BadRequestError, match="is not an image") as raised:
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": [kit.image_part(b"no image")]}]
            )
        assert raised.value.param == "messages[0].content[0].image_url.url"


async def test_a_plugin_that_fails_with_the_file_in_its_words_does_not_repeat_it(api, logs, monkeypatch):
    plugin = type(api.engine.host.loaded["multimodal"])

    def fails(_, parts):
        raise ValueError(f"no: {parts}, {[part.value for part in parts]}")

    monkeypatch.setattr(plugin, "intake", lambda self: ("m", type("Fails", (), {"prepare": fails})()))
    answer = await api.chat([{"role": "user", "content": [kit.image_part(PICTURE)]}])
    assert answer.status == 500
    assert answer.error["plugin"] == "multimodal"
    assert len(json.dumps(answer.body)) < 5000


def test_processed_media_are_shown_without_their_bytes():
    tensor = TensorBytes("float32", (2, 3), b"abcdef" * 4)
    shown = repr(MediaItem(kind="image", digest="d", start=0, length=1, tensors={"pixel_values": tensor}))
    assert "TensorBytes(float32, (2, 3))" in shown
    assert "abcdef" not in shown
    assert "secret" not in repr(MediaPart("image", "messages[0]", "secret"))
