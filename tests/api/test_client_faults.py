"""What clients get wrong, down to the bytes: each is a 4xx in OpenAI's form that names the field, never a 500, never a traceback."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest
import structlog

from tokenbus.core.config import Config, ServerConfig
from tokenbus.core.errors import ConfigError, FieldError
from tokenbus.core.front.startup import check_client_features
from tokenbus.core.host import make_host

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
async def plain_request_afterwards(api):
    yield
    await api.check_well()


async def raw_exchange(api, data: bytes) -> tuple[int, dict, dict]:
    """(status, headers, decoded body) of the answer to bytes that no HTTP client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    writer.write(data)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
    body = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(head[0].split()[1]), headers, json.loads(body)


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


# ---- headers --------------------------------------------------------------------------------------------------------------------


async def test_a_key_that_is_no_utf8_is_a_wrong_key(serve, api):
    head = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n"
    async with serve({"server": {"api_key": ["one"], "admin_key": "root"}}) as other:
        for path in (b"/v1/models", b"/v1/tokenbus/features"):
            status, headers, body = await raw_exchange(other, head % path)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
            assert headers["www-authenticate"] == "Bearer"


async def test_a_key_from_the_command_line_may_be_no_utf8(serve, api):
    async with serve({"server": {"api_key": [b"\xff\xfe".decode("utf-8", "surrogateescape")]}}) as other:
        head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n"
        assert (await raw_exchange(other, head))[0] == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9.9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nx-long: " + b"a" * 70_000 + b"\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}", 417),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    ],
)
async def test_bytes_that_are_no_request_get_json_and_one_line(api, caplog, data, status):
    with structlog.testing.capture_logs() as lines, caplog.at_level(logging.DEBUG, "aiohttp.server"):
        got, headers, body = await raw_exchange(api, data)
    assert (got, headers["content-type"]) == (status, "application/json")
    assert body["error"].keys() >= {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert len(body["error"]["message"]) < 400
    assert headers["x-request-id"]
    assert [line["event"] for line in lines] == ["bad_http_request"] * (status == 400)
    assert not any("exc_info" in line for line in lines)
    assert not [record for record in caplog.records if record.name == "aiohttp.server" and record.levelno >= logging.INFO]


async def test_expect_100_continue(api):
    answer = await api.call("POST", "/v1/completions", {"prompt": "abc"}, headers={"Expect": "100-continue"})
    assert answer.text == "abc"


# ---- bodies ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b"not gzip at all"),
        ("deflate", b"\xff\xff\xff\xff"),
        ("gzip", gzip.compress(b'{"prompt": "x"}' * 50)[:-30] + b"broken" * 9),
    ],
)
async def test_a_body_that_can_not_be_decompressed(api, encoding, body):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    status, _, answer = await raw_exchange(api, head.encode() + body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


async def test_a_good_gzip_body(api):
    body = gzip.compress(b'{"prompt": "abc"}')
    answer = await api.call("POST", "/v1/completions", raw=body, headers={"Content-Encoding": "gzip"})
    assert answer.text == "abc"


async def test_broken_chunks(api):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert (await raw_exchange(api, head + b"zz\r\nabc\r\n0\r\n\r\n"))[0] == 400


@pytest.mark.parametrize("depth", [65, 500, 900, 5000, 100_000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "logit_bias", "unheard_of", "tokenbus", "messages"])
async def test_nesting_is_bounded_and_names_the_field(api, field, depth):
    value = '{"a": ' + "[" * depth + "]" * depth + "}"
    body = '{"messages": [{"role": "user", "content": "x"}], "' + field + '": ' + value + "}"
    answer = await api.call("POST", "/v1/chat/completions", raw=body.encode())
    assert (answer.status, answer.error["param"]) == (400, field)
    assert "64 levels" in answer.error["message"]


async def test_nesting_in_tool_calls(serve, api):
    async with serve(template="{{ messages[-1].tool_calls | default([]) | tojson }}{{ messages[0].content }}") as other:
        for depth, status in ((57, 200), (64, 400), (700, 400)):
            call = {"function": {"name": "f", "arguments": {"a": nested(depth)}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            body = {"messages": [{"role": "user", "content": "x"}, message]}
            assert (await other.call("POST", "/v1/chat/completions", body)).status == status
        fine = await other.chat("x", chat_template_kwargs={"deep": nested(60)})
        assert fine.status == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ('{"prompt": "x", "temperature": 1e999}', "temperature", "out of range"),
        ('{"prompt": "x", "logit_bias": {"5": -1e400}}', "logit_bias.5", "out of range"),
        ('{"prompt": "x", "stop": ["a", 1e999]}', "stop[1]", "out of range"),
        ('{"prompt": "x", "seed": ' + "1" * 5000 + "}", "seed", "out of range"),
        ('{"prompt": "\\ud800"}', "prompt", "surrogate"),
        ('{"prompt": "\\udc00x"}', "prompt", "surrogate"),
        ('{"prompt": "x", "stop": ["\\ud83d"]}', "stop[0]", "surrogate"),
        ('{"prompt": "x", "\\ud83d": 1}', "?", "surrogate"),
        ('{"prompt": "x", "temperature": NaN}', None, "not valid JSON"),
        ('{"prompt": "x"', None, "not valid JSON"),
    ],
)
async def test_values_that_json_can_not_mean(api, body, param, words):
    answer = await api.call("POST", "/v1/completions", raw=body.encode())
    assert (answer.status, answer.error["param"]) == (400, param)
    assert words in answer.error["message"]


async def test_half_a_surrogate_pair_in_messages(api):
    raw = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = await api.call("POST", "/v1/chat/completions", raw=raw)
    assert (answer.status, answer.error["param"]) == (400, "messages[0].content")


async def test_a_number_of_thousands_of_digits_in_a_query(api):
    for last in ("9" * 5000, "0", "-1", "x", "1025"):
        answer = await api.call("GET", f"/v1/tokenbus/plans?last={last}")
        assert (answer.status, answer.error["param"]) == (400, "last")
    assert (await api.call("GET", "/v1/tokenbus/plans?last=5")).status == 200


# ---- names ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"max_completion_tokens": 2000}, "max_completion_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2000}, "max_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ],
)
async def test_errors_call_a_field_what_the_client_calls_it(api, fields, param):
    answer = await api.chat("hi", **fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    known = {"max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"} - fields.keys()
    assert not known & set(answer.error["message"].replace("'", " ").split())


async def test_switches_name_the_feature(api):
    for body, param in (
        ({"features": {"metrics": True, "prefix_cache": "off"}}, "features.prefix_cache"),
        ({"features": {"prefix_cache": None}}, "features.prefix_cache"),
        ({"features": ["prefix_cache"]}, "features"),
    ):
        answer = await api.call("POST", "/v1/tokenbus/features", body)
        assert (answer.status, answer.error["param"]) == (400, param)
    answer = await api.complete(tokenbus={"features": {"chunked_prefill": True, "prefix_cache": 0}})
    assert (answer.status, answer.error["param"]) == (400, "tokenbus.features.prefix_cache")


@pytest.mark.parametrize(
    "options", [None, {}, {"features": None}, {"features": {}}, {"features": None, "trusted_content": None}]
)
async def test_null_options_are_absent_ones(api, options):
    assert (await api.chat("abc", tokenbus=options)).status == 200
    assert api.engine.admitted[-1].pinned == {}


LONG = "n" * 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {LONG: 1},
        {"model": LONG},
        {"tokenbus": {"features": {LONG: True}}},
        {"tokenbus": {LONG: 1}},
        {"logit_bias": {LONG: 1}},
        {"repetition_penalty": LONG},
        {"top_k": -(10**300)},
        {"n": 10**300},
        {"max_tokens": 10**300},
        {"max_tokens": -(10**300)},
        {"temperature": 10**300},
        {"temperature": 10**399},
        {"timeout": -(10**300)},
        {"seed": 10**300},
        {"logprobs": 10**300},
        {"prompt": [10**300]},
        {"stop": LONG},
    ],
)
async def test_errors_do_not_echo_long_names_or_values(api, fields):
    answer = await api.complete(**({"prompt": "x"} | fields))
    assert 400 <= answer.status < 500
    assert len(answer.error["message"]) < 300
    assert len(answer.error["param"]) <= 220


