"""What the parsers make of a text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenbus
from tokenbus.core.contexts import ParserContext
from tokenbus.core.host import PluginHost
from tokenbus.core.output import CallArguments, CallEnd, CallStart, Content, Reasoning
from tokenbus.plugins.tools import Tools, forced, hermes, llama3_json, mistral
from tokenbus.plugins.tools.auto import Auto
from tokenbus.plugins.tools.reasoning import ReasoningContent, ThinkParser


def context(**over: Any) -> ParserContext:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g.h")]
    values = {"request_id": "r-1", "choice": 0, "fields": {}, "tools": tools, "chat_template": "", "added_tokens": frozenset()}
    return ParserContext(**{**values, "prompt_end": "", **over})


MAKE: dict[str, Any] = {
    "hermes": hermes.HermesParser,
    "llama": lambda: llama3_json.Llama3Parser(context()),
    "mistral": lambda: mistral.MistralParser(context()),
    "list": lambda: forced.forced_parser(None),
    "named": lambda: forced.forced_parser("f"),
    "think": lambda: ThinkParser(open_already=False),
    "open": lambda: ThinkParser(open_already=True),
}


def read(kind: str, pieces: list[str]) -> list[Any]:
    """Events, neighbours of one kind joined; calls as ("call", name, arguments, complete)."""
    parser = MAKE[kind]()
    events: list[Any] = []
    for piece in pieces:
        events += parser.feed(piece, final=False)
    events += parser.feed("", final=True)
    found: list[Any] = []
    for event in events:
        match event:
            case Content(text) | Reasoning(text):
                name = "content" if isinstance(event, Content) else "reasoning"
                assert text
                if found and found[-1][0] == name:
                    found[-1] = (name, found[-1][1] + text)
                else:
                    found.append((name, text))
            case CallStart(name, call_id):
                assert kind != "mistral" or (len(call_id) == 9 and set(call_id) <= set(string.ascii_letters + string.digits))
                found.append(["call", name, "", False])
            case CallArguments(text):
                assert found[-1][0] == "call"
                assert not found[-1][3]
                found[-1][2] += text
            case CallEnd():
                found[-1][3] = True
    return [tuple(entry) for entry in found]


def text(words: str) -> tuple[str, str]:
    return ("content", words)


def call(name: str, arguments: str, *, whole: bool = True) -> tuple[Any, ...]:
    return ("call", name, arguments, whole)


def tag(inner: str) -> str:
    return f"<tool_call>{inner}</tool_call>"


A = '{"name": "f", "arguments": {"a": [1, {"b": "}"}], "c": "\\"é"}}'
IN_A = '{"a": [1, {"b": "}"}], "c": "\\"é"}'
B = '{"name": "f", "parameters": {"a": -1.5e+3}}'
CASES: list[tuple[str, str, list[Any]]] = [
    ("hermes", "no call at all", [text("no call at all")]),
    ("hermes", " spaces stay \n", [text(" spaces stay \n")]),
    ("hermes", tag(A), [call("f", IN_A)]),
    ("hermes", f"I look.\n\n{tag(chr(10) + A + chr(10))}\n", [text("I look."), call("f", IN_A)]),
    ("hermes", tag(A) + "\n" + tag(B), [call("f", IN_A), call("f", '{"a": -1.5e+3}')]),
    ("hermes", tag(A) + " done ", [call("f", IN_A), text("done ")]),
    ("hermes", tag('{"arguments": {}, "name": "other"}'), [call("other", "{}")]),
    ("hermes", tag('{"name": "f"}'), [call("f", "{}")]),
    ("hermes", tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'), [call("f", '{"a": 1}')]),
    ("hermes", tag('{"type": "function", "name": "f", "arguments": {}, "id": "x"}'), [call("f", "{}")]),
    ("hermes", tag('{"name": "f", "arguments": {"a": "x\ny"}}'), [call("f", '{"a": "x\\ny"}')]),
    ("hermes", "<tool_call>" + A, [call("f", IN_A)]),
    ("hermes", "<tool_call>" + A + "</tool", [call("f", IN_A)]),
    ("hermes", "<tool_call>" + A[:-1], [call("f", IN_A)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1', [call("f", '{"a": [1', whole=False)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}', [call("f", '{"a": 0', whole=False), text("1}}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "odd": 1}', [call("f", "{}"), text(', "odd": 1}')]),
    ("hermes", "a < b <tool", [text("a < b <tool")]),
    ("hermes", "<<tool_call>" + A, [text("<"), call("f", IN_A)]),
    ("hermes", "<tool_call><tool_call>" + A, [text("<tool_call>"), call("f", IN_A)]),
    *[
        ("hermes", broken, [text(broken)])
        for broken in (
            "<tool_call> words </tool_call>",
            '  <tool_call>{"name": 5, "arguments": {}}</tool_call>',
            tag('{"name": "", "arguments": {}}'),
            tag('{"name": "\\ud800", "arguments": {}}'),
            tag('{"name": "f", "arguments": [1]}'),
            tag('{"name": "f", "arguments": "no object"}'),
            tag('{"other": "f", "arguments": {}}'),
            tag('{"arguments": {"a": 1}}'),
            tag("{}"),
            tag('{"name" "f"}'),
            '<tool_call>{"na',
            tag('{"name": "f\\x"}'),
        )
    ],
    ("llama", B, [call("f", '{"a": -1.5e+3}')]),
    ("llama", f" <|python_tag|> {B}", [call("f", '{"a": -1.5e+3}')]),
    ("llama", f"{B}; {B}\n{B}", [call("f", '{"a": -1.5e+3}')] * 3),
    ("llama", f"{B} and so", [call("f", '{"a": -1.5e+3}'), text("and so")]),
    ("llama", f"{B};; x", [call("f", '{"a": -1.5e+3}'), text(";; x")]),
    ("llama", f"I call <|python_tag|>{B}", [text("I call"), call("f", '{"a": -1.5e+3}')]),
    *[
        ("llama", answer, [text(answer)])
        for answer in (
            '{"name": "Bob", "parameters": {"age": 5}}',
            '{"name": "f"}',
            '{"answer": 42}',
            f"The call {B} is what I would write",
            ' <|python_tag|>brave_search.call(query="x")',
            "",
        )
        if answer
    ],
    ("mistral", f"[TOOL_CALLS][{A}, {B}]", [call("f", IN_A), call("f", '{"a": -1.5e+3}')]),
    ("mistral", f"Yes. [TOOL_CALLS] [{A}]", [text("Yes."), call("f", IN_A)]),
    ("mistral", f"[TOOL_CALLS][{A}, 5]", [call("f", IN_A), text(", 5]")]),
    ("mistral", f"[TOOL_CALLS][{A}", [call("f", IN_A)]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g.h[ARGS] {}', [call("f", '{"a": 1}'), call("g.h", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcDEF123[ARGS]{"a": 1}', [call("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1', [call("f", '{"a": 1', whole=False)]),
    *[
        ("mistral", broken, [text(broken)])
        for broken in (
            "[TOOL_CALLS]f[ARGS]x", "[TOOL_CALLS]f [ARGS]{}", "[TOOL_CALLS][1]", "[TOOL_CALLS][]", "[TOOL_CALLS]", "[1] [TOOL",
            "[TOOL_CALLS]{}",
        )
    ],
    ("list", f"[{A}, {B}]", [call("f", IN_A), call("f", '{"a": -1.5e+3}')]),
    ("list", '[{"name": "f", "arguments": {"a"', [call("f", '{"a"', whole=False)]),
    ("list", "words", [text("words")]),
    ("list", '[{"name": "f', [text('[{"name": "f')]),
    ("named", ' {"a": 1}\n', [call("f", '{"a": 1}')]),
    ("named", '{"a": ', [call("f", '{"a": ', whole=False)]),
    ("named", "words", [text("words")]),
    ("think", "<think>\nso\n\nit is\n</think>\n\nYes", [("reasoning", "so\n\nit is"), text("Yes")]),
    ("think", "\n<think>\n\n</think>\n\nYes ", [text("Yes ")]),
    ("think", "<think>cut off", [("reasoning", "cut off")]),
    ("think", " No <think>tag</think> here", [text(" No <think>tag</think> here")]),
    ("think", "<thin", [text("<thin")]),
    ("think", "<think>a</think>b<think>c</think>", [("reasoning", "a"), text("b<think>c</think>")]),
    ("open", "so </thinkk></think> Yes", [("reasoning", "so </thinkk>"), text("Yes")]),
    ("open", "never closed </thi", [("reasoning", "never closed </thi")]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "given_text", "expected"), CASES)
def test_texts(kind, given_text, expected):
    assert read(kind, [given_text]) == expected
    assert read(kind, list(given_text)) == expected
    for at in range(len(given_text)):
        assert read(kind, [given_text[:at], given_text[at:]]) == expected
    for entry in expected:
        if entry[0] == "call" and entry[3]:
            assert isinstance(json.loads(entry[2]), dict)


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>", "</think>", A, B, "{", "}", "[", "]",
    ",", ":", '"', "\\", '"name"', '"arguments"', '{"name": "f", "arguments": ', '"f"', "f", " ", "\n", ";", "1", "-", "true", "é",
    "<", "\0",
]  # fmt: skip
SOUP = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)


@pytest.mark.parametrize("kind", MAKE)
@given(soup=SOUP, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_text_cut_anywhere(kind, soup, cuts):
    whole = read(kind, [soup])
    borders = [0, *sorted(min(cut, len(soup)) for cut in cuts), len(soup)]
    assert read(kind, [soup[a:b] for a, b in itertools.pairwise(borders)]) == whole
    if not any(entry[0] in ("call", "reasoning") for entry in whole) and kind not in ("think", "open"):
        assert "".join(entry[1] for entry in whole) == soup
    for entry in whole:
        if entry[0] == "call" and entry[3]:
            json.loads(entry[2])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ),
    st.booleans(),
)
def test_all_of_json_is_passed_on_as_it_is(value, ascii_only):
    arguments = json.dumps({"a": value}, ensure_ascii=ascii_only, indent=1)
    wrapped = tag('{"name": "f", "arguments": ' + arguments + "}")
    assert read("hermes", list(wrapped)) == [call("f", arguments)]


def test_arguments_come_as_they_are_written():
    parser = hermes.HermesParser()
    assert parser.feed('x <tool_call>{"name": "f"', final=False) == [Content("x")]
    assert parser.feed(', "arguments": {"a', final=False) == [CallStart("f"), CallArguments('{"a')]
    assert parser.feed('": 1', final=False) == [CallArguments('": 1')]
    assert parser.feed("}", final=False) == [CallArguments("}"), CallEnd()]


def test_deep_nesting_needs_no_stack():
    deep = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    assert read("hermes", [tag('{"name": "f", "arguments": ' + deep + "}")]) == [call("f", deep)]


def test_call_ids_differ_and_are_the_same_when_an_answer_is_made_again():
    def ids(request_id: str) -> list[str]:
        parser = mistral.MistralParser(context(request_id=request_id))
        events = parser.feed(f"[TOOL_CALLS][{A}, {A}]", final=True)
        return [event.call_id for event in events if isinstance(event, CallStart) and event.call_id]

    assert len({*ids("r-1"), *ids("r-2")}) == 4
    assert ids("r-1") == ids("r-1")


# ---- which parser ---------------------------------------------------------------------------------------------------------------

QWEN = r"""{{- "<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}"""
LLAMA = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}"""
GLM = """{{ '<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>' }}{% set _args = tc.arguments %}"""
CODER = """{{ '<tool_call>\n<function=example_function_name>\n' }}{# "name": "arguments": #}"""


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (QWEN, (), hermes.HermesParser),
        (LLAMA, ("<|python_tag|>",), llama3_json.Llama3Parser),
        ("{{ '[TOOL_CALLS]' }}", ("[TOOL_CALLS]",), mistral.MistralParser),
        (LLAMA, (), None),
        (GLM, (), None),
        (CODER, (), None),
        ("{{ messages }}", ("<|python_tag|>", "[TOOL_CALLS]"), None),
    ],
)
def test_the_parser_is_told_from_the_template_or_not_at_all(template, tokens, expected):
    made = Auto(SimpleNamespace(), "front").tool_parser(context(chat_template=template, added_tokens=frozenset(tokens)))
    assert (None if made is None else type(made)) is expected


