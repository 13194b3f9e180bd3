"""Rows of the case book about speculation, tools and structured output: a demo server with proposers on, and a template with tools."""

from __future__ import annotations

import json

import anyio
import jsonschema
import pytest
from tools_kit import ADD, BODY, HERMES, joined

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 3, "maxLength": 12}, "days": {"enum": [1, 3, 7]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}
LIST = '[{"id": 1, "name": "ann"}, {"id": 2, "name": "bob"}, {"id": 3, "name": "cid"}]'
PROPOSERS = ("speculative.ngram", "speculative.suffix")


@pytest.fixture(scope="module")
def server(serve_demo, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(HERMES + BODY)
    flags = [flag for name in PROPOSERS for flag in ("--enable", name, "--plugin-setting", f"{name}.adaptive=false")]
    with serve_demo("--chat-template", str(template), *flags) as made:
        yield made


@pytest.fixture
async def api(server, client_of):
    client = client_of(server)
    yield client
    await client.check_well()


async def counted(api, name: str) -> float:
    async with api.session.get(api.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if f'_total{{name="{name}"' in line)


def shown(answer):
    return answer.text, answer.choice["finish_reason"], answer.choice["logprobs"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.3, "seed": 9}])
@pytest.mark.parametrize(
    "prompt",
    [
        " ".join(["word"] * 48),
        f"Copy the list: {LIST}\nCopy: {LIST[:38]}",
    ],
    ids=["one word", "a list"],
)
async def test_c33_speculation_on_repeated_text(api, prompt, sampling):
    body = {"prompt": prompt, "max_tokens": 32, "logprobs": 2, **sampling}
    off = await api.complete(**body, tokenbus={"features": dict.fromkeys(PROPOSERS, False)})
    for on in (PROPOSERS[:1], PROPOSERS[1:], PROPOSERS):
        before = [await counted(api, f"{name}.accepted_tokens") for name in PROPOSERS]
        drafted = await api.complete(**body, tokenbus={"features": {name: name in on for name in PROPOSERS}})
        assert shown(drafted) == shown(off)
        after = [await counted(api, f"{name}.accepted_tokens") for name in PROPOSERS]
        assert after[PROPOSERS.index(on[0])] > before[PROPOSERS.index(on[0])], "nothing was accepted"


async def test_c33_c37_a_stop_string_inside_accepted_drafts(api):
    body = {"prompt": "1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2,", "max_tokens": 32, "temperature": 0, "stop": [", 6"]}
    off = await api.complete(**body, tokenbus={"features": dict.fromkeys(PROPOSERS, False)})
    on = await api.complete(**body)
    events = await api.stream_completion(**body)
    assert off.text == on.text == events.text() == " 3, 4, 5"
    assert on.choice["stop_reason"] == ", 6"
    assert on.body["usage"]["completion_tokens"] == off.body["usage"]["completion_tokens"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_c43_forced_calls_whole_and_cut(api, choice):
    body = {"tools": [ADD, WEATHER], "tool_choice": choice, "temperature": 0.8, "seed": 3}
    whole = await api.chat("Weather in Paris?", **body, parallel_tool_calls=False, max_tokens=120)
    assert whole.choice["finish_reason"] == "tool_calls"
    (call,) = whole.choice["message"]["tool_calls"]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (ADD, WEATHER)}
    jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])
    assert choice == "required" or call["function"]["name"] == "weather"
    events = await api.stream_chat("Weather in Paris?", **body, parallel_tool_calls=False, max_tokens=120)
    assert joined(events)["tool_calls"][0]["function"] == call["function"]
    assert events.reasons()[-1] == "tool_calls"
    cut = await api.chat("Weather in Paris?", **body, max_tokens=5)
    assert (cut.status, cut.choice["finish_reason"]) == (200, "length")
    assert cut.body["usage"]["completion_tokens"] == 5
    written = cut.choice["message"].get("tool_calls") or []
    assert all(call["function"]["arguments"] != "" or choice == "required" for call in written)


async def test_c46_a_grammar_that_does_not_compile(api):
    bad = {"type": "string", "pattern": "("}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": bad, "strict": True}}},
        {"structured_outputs": {"regex": "("}},
    ):
        answer = await api.chat("hi", **fields)
        assert (answer.status, answer.error["plugin"]) == (400, "structured")
        assert "unclosed" in answer.error["message"]
    answer = await api.chat(
        "hi", tools=[{**ADD, "function": {"name": "f", "parameters": {"properties": {"a": bad}}}}], tool_choice="required"
    )
    assert (answer.status, answer.error["param"].split(".")[0]) == (400, "tools")


async def test_c51_a_regex_that_explodes(api):
    """Counted groups in one another, five deep: states are made as an answer needs them, so it is taken, and its answer ends where there
    are too many; others with the same one don't. What is multiplied out as it is compiled is refused for the time that takes. A stream
    beside them goes on."""
    explodes = "a"
    for _ in range(5):
        explodes = f"({explodes}b?){{1,200}}"
    choices = [{"anyOf": [_only(f"a{i}"), _only(f"b{i}")]} for i in range(12)]
    plain = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = (await api.stream_completion("1, 2, 3,", **plain)).text()
    found = []

    async def follow():
        found.append((await api.stream_completion("1, 2, 3,", **plain)).text())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        long = await api.complete("x", structured_outputs={"regex": explodes}, max_tokens=60, temperature=0)
        assert (long.status, long.error["plugin"]) == (400, "structured")
        assert "too complex" in long.error["message"]
        short = await api.complete("x", structured_outputs={"regex": explodes}, max_tokens=1)
        assert short.text[0] == "a"
        answer = await api.complete("x", structured_outputs={"json": {"allOf": choices}})
        assert (answer.status, answer.error["param"]) == (400, "structured_outputs.json")
    assert found == [alone]


def _only(name):
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