@pytest.mark.parametrize(
    "message",
    [
        {"role": LONG, "content": "x"},
        {"role": "user", "content": "x", LONG: 1},
        {"role": "user", "content": [{"type": LONG}]},
        {"role": "user", "content": [{"type": "text", "text": "x", LONG: 1}]},
    ],
)
async def test_errors_do_not_echo_long_parts_of_messages(api, message):
    answer = await api.chat([message])
    assert answer.status == 400
    assert len(answer.error["message"]) < 300
    assert len(answer.error["param"]) <= 220


async def test_errors_do_not_echo_long_paths(api):
    for path in ("/x" * 3000, "/v1/models/" + "x" * 6000):
        answer = await api.call("GET", path)
        assert answer.status == 404
        assert len(answer.error["message"]) < 300


# ---- messages -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "place"),
    [
        ({"name": 5}, "name"),
        ({"name": []}, "name"),
        ({"tool_call_id": {"a": 1}}, "tool_call_id"),
        ({"reasoning_content": True}, "reasoning_content"),
        ({"tool_calls": "call"}, "tool_calls"),
        ({"tool_calls": {}}, "tool_calls"),
        ({"tool_calls": [{"id": "1"}, 5]}, "tool_calls[1]"),
        ({"colour": ""}, "colour"),
        ({"content": [{"type": "text", "text": "x", "colour": "red"}]}, "content[0].colour"),
        ({"content": [{"type": "text", "text": "x"}, {"type": ["text"], "text": "x"}]}, "content[1]"),
        ({"content": ["x"]}, "content[0]"),
        ({"role": ["user"]}, "role"),
    ],
)
async def test_nothing_inside_a_message_is_ignored(api, extra, place):
    answer = await api.chat([{"role": "assistant", "content": "x"} | extra])
    assert (answer.status, answer.error["param"]) == (400, f"messages[0].{place}")


