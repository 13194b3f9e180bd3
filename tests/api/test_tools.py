"""Tool calls over HTTP, with an engine that writes what it is told to; parsers of third parties; the openai package."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tools_kit import ADD, ARGUMENTS, BODY, CALL, GET, HERMES, both, function, joined, prompt_of, switch_on

from tokenbus.core.output import CallArguments, CallEnd, CallStart, Content
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(serve):
    async with serve(template=HERMES + BODY) as harness:
        yield harness
        await harness.check_well()


async def test_a_call(api):
    message, reason = await both(api, CALL, tools=[ADD, GET])
    (call,) = message["tool_calls"]
    assert message["content"] is None
    assert (call["type"], call["function"]) == ("function", {"name": "add", "arguments": ARGUMENTS})
    assert call["id"].startswith("call_")
    assert len(call["id"]) <= 40
    assert reason == "tool_calls"
    assert prompt_of(api).startswith("(add)(get)<|im_start|>user")
    assert api.engine.admitted[-1].fields == {"tools": ["add", "get"]}
    assert [record.finish_reason for record in api.records] == ["tool_calls", "tool_calls"]


async def test_text_and_two_calls(api):
    output = f"I add.\n\n{CALL}\n{CALL.replace('add', 'get')}"
    message, reason = await both(api, output, tools=[ADD, GET], tool_choice="auto")
    assert message["content"] == "I add."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "get"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert reason == "tool_calls"


async def test_arguments_are_streamed_as_they_come(api):
    api.outputs(CALL)
    events = await api.stream_chat("hi", tools=[ADD])
    pieces = [piece for chunk in events.chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert pieces[0]["function"] == {"name": "add", "arguments": "{"}
    assert "".join(piece["function"]["arguments"] for piece in pieces) == ARGUMENTS
    assert len(pieces) == len(ARGUMENTS)  # one token a character here, and none is held back


async def test_no_call(api):
    message, reason = await both(api, "just text ", tools=[ADD])
    assert message == {"role": "assistant", "content": "just text "}
    assert reason == "stop"


async def test_a_broken_call_is_text(api):
    broken = '<tool_call>{"name": add}</tool_call> sorry'
    message, reason = await both(api, broken, tools=[ADD])
    assert (message["content"], reason) == (broken, "stop")


async def test_c43_a_call_that_is_cut_off(api):
    message, reason = await both(api, CALL, tools=[ADD], max_tokens=CALL.index("[2"))
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": '}
    assert reason == "length"
    message, reason = await both(api, CALL, tools=[ADD], max_tokens=5)
    assert (message["content"], reason) == (CALL[:5], "length")


async def test_a_call_that_breaks_off_is_not_made(api):
    message, reason = await both(api, CALL[: CALL.index("[2")], tools=[ADD])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": '
    assert reason == "stop"


async def test_only_one_call_when_there_may_be_only_one(api):
    message, reason = await both(api, CALL + CALL, tools=[ADD], parallel_tool_calls=False)
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    assert message["content"] is None
    assert [ended for _, ended in api.engine.ended] == ["stop", "stop"]
    assert {record.output_tokens for record in api.records} == {CALL.index("}}") + 1}
    two, _ = await both(api, CALL + CALL, tools=[ADD], parallel_tool_calls=True)
    assert len(two["tool_calls"]) == 2


async def test_stop_strings_go_on_working(api):
    message, reason = await both(api, f"text END {CALL}", tools=[ADD], stop=["END"])
    assert (message["content"], reason) == ("text ", "stop")
    message, reason = await both(api, CALL, tools=[ADD], stop=['"b"'])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1, '
    assert reason == "stop"


async def test_choices_and_logprobs(api):
    api.outputs(CALL)
    answer = await api.chat("hi", tools=[ADD], n=2, logprobs=True)
    calls = [choice["message"]["tool_calls"][0] for choice in answer.body["choices"]]
    assert calls[0]["id"] != calls[1]["id"]
    assert [entry["token"] for entry in answer.choice["logprobs"]["content"]] == list(CALL)
    events = await api.stream_chat("hi", tools=[ADD], n=2, stream_options={"include_usage": True})
    assert joined(events, 1)["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert events.chunks[-1]["usage"]["completion_tokens"] == 2 * len(CALL)


async def test_none_means_none(api):
    message, reason = await both(api, CALL, tools=[ADD], tool_choice="none", parallel_tool_calls=False)
    assert (message["content"], reason) == (CALL, "stop")
    assert "(add)" not in prompt_of(api)
    assert api.engine.admitted[-1].fields == {}
    bad = await api.chat("hi", tools=[{}], tool_choice="none")
    assert (bad.status, bad.error["param"]) == (400, "tools[0].type")


# ---- control tokens ------------------------------------------------------------------------------------------------------------


async def test_markers_that_are_control_tokens(serve, special_tokenizer):
    template = "{# [TOOL_CALLS] #}" + BODY
    async with serve(template=template, tokenizer=special_tokenizer) as api:
        output = 'Höre:<|pad|>[TOOL_CALLS][{"name": "add", "arguments": {"a": "é"}}]'
        message, reason = await both(api, output, tools=[ADD])
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["arguments"], reason) == ("Höre:", '{"a": "é"}', "tool_calls")
        assert (len(call["id"]), call["id"].isalnum()) == (9, True)
        message, _ = await both(api, "a[TOOL_CALLS]b", tools=[ADD])
        assert message["content"] == "a[TOOL_CALLS]b"
        message, _ = await both(api, "a[TOOL_CALLS]b")
        assert message["content"] == "ab"


# ---- others' parsers -----------------------------------------------------------------------------------------------------------


class Exclaimed:
    """`!name!` is a call without arguments."""

    special_tokens = frozenset()

    def __init__(self, does: str) -> None:
        self.text, self.does = "", does

    def feed(self, text: str, *, final: bool) -> list[Any]:
        self.text += text
        match self.does:
            case "raise":
                raise ValueError("can't read")
            case "nonsense":
                return [CallEnd()]
            case "string":
                return "text"
        if not final:
            return []
        before, name, after = self.text.split("!")
        return [Content(before), CallStart(name, "own id"), CallArguments("{}"), CallEnd(), Content(after)]


class Others(Plugin):
    info = PluginInfo(name="others.tools", summary="x", scope="step", lossless=True, slot="tool_calls", default=False)

    @hookimpl
    def tool_parser(self, request):
        assert request.tools[0]["function"]["parameters"]["properties"] == {"a": {"type": "integer"}}
        return Exclaimed(request.fields["tools"][-1])


@pytest.fixture
async def other(api):
    switch_on(api, Others)
    return api


async def test_a_third_partys_parser(other):
    message, reason = await both(other, "so !add! then", tools=[ADD])
    assert message["content"] == "so  then"
    assert message["tool_calls"] == [{"id": "own id", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    assert reason == "tool_calls"
    assert (await other.chat("hi")).status == 200


@pytest.mark.parametrize("does", ["raise", "nonsense", "string"])
async def test_a_parser_that_fails_ends_its_request_only(other, does):
    failed = await other.chat("abc", tools=[ADD, function(name=does)])
    assert (failed.status, failed.error["plugin"], failed.error["hook"]) == (500, "others.tools", "tool_parser")
    events = await other.stream_chat("abc", tools=[ADD, function(name=does)])
    assert events.status == 500 or "error" in events.chunks[-1]
    await other.until(lambda: not other.engine.open)
    assert [record.error_kind for record in other.records] == ["PluginError"] * 2


# ---- the openai package --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def client(api):
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_openai_package_a_whole_round(api, client):
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    api.outputs(f"I add.\n{CALL}")
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD], tool_choice="auto")
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1, "b": [2]}
    assert answer.choices[0].finish_reason == "tool_calls"
    messages += [answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
    api.outputs("It is 3.")
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])
    assert answer.choices[0].message.content == "It is 3."
    assert answer.choices[0].message.tool_calls is None
    assert f"I add.add:{ARGUMENTS}<|im_end|>" in prompt_of(api)


async def test_openai_package_streamed(api, client):
    api.outputs(f"I add.\n{CALL}\n{CALL}")
    async with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "hi"}], tools=[ADD]
    ) as stream:
        events = [event.type async for event in stream]
        final = (await stream.get_final_completion()).choices[0]
    assert final.message.content == "I add."
    assert [call.function.arguments for call in final.message.tool_calls] == [ARGUMENTS] * 2
    assert final.finish_reason == "tool_calls"
    assert events.count("tool_calls.function.arguments.done") == 2
