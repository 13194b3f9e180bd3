"""The two request fields: their shapes, what they become, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import structured_kit as kit

from tokenbus.core.errors import FieldError
from tokenbus.plugins.structured import Structured, StructuredSettings


@pytest.fixture(scope="module")
def plugin():
    made = Structured(StructuredSettings(max_chars=300, max_choices=3), "front")
    yield made
    made.front_stopped()


def handed_on(plugin, context=kit.CONTEXT, **fields):
    checked = plugin.check_fields(fields, context)
    fields = fields if checked is None else checked
    prepared = plugin.prepare_fields(fields, context)
    return fields if prepared is None else prepared


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "description": None}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": '{"type": "object"}'}},
        {"structured_outputs": {"json_object": True, "regex": None}},
        {"structured_outputs": {"regex": r"\d+/[a-z]", "json_object": False}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
    ],
    ids=str,
)
def test_accepted(plugin, fields):
    (name,) = fields
    assert handed_on(plugin, **fields).keys() == {name}
    assert isinstance(handed_on(plugin, **fields)[name]["grammar"], str)


def test_text_asks_for_nothing(plugin):
    assert handed_on(plugin, response_format={"type": "text", "json_schema": None}) == {}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": ["text"]}}, "response_format.type"),
        ({"response_format": {"type": "text", "more": 1}}, "response_format.more"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": True}}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}}, "response_format.json_schema.x"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "x" * 301}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'start: %json {"uniqueItems": true}'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": '{"grammars": [{"json_schema": {}}]}'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", ["b"]]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", "b", "c", "d"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 290}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": ["x" * 300]}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"enum": ["\ud800"]}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {1: 2}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"const": {1, 2}}}}, "structured_outputs.json.const"),
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_refused(plugin, fields, param):
    with pytest.raises(FieldError) as refused:
        handed_on(plugin, **fields)
    assert refused.value.param == param
    assert len(refused.value.message) < 800


def test_choices_are_taken_letter_by_letter(plugin):
    choices = ['a"b\\', "é😀\n\x01", "<end>"]
    state = kit.Progress(kit.SHARED, handed_on(plugin, structured_outputs={"choice": choices})["structured_outputs"]["grammar"])
    assert all(kit.fits(state, choice) for choice in choices)
    assert not any(kit.fits(state, text) for text in ("", "<", 'a"b'))


def test_models_that_cant_be_constrained(plugin):
    wish = {"structured_outputs": {"regex": "a"}}
    with pytest.raises(FieldError, match="no end token"):
        handed_on(plugin, replace(kit.CONTEXT, eos_token_ids=()), **wish)
    guessed = replace(kit.VOCABULARY, exact=False)
    with pytest.raises(FieldError, match="without fixed bytes"):
        handed_on(plugin, replace(kit.CONTEXT, vocabulary=lambda: guessed), **wish)