async def test_null_parts_of_messages_are_absent_ones(api):
    parts = [{"type": "text", "text": "x", "annotations": [], "cache_control": None}]
    message = {"role": "assistant", "content": parts, "name": None, "tool_calls": [], "tool_call_id": None, "annotations": []}
    assert (await api.chat([message])).status == 200


# ---- values that ask for nothing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [[], {}])
@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "echo",
        "n",
        "unheard_of",
        "best_of",
    ],
)
async def test_empty_containers_are_no_values_of_other_fields(api, field, value):
    answer = await api.complete(**{field: value})
    assert (answer.status, answer.error["param"]) == (400, field)


async def test_empty_containers_ask_for_nothing_where_containers_stand(api):
    fields = {"stop": [], "stop_token_ids": [], "bad_words": [], "allowed_token_ids": [], "logit_bias": {}, "tools": []}
    assert (await api.complete("abc", **fields)).text == "abc"
    assert api.engine.admitted[-1].fields == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 0.009}, "repetition_penalty"),
        ({"presence_penalty": 1e300}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"min_p": -1e-9}, "min_p"),
        ({"logit_bias": {"5": 100.1}}, "logit_bias"),
        ({"timeout": 1e-9}, "timeout"),
    ],
)
async def test_numbers_that_would_fail_later(api, fields, param):
    answer = await api.complete(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "between" in answer.error["message"] or "or more" in answer.error["message"]


async def test_bans_of_everything_are_found_at_admission(api):
    end = api.engine.info.eos_token_ids[0]
    for fields, param in (
        ({"allowed_token_ids": [end], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, end], "min_tokens": 1, "stop_token_ids": [5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [97, end], "min_tokens": 1, "bad_words": ["a"]}, "allowed_token_ids"),
    ):
        answer = await api.complete(max_tokens=5, **fields)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert "banned" in answer.error["message"]
    assert (await api.complete(max_tokens=5, allowed_token_ids=[5, end], min_tokens=1)).status == 200
    assert (await api.complete(max_tokens=5, allowed_token_ids=[end], min_tokens=1, ignore_eos=True)).status == 200


# ---- what the operator gets wrong, and sees -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("prefix_cach", "did you mean 'prefix_cache'"), ("metrics", "scope step")])
async def test_client_features_that_no_request_can_switch(api, name, words):
    config = Config(server=ServerConfig(client_features=("prefix_cache", name)))
    with pytest.raises(ConfigError, match=rf"server\.client_features.*{words}"):
        check_client_features(config.server.client_features, make_host("front", config))
    check_client_features(ServerConfig().client_features, make_host("front", Config()))


async def test_features_tell_who_holds_the_slots(serve, api):
    state = (await api.call("GET", "/v1/tokenbus/features")).body
    assert (state["slots"]["attention"], state["slots"]["scheduling"]) == ("attention.cpu", "scheduling.unified")
    state = (await api.call("POST", "/v1/tokenbus/features", {"features": {"attention.torch": True}})).body
    assert state["slots"]["attention"] == "attention.torch"
    state = (await api.call("POST", "/v1/tokenbus/features", {"features": {"attention.torch": False}})).body
    assert state["slots"]["attention"] == "core (torch)"
    assert state["features"]["attention.torch"]["because"] == "switched off live; its slot is held by core (torch)"
    state = (await api.call("POST", "/v1/tokenbus/features", {"features": {"scheduling.priority": True}})).body
    assert state["slots"]["scheduling"] == "scheduling.priority"
    assert "core" not in state["features"]["scheduling.unified"]["because"]


def test_the_field_error_shortens():
    error = FieldError("f" * 1000, "is wrong")
    assert error.param is not None
    assert len(error.param) <= 200
    assert len(error.message) < 250
