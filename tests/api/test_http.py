"""Everything about the HTTP surface that is not one of the case book's rows."""

from __future__ import annotations

import asyncio
import hashlib
import json

import aiohttp
import anyio
import pytest
import structlog

from tokenbus.core.errors import ConfigError

pytestmark = pytest.mark.anyio


async def test_errors_are_json_in_openais_form(api):
    for answer, status in (
        (await api.call("GET", "/nowhere"), 404),
        (await api.call("GET", "/v1/completions"), 405),
        (await api.call("DELETE", "/v1/models"), 405),
        (await api.call("POST", "/v1/completions", raw=b"{"), 400),
        (await api.call("POST", "/v1/completions", raw=b"[1]"), 400),
        (await api.call("POST", "/v1/completions", raw=b'{"prompt": "x", "temperature": NaN}'), 400),
        (await api.call("POST", "/v1/completions", raw=b'{"a":' + b"[" * 100_000), 400),
        (await api.call("POST", "/v1/completions", raw=b"\xff\xfe"), 400),
        (await api.call("POST", "/v1/completions"), 400),
        (await api.complete(model="gpt-4"), 404),
    ):
        assert answer.status == status
        assert answer.error.keys() >= {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"]
    assert (await api.call("GET", "/v1/completions")).headers["Allow"] == "POST"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": 2**63}, "seed"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"nope": True}}, "stream_options.nope"),
        ({"timeout": 0}, "timeout"),
        ({"tokenbus": {"nope": 1}}, "tokenbus.nope"),
        ({"tokenbus": {"features": {"prefix_cache": "no"}}}, "tokenbus.features.prefix_cache"),
        ({"echo": "yes"}, "echo"),
    ],
)
async def test_wrong_values_name_the_field(api, fields, param):
    answer = await api.complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].image_url"),
        ([{"role": "user", "content": "x", "colour": "red"}], "messages[0].colour"),
        (["x"], "messages[0]"),
        ([{"role": "user", "content": "x"}] * 2049, "messages"),
    ],
)
async def test_wrong_messages_name_the_place(api, messages, param):
    answer = await api.chat(messages)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_messages_as_the_openai_client_sends_them_back(api):
    answer = {"role": "assistant", "content": "yes", "refusal": None, "annotations": [], "tool_calls": None, "audio": None}
    await api.chat([{"role": "developer", "content": "be brief"}, answer, {"role": "user", "content": "hi"}])
    text = b"".join(api.tokenizer.bytes[token] for token in api.engine.admitted[-1].prompt).decode()
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n")


async def test_template_that_refuses(serve):
    async with serve(template="{{ raise_exception('roles must alternate') }}") as api:
        answer = await api.chat("hi")
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "roles must alternate" in answer.error["message"]
    async with serve(template=None) as api:
        assert "no chat template" in (await api.chat("hi")).error["message"]


async def test_template_values(serve):
    async with serve(
        template="{{ bos_token }}{% generation %}{{ messages[0].content | tojson }}{{ mood }}{% endgeneration %}"
    ) as api:
        await api.chat("<é>", chat_template_kwargs={"mood": "!"})
        assert api.engine.admitted[-1].prompt == api.tokenizer.encode_now('<|im_start|>"<é>"!')
        assert (await api.chat("x", chat_template_kwargs={"messages": []})).error["param"] == "chat_template_kwargs.messages"


async def test_body_limit(serve):
    async with serve({"limits": {"max_body_bytes": 2000}}) as api:
        answer = await api.complete("x" * 3000)
        assert (answer.status, answer.error["code"]) == (413, "TooLargeError")

        async def pieces():
            for _ in range(30):
                yield b" " * 100

        async with api.session.post(f"{api.url}/v1/completions", data=pieces()) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "TooLargeError"
        assert [refused.status for refused in api.refusals] == [413, 413]
        await api.check_well()


async def test_models(api):
    listed = (await api.call("GET", "/v1/models")).body["data"]
    assert [(model["id"], model["max_model_len"]) for model in listed] == [("tiny", 512)]
    assert (await api.call("GET", "/v1/models/tiny")).body == listed[0]
    assert (await api.call("GET", "/v1/models/else")).status == 404
    assert (await api.complete(model="tiny", max_tokens=1)).status == 200
    assert (await api.complete(model="demo", max_tokens=1)).body["model"] == "tiny"