@pytest.mark.parametrize("plugin", [hermes.Hermes, llama3_json.Llama3Json, mistral.Mistral])
def test_a_parser_that_was_chosen_asks_nothing(plugin):
    parser = plugin(SimpleNamespace(), "front").tool_parser(context())
    assert parser.feed("x", final=True) == [Content("x")]


@pytest.mark.parametrize(
    ("template", "tokens", "end", "expected"),
    [
        ("", (), "<think>\n", None),
        ("a </think> b", (), "assistant\n", "answer"),
        ("", ("</think>",), "assistant\n<think>\n", "thought"),
        ("", ("</think>",), "assistant\n<think>\n\n</think>\n\n", "answer"),
    ],
)
def test_reasoning_begins_where_the_prompt_says(template, tokens, end, expected):
    made = ReasoningContent(SimpleNamespace(), "front").reasoning_parser(
        context(chat_template=template, added_tokens=frozenset(tokens), prompt_end=end)
    )
    held = context(fields={"structured_outputs": {}}, added_tokens=frozenset({"</think>"}))
    assert ReasoningContent(SimpleNamespace(), "front").reasoning_parser(held) is None
    found = None if made is None else made.feed("x</think>", final=True)
    assert found == {None: None, "answer": [Content("x</think>")], "thought": [Reasoning("x")]}[expected]


