"""Calls that `tool_choice` forces, over HTTP: they imply a grammar, and come back as calls."""

from __future__ import annotations

import pytest
from tools_kit import ADD, ARGUMENTS, BODY, GET, HERMES, THINK, Structured, both, function, switch_on

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(serve):
    async with serve(template=HERMES + BODY) as harness:
        yield harness
        await harness.check_well()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_forced_calls_need_the_plugin_that_holds_to_a_grammar(api, choice):
    api.engine.switches = api.engine.host.change_switches(api.engine.switches, {"structured": False})
    answer = await api.chat("hi", tools=[ADD], tool_choice=choice)
    assert (answer.status, answer.error["param"], answer.error["code"]) == (400, "tool_choice", "FeatureOffError")
    assert "needs the plugin 'structured'" in answer.error["message"]
    assert answer.error["plugin"] == "structured"
    assert api.engine.admitted == []


@pytest.fixture
async def grammar(api):
    switch_on(api, Structured, off=("structured",))
    return api


async def test_a_named_call(grammar):
    choice = {"type": "function", "function": {"name": "add"}}
    message, reason = await both(grammar, ARGUMENTS, tools=[ADD, GET], tool_choice=choice)
    (call,) = message["tool_calls"]
    assert (call["function"], message["content"], reason) == ({"name": "add", "arguments": ARGUMENTS}, None, "tool_calls")
    fields = grammar.engine.admitted[-1].fields
    assert fields["structured_outputs"] == {"json": ADD["function"]["parameters"]}
    assert (fields["tools"], fields["tool_choice"]) == (["add", "get"], {"name": "add"})


async def test_required_calls(grammar):
    output = f'[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "get", "arguments": {{}}}}]'
    message, reason = await both(grammar, output, tools=[ADD, GET], tool_choice="required")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "get"]
    assert (message["content"], reason) == (None, "tool_calls")
    schema = grammar.engine.admitted[-1].fields["structured_outputs"]["json"]
    assert (schema["minItems"], "maxItems" in schema) == (1, False)
    message, _ = await both(grammar, output, tools=[ADD, GET], tool_choice="required", parallel_tool_calls=False)
    assert len(message["tool_calls"]) == 1
    assert grammar.engine.admitted[-1].fields["structured_outputs"]["json"]["maxItems"] == 1
    assert (await grammar.chat("hi", tools=[function(strict=True)], tool_choice="required")).status == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
async def test_c43_a_forced_call_that_is_cut_off(grammar, choice):
    output = ARGUMENTS if isinstance(choice, dict) else f'[{{"name": "add", "arguments": {ARGUMENTS}}}]'
    end = output.index("[2")
    message, reason = await both(grammar, output, tools=[ADD], tool_choice=choice, max_tokens=end)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": '}
    assert reason == "length"


async def test_forced_calls_and_a_grammar_of_the_clients_own(grammar):
    answer = await grammar.chat("hi", tools=[ADD], tool_choice="required", structured_outputs={"regex": "a"})
    assert (answer.status, answer.error["param"]) == (400, "structured_outputs")
    assert "tool_choice" in answer.error["message"]
    assert (await grammar.chat("hi", tools=[ADD], structured_outputs={"regex": "a"})).status == 200


async def test_a_schema_that_can_not_be_held_to_is_the_tools_fault(grammar):
    odd = function(parameters={"properties": {"odd": {}}})
    choice = {"type": "function", "function": {"name": "f"}}
    answer = await grammar.chat("hi", tools=[odd], tool_choice=choice)
    assert (answer.status, answer.error["param"]) == (400, "tools.json.properties")
    assert "structured_outputs" not in answer.error["message"]


async def test_a_forced_call_that_the_prompt_would_begin_with_a_thought(serve):
    async with serve(template=THINK) as api:
        switch_on(api, Structured, off=("structured",))
        message, _ = await both(
            api,
            f'[{{"name": "add", "arguments": {ARGUMENTS}}}]',
            tools=[ADD],
            tool_choice="required",
            chat_template_kwargs={"think": "<think>"},
        )
        assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert "reasoning_content" not in message