async def test_tokenize_and_detokenize(api):
    answer = await api.call("POST", "/tokenize", {"prompt": "the é", "return_token_strs": True})
    assert answer.body["tokens"] == [257, 32, 0xC3, 0xA9]
    assert answer.body["token_strs"] == ["the", " ", "bytes:\\xc3", "bytes:\\xa9"]
    assert (answer.body["count"], answer.body["max_model_len"]) == (4, 512)
    chat = await api.call("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    assert chat.body["count"] == 21
    back = await api.call("POST", "/detokenize", {"tokens": chat.body["tokens"]})
    assert back.body["prompt"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await api.call("POST", "/detokenize", {"tokens": [261]})).error["param"] == "tokens"
    assert (await api.call("POST", "/tokenize", {"prompt": "x", "messages": []})).error["param"] == "prompt"
    assert (await api.call("POST", "/tokenize", {"nope": 1})).error["param"] == "nope"


async def test_chat_and_completion_bodies(api):
    body = (await api.chat("hi", seed=7)).body
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "user\nhi\nassistant\n"}
    assert body["tokenbus"]["seed"] == 7
    assert body["tokenbus"]["arm"] == "default"
    assert (await api.complete()).body["object"] == "text_completion"
    events = await api.stream_chat("hi")
    assert events.headers["Content-Type"].startswith("text/event-stream")
    assert events.chunks[0]["object"] == "chat.completion.chunk"
    assert [chunk["choices"][0]["delta"].get("role") for chunk in events.chunks][:3] == ["assistant", None, None]
    assert [("tokenbus" in chunk) for chunk in events.chunks] == [False] * (len(events.chunks) - 1) + [True]


async def test_special_tokens_are_shown_on_request(api):
    assert "<|im_start|>" in (await api.chat("hi", skip_special_tokens=False)).text
    assert "<|im_start|>" not in (await api.chat("hi")).text


async def test_drawn_seeds_differ_and_are_reported(api):
    seeds = [(await api.complete()).body["tokenbus"]["seed"] for _ in range(3)]
    assert len(set(seeds)) == 3
    assert [admitted.seed for admitted in api.engine.admitted] == seeds
    await api.complete(seed=5, n=2)
    assert [(admitted.seed, admitted.choice) for admitted in api.engine.admitted[-2:]] == [(5, 0), (5, 1)]


async def test_deadline_is_the_smaller_one(serve):
    async with serve({"scheduler": {"request_timeout": 100.0}}) as api:
        for given, expected in ((None, 100.0), (5, 5.0), (1000, 100.0)):
            await api.complete(timeout=given)
            admitted = api.engine.admitted[-1]
            assert admitted.deadline - admitted.arrival == pytest.approx(expected)


async def test_all_that_is_ready_goes_out_in_one_write(api):
    """A step's tokens of all choices, and the end with the last text: counted as reads of single packets would be flaky, so by chunks."""
    api.engine.hold = True
    async with anyio.create_task_group() as tasks:
        found = []

        async def ask():
            found.append(await api.stream_completion("abcdef"))

        tasks.start_soon(ask)
        await api.until(lambda: api.engine.open)
        api.engine.hold = False
        while api.engine.step():  # six steps while the server can't run
            pass
    (events,) = found
    assert events.deltas() == ["abcdef"]
    assert events.reasons() == ["stop"]