# ---- forced calls ---------------------------------------------------------------------------------------------------------------


def test_schema_of_forced_calls():
    one = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    }
    two = {"type": "function", "function": {"name": "g"}}
    arguments = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert forced.forced_schema([one, two], "f", parallel=True) == arguments
    schema = forced.forced_schema([one, two], None, parallel=False)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    first, second = schema["items"]["anyOf"]
    assert first["properties"] == {"name": {"const": "f"}, "arguments": arguments}
    assert second["properties"]["arguments"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert first["required"] == ["name", "arguments"]
    alone = forced.forced_schema([one], None, parallel=True)
    assert "maxItems" not in alone
    assert alone["items"] == first


def test_references_inside_a_tools_schema_are_found_where_the_schema_stands():
    tree = {
        "$defs": {"T": {"items": {"$ref": "#/$defs/T"}}},
        "properties": {"t": {"$ref": "#/$defs/T"}, "self": [{"$ref": "#"}]},
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": tree}} for name in ("f", "g")]
    for offered in (tools, tools[:1]):
        schema = forced.forced_schema(offered, None, parallel=True)
        variants = schema["items"].get("anyOf") or [schema["items"]]
        for variant in variants:
            reference = variant["properties"]["arguments"]["properties"]["t"]["$ref"]
            found: Any = schema
            for step in reference.removeprefix("#/").split("/"):
                found = found[int(step)] if isinstance(found, list) else found[step]
            assert found["items"]["$ref"] == reference
            assert variant["properties"]["arguments"]["properties"]["self"][0]["$ref"] + "/$defs/T" == reference
    assert forced.forced_schema(tools, "f", parallel=True)["properties"]["t"] == {"$ref": "#/$defs/T"}


# ---- the example of the documentation -------------------------------------------------------------------------------------------


def test_the_documented_parser_does_what_it_says():
    page = (Path(tokenbus.__file__).parent / "docs" / "tools.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], names)
    host = PluginHost("front")
    host.add(Tools)
    host.add(names["Shell"])
    host.load(host.start_switches(["tools", "tools.shell"]).on)
    (_, impl) = host.table(frozenset({"tools", "tools.shell"}), {"tools"}).tool_parser
    assert impl.plugin == "tools.shell"
    for pieces in (["so\n$ ls\nthen"], list("so\n$ ls\nthen")):
        parser = impl(request=context())
        events = [event for piece in pieces for event in parser.feed(piece, final=False)] + parser.feed("", final=True)
        assert events == [Content("so\n"), CallStart("ls"), CallArguments("{}"), CallEnd(), Content("then")]