async def test_a_slow_reader_holds_up_nobody(api):
    api.outputs("x" * 400)
    body = json.dumps({"prompt": "abc", "stream": True, "logprobs": 20}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]), limit=1024)
    writer.transport.pause_reading()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await api.until(lambda: api.engine.open)
    assert len((await api.complete("abc")).text) == 400
    await api.until(lambda: not api.engine.open)
    writer.transport.abort()
    await api.check_well()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_write_that_finds_the_client_gone_is_a_cancellation(api, monkeypatch, n):
    """Whoever notices first: here the write does, not the connection."""

    async def gone(self, data):
        raise ConnectionResetError("the client is gone")

    monkeypatch.setattr("tokenbus.core.api.sse.EventStream._write", gone)
    api.engine.hold_after = 1  # nothing has finished
    with structlog.testing.capture_logs() as lines, pytest.raises(aiohttp.ClientError):
        await api.stream_completion("abc", n=n)
    await api.until(lambda: len(api.records) == n)
    assert {record.finish_reason for record in api.records} == {"cancelled"}
    assert [line["event"] for line in lines] == ["request_finished"]


# ---- switches -------------------------------------------------------------------------------------------------------------------


async def test_request_switches_a_feature(api):
    answer = await api.complete(tokenbus={"features": {"prefix_cache": False}})
    admitted = api.engine.admitted[-1]
    assert "prefix_cache" not in admitted.features
    assert admitted.pinned == {"prefix_cache": False}
    assert "prefix_cache" not in answer.headers["x-tokenbus-features"].split(",")
    assert "chunked_prefill" in answer.headers["x-tokenbus-features"].split(",")
    assert answer.headers["x-tokenbus-arm"] == "default"
    assert answer.body["tokenbus"]["features"] == list(admitted.features)


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("prefix_cach", 400, "prefix_cache"),
        ("sampling.stops", 400, "scope step"),
        ("chunked_prefill", 403, "those they may: prefix_cache"),
    ],
)
async def test_request_may_not_switch(serve, name, status, reason):
    async with serve({"server": {"client_features": ["prefix_cache"]}}) as api:
        answer = await api.complete(tokenbus={"features": {name: False}})
        assert (answer.status, answer.error["param"]) == (status, f"tokenbus.features.{name}")
        assert reason in answer.error["message"]


async def test_request_switches_on_what_the_server_has_off(serve):
    async with serve({"features": {"disable": ["prefix_cache"]}}) as api:
        answer = await api.complete(tokenbus={"features": {"prefix_cache": True}})
        assert "prefix_cache" in answer.headers["x-tokenbus-features"].split(",")
        assert answer.body["tokenbus"]["switches"] == {"prefix_cache": {"on": True, "source": "client"}}
        assert "prefix_cache" not in api.service.host.loaded  # it went with the request
        answer = await api.complete(tokenbus={"features": {"prefix_cache": False}})
        assert answer.body["tokenbus"]["switches"] == {
            "prefix_cache": {"on": False, "source": "client", "because": "switched off at start"}
        }


async def test_live_switch(api):
    before = (await api.call("GET", "/v1/tokenbus/features")).body
    assert before["features"]["metrics"] == {
        "on": True, "scope": "step", "lossless": True, "applies": "live", "claims": [], "client": False,
    }  # fmt: skip
    assert before["kernels"] == {"lossless": True}
    after = await api.call("POST", "/v1/tokenbus/features", {"features": {"sampling.stops": False}})
    assert after.body["features"]["sampling.stops"]["because"] == "switched off live"
    assert (await api.complete(stop="x")).error["code"] == "FeatureOffError"
    assert [change.changes for change in api.changes] == [{"sampling.stops": False}]
    for body, status in (
        ({"features": {"nope": True}}, 404),
        ({"features": {"metrics": 1}}, 400),
        ({}, 400),
        ({"features": {}, "x": 1}, 400),
    ):
        assert (await api.call("POST", "/v1/tokenbus/features", body)).status == status


async def test_plugin_routes_come_and_go(api):
    async def status():
        async with api.session.get(api.url + "/metrics") as response:
            return response.status, (await response.text())

    code, text = await status()
    assert code == 200
    assert "tokenbus" in text
    await api.call("POST", "/v1/tokenbus/features", {"features": {"metrics": False}})
    code, text = await status()
    assert (code, json.loads(text)["error"]["code"]) == (404, "NotFoundError")
    await api.call("POST", "/v1/tokenbus/features", {"features": {"metrics": True}})
    assert (await status())[0] == 200


async def test_plans(api):
    await api.complete("abcdef")
    answer = await api.call("GET", "/v1/tokenbus/plans?last=2")
    assert [plan["step_id"] for plan in answer.body["plans"]] == [4, 5]
    assert answer.body["plans"][0].keys() >= {"step_id", "num_tokens", "budget", "free_blocks", "preempted"}
    for last in ("0", "-1", "x", "1e9", "99999"):
        assert (await api.call("GET", f"/v1/tokenbus/plans?last={last}")).error["param"] == "last"


# ---- access ---------------------------------------------------------------------------------------------------------------------


async def test_api_keys(serve, tmp_path):
    (tmp_path / "keys").write_text("# ours\none\n\ntwo\n")
    async with serve({"server": {"api_key": [f"@{tmp_path / 'keys'}", "three"], "admin_key": "root"}}) as api:
        for key in ("one", "two", "three", "root"):
            answer = await api.complete(headers={"Authorization": f"Bearer {key}"})
            assert answer.status == 200
            assert api.engine.admitted[-1].tenant == hashlib.sha256(key.encode()).hexdigest()[:16]
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "one"}, {"Authorization": "Bearer "}):
            answer = await api.complete(headers=headers)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert (await api.call("GET", "/v1/models")).status == 401
        assert (await api.call("GET", "/health")).status == 200
        assert (await api.call("GET", "/ready")).status == 200
        path = "/v1/tokenbus/features"
        assert (await api.call("GET", path, headers={"Authorization": "Bearer one"})).status == 401
        assert (await api.call("GET", path, headers={"Authorization": "Bearer root"})).status == 200
        assert [refused.status for refused in api.refusals] == [401] * 4


@pytest.mark.parametrize("text", ["", "\n# nothing\n"])
async def test_an_empty_key_file_is_an_error(serve, tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="holds no key"):
        async with serve({"server": {"api_key": [f"@{tmp_path / 'keys'}"]}}):
            pass
    with pytest.raises(ConfigError, match="can't read"):
        async with serve({"server": {"admin_key": f"@{tmp_path / 'absent'}"}}):
            pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "http://127.0.0.1"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"X-Forwarded-For": "1.2.3.4"}, 403),
    ],
)
async def test_admin_without_a_key_is_for_loopback(api, headers, status):
    assert (await api.call("GET", "/v1/tokenbus/features", headers=headers)).status == status


# ---- logs -----------------------------------------------------------------------------------------------------------------------


async def test_one_log_line_a_request_without_text(api):
    with structlog.testing.capture_logs() as lines:
        await api.complete("secret words", n=2, max_tokens=3)
        await api.chat("secret words")
    assert [line["event"] for line in lines] == ["request_finished"] * 2
    first, second = lines
    assert (first["choices"], first["output_tokens"], first["finish_reason"]) == (2, 6, "length")
    assert (second["arm"], second["finish_reason"], second["prompt_tokens"]) == ("default", "stop", 31)
    assert second["id"] == api.engine.admitted[-1].group
    assert second["ttft"] >= 0
    assert "secret" not in repr(lines)


async def test_a_stream_with_nothing_to_say_sends_comments_once_it_has_begun(serve):
    async with serve({"server": {"stream_comment_seconds": 0.02}}) as api:
        api.engine.hold_after = 2
        lines = []
        async with api.session.post(f"{api.url}/v1/completions", json={"prompt": "abc", "stream": True}) as response:
            async for line in response.content:
                lines.append(line)
                if lines.count(b": the answer goes on\n") == 3:
                    api.engine.resume()
        assert lines[0].startswith(b"data: {"), "no comment before the first event: until then an error has its own status"
        assert lines[-2:] == [b"data: [DONE]\n", b"\n"]
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == "abc"
        assert {line[:2] for line in lines} == {b"da", b": ", b"\n"}


async def test_comments_end_with_a_client_that_leaves(serve):
    async with serve({"server": {"stream_comment_seconds": 0.02}}) as api:
        api.engine.hold_after = 1
        async with api.session.post(f"{api.url}/v1/completions", json={"prompt": "abc", "stream": True}) as response:
            async for line in response.content:
                if line.startswith(b": "):
                    break
        await api.until(lambda: bool(api.engine.ended))
        await api.check_well()
