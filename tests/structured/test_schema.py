"""JSON schemas: what is enforced, on documents and on random texts from the masks; what is refused, and where it stands."""

from __future__ import annotations

import json
import time

import jsonschema
import pytest
import structured_kit as kit

from tokenbus.core.errors import FieldError
from tokenbus.plugins.structured.formats import FORMATS
from tokenbus.plugins.structured.schema import checked_schema

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def obj(**more):
    return {"type": "object", **more}


def words(**more):
    return {"type": "string", **more}


def array(**more):
    return {"type": "array", **more}


ENFORCED = [
    # schema, texts that fit, texts that don't
    (obj(), ["{}", '{"a":[1,null]}', '{"a": {"b": true}}'], ["[]", "1", '{"a":}', '{"a":1', " {}", "{} "]),
    (obj(properties={"a": INTEGER}, required=["a"]), ['{"a":1}', '{"a":1,"b":"x"}'], ["{}", '{"a":"x"}', '{"b":1}']),
    (obj(properties={"a": INTEGER}), ["{}", '{"b":"x"}'], ['{"\\u0061":"x"}', '{"a":1,"a":"x"}', '{"b":1,"a":"x"}']),
    (obj(properties={"a": INTEGER}, additionalProperties=False), ["{}", '{"a":-3}'], ['{"b":1}', '{"a":1.5}', '{"a":01}']),
    (obj(additionalProperties={"type": "boolean"}), ['{"x":true}'], ['{"x":1}']),
    (
        obj(patternProperties={"^x": INTEGER}, additionalProperties=False),
        ['{"xa":1}', "{}"],
        ['{"y":1}', '{"xa":"s"}', '{"\\u0078":1}'],
    ),
    (obj(properties={"b": INTEGER, "a": INTEGER}, required=["a", "b"], minProperties=2), ['{"b":1,"a":2}'], ['{"b":1}']),
    (obj(maxProperties=1), ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    (obj(properties={'é "q"': INTEGER}, required=['é "q"']), ['{"é \\"q\\"":1}'], ["{}"]),
    ({"enum": [1, "a", None, [1, 2], {"x": 1}]}, ["1", '"a"', "null", "[1, 2]", '{"x":1}'], ["2", '"b"', "[1]", "true"]),
    ({"const": {"a": [1, "é\n"]}}, ['{"a":[1,"é\\n"]}'], ['{"a":[1]}']),
    (words(enum=["a", "b", 3]), ['"a"'], ["3", '"c"']),
    ({"type": ["string", "null"], "maxLength": 2}, ["null", '"ab"'], ['"abc"', "1"]),
    (
        {"anyOf": [words(maxLength=2), {"type": "integer", "minimum": 3, "maximum": 17}]},
        ['"ab"', "3", "17"],
        ['"abc"', "2", "18"],
    ),
    ({"oneOf": [STRING, INTEGER]}, ['"a"', "1"], ["1.5", "null"]),
    ({"allOf": [words(minLength=2), {"maxLength": 3}]}, ['"ab"', '"abc"'], ['"a"', '"abcd"']),
    (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ['{"v":1,"next":{"v":2,"next":null}}'],
        ['{"v":1}', '{"v":1,"next":1}'],
    ),
    ({"$ref": "#/definitions/s", "definitions": {"s": STRING}, "maxLength": 1}, ['"a"'], ['"ab"', "1"]),
    (obj(properties={"a": INTEGER, "b": {"$ref": "#/properties/a"}}), ['{"b":1}'], ['{"b":"x"}']),
    (words(pattern="^a|b$"), ['"ax"', '"xb"'], ['"xx"']),
    (words(pattern="b+"), ['"abbc"', '"b"'], ['"ac"']),
    (words(pattern=r"^\d\w\s$"), ['"3_ "'], ['"٣a "', '"3é "']),
    (words(pattern='^["\\\\\n]$'), ['"\\""', '"\\\\"', '"\\n"'], ['"\n"', '"a"']),
    (words(pattern="^[a-z]+$", maxLength=3), ['"abc"'], ['"abcd"', '""', '"A"']),  # C44
    (words(minLength=1, maxLength=2), ['"é"', '"😀😀"', '"\\n\\n"'], ['""', '"😀😀😀"', '"\\n\\n\\n"', '"\\ud800"', '"\\x"']),
    ({"type": "integer", "minimum": -5, "maximum": 12}, ["-5", "0", "12"], ["-6", "13", "1.0", "1e1"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5}, ["4"], ["3", "5"]),
    ({"type": "number", "minimum": 0.5, "maximum": 1.25}, ["0.5", "1", "1.25"], ["0.4", "1.3", "-1"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "7"], ["0", "-0.1"]),
    ({"type": "integer", "multipleOf": 7, "minimum": 10}, ["14", "21"], ["7", "15"]),
    (array(items=INTEGER, minItems=2, maxItems=2), ["[1,2]", "[1, 2]"], ["[1]", "[1,2,3]", "[]", '[1,"a"]']),  # C44
    (array(items=array(items={"type": "boolean"}, maxItems=1)), ["[[true],[]]"], ["[[true,true]]", "[true]"]),
    (array(prefixItems=[INTEGER, STRING], items=False, minItems=2), ['[1,"a"]'], ["[1]", '[1,"a",1]', '["a",1]']),
    (words(format="date"), ['"2024-02-29"', '"2023-12-31"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"', '"2023-13-01"']),
    (
        words(format="date-time"),
        ['"2023-01-01T23:59:59.5+01:00"'],
        ['"2023-01-01T24:00:00Z"', '"2023-01-01"', '"2023-01-01T00:00:60Z"'],
    ),
    (words(format="time", maxLength=9), ['"12:00:00Z"'], ['"12:00:00+01:00"', '"12:00:00"']),
    (words(format="uuid"), ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0123"']),
    (words(format="ipv4"), ['"1.2.3.255"'], ['"1.2.3.256"', '"1.2.3"']),
    (words(format="ipv6"), ['"::1"'], ['"::1::"']),
    (words(format="email"), ['"a@b.de"'], ['"a"']),
    (words(format="hostname", maxLength=4), ['"a.de"'], ['"-a"', '"ab.de"', '"a--b"']),
    (
        {"type": "object", "title": "t", "description": "d", "default": {}, "examples": [1], "x-ours": 1, "$comment": "c"},
        ["{}"],
        ["1"],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "k"},
            "$defs": {
                "a": obj(properties={"k": {"const": "a"}, "x": INTEGER}, required=["k", "x"]),
                "b": obj(properties={"k": {"enum": ["b", "c"]}, "y": STRING}, required=["k", "y"]),
            },
        },
        ['{"k":"a","x":1}', '{"k":"c","y":"s"}'],
        ['{"k":"a","y":"s"}', '{"k":"d"}', '{"x":1}'],
    ),
    (array(items=True, uniqueItems=False), ["[1,1]"], ["1"]),
]


@pytest.mark.parametrize(
    ("schema", "good", "bad"), ENFORCED, ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else ""
)
def test_enforced(schema, good, bad):
    state = kit.progress("json", schema)
    assert [text for text in good if not kit.fits(state, text)] == []
    assert [text for text in bad if kit.fits(state, text)] == []
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in good:
        validator.validate(json.loads(text))
    drawn = [text for seed in range(12) if (text := kit.draw(state, seed)) is not None]
    for text in drawn:
        validator.validate(json.loads(text))


def test_random_texts_do_end():
    state = kit.progress("json", obj(properties={"a": INTEGER, "b": STRING}, required=["a", "b"]))
    drawn = [text for seed in range(12) if (text := kit.draw(state, seed)) is not None]
    assert len(drawn) >= 6
    assert all({"a", "b"} <= json.loads(text).keys() for text in drawn)


def test_white_space_is_bounded():
    """C45."""
    state = kit.progress("json", obj(properties={"a": INTEGER, "b": INTEGER}, required=["a", "b"]))
    for text in ('{"a": 1,\n  "b" : 2}', '{\n        "a":1,"b":2 }'):
        assert kit.fits(state, text)
    for text in ('{"a":  1,"b":2}', '{"a":1,\n\n"b":2}', '{\n         "a":1,"b":2}', '{"a":\t1,"b":2}', '{"a":1,"b":2} '):
        assert not kit.fits(state, text)


def test_every_format_compiles():
    for name in FORMATS:
        assert kit.library_form("json", words(format=name)), name


DEEP: dict = {}
for _ in range(140):
    DEEP = {"items": DEEP}

REFUSED = [
    # schema, where
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    (obj(properties={"a": array(items={"contains": INTEGER})}), "properties.a.items.contains"),
    ({"not": STRING}, "not"),
    ({"if": STRING, "then": {"maxLength": 2}}, "if"),
    (obj(propertyNames={"pattern": "a"}), "propertyNames"),
    (obj(dependentRequired={"a": ["b"]}), "dependentRequired"),
    (obj(unevaluatedProperties=False), "unevaluatedProperties"),
    ({"anyOf": [STRING, {"type": "string", "contentEncoding": "base64"}]}, "anyOf.1.contentEncoding"),
    ({"$defs": {"a": {"strange": 1}}}, "$defs.a.strange"),
    (words(nullable=True), "nullable"),
    ({"x-guidance": {"lenient": True}}, "x-guidance"),
    (obj(properties={"a": {"$id": "http://example.com/"}}), "properties.a.$id"),
    (obj(minProperties=1), "minProperties"),
    (array(items=[INTEGER]), "items"),
    ({"type": "strange"}, "type"),
    ({"type": []}, "type"),
    ({"enum": []}, "enum"),
    ({"enum": ["a\x01"]}, "enum"),
    ({"const": "\x7f"}, "const"),
    ({"const": 2**60}, "const"),
    (words(minLength="2"), "minLength"),
    (words(maxLength=-1), "maxLength"),
    (words(maxLength=True), "maxLength"),
    ({"minimum": "1"}, "minimum"),
    ({"minimum": float("nan")}, "minimum"),
    ({"type": "integer", "minimum": 2, "exclusiveMinimum": True}, "exclusiveMinimum"),
    ({"multipleOf": 0}, "multipleOf"),
    (obj(required="a"), "required"),
    (obj(properties=[1]), "properties"),
    (obj(properties={"a": 1}), "properties.a"),
    ({"anyOf": []}, "anyOf"),
    ({"anyOf": {}}, "anyOf"),
    (words(pattern=1), "pattern"),
    (words(format="madeup"), "format"),
    (words(format="unknown"), "format"),
    (words(format=3), "format"),
    ({"$ref": "http://example.com/x"}, "$ref"),
    ({"$ref": "other.json"}, "$ref"),
    ({"$ref": "#/$defs/none"}, "$ref"),
    ({"default": {"strange": 1}, "$ref": "#/default"}, "$ref"),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
    ({"minimum": -1.5, "exclusiveMaximum": -1}, "exclusiveMaximum"),
    ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ""),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"exclusiveMinimum": 0}}, "maximum": 0.5}, ""),
    ({"exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, STRING]}, ""),
    (DEEP, ""),
]


@pytest.mark.parametrize(
    ("schema", "where"), REFUSED, ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60]
)
def test_refused_by_name(schema, where):
    with pytest.raises(FieldError) as refused:
        kit.library_form("json", schema)
    assert refused.value.param == ".".join(filter(None, ("structured_outputs.json", where)))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (words(pattern="("), "unclosed group"),
        (words(pattern="(?=a)b"), "look-around"),
        (words(pattern=r"^(a)\1$"), "backreferences"),
        (words(format="uuid", maxLength=5), "Unsatisfiable"),  # C44
        (words(minLength=3, maxLength=2), "minLength"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "minimum"),
        (array(minItems=3, maxItems=2), "minItems"),
        (obj(properties={"a": False}, required=["a"]), "required property 'a'"),
        ({"oneOf": [{"type": "number"}, INTEGER]}, "write 'anyOf'"),
        (
            {"oneOf": [obj(properties={"k": {"const": "a"}}), obj(properties={"k": {"const": "b"}})]},
            "write 'anyOf'",
        ),
        (obj(patternProperties={"^x": INTEGER, "a$": STRING}), "not disjoint"),
        (obj(properties={"a": INTEGER, "b": INTEGER}, maxProperties=1), "maxProperties"),
        ({"$ref": "#"}, "nothing satisfies it"),
    ],
    ids=str,
)
def test_refused_by_the_library(schema, says):
    with pytest.raises(ValueError, match=says):
        kit.library_form("json", schema)


def test_huge_schemas_are_refused_before_they_cost_time():
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {"exclusiveMinimum": 0}}
    many = {"enum": [1] * 200_000}
    for schema, words in ((many, "is too large"), ({"$ref": "#/$defs/d0", "$defs": chain}, "has too many references")):
        started = time.process_time()
        with pytest.raises(FieldError, match=words):
            checked_schema(schema, "x")
        assert time.process_time() - started < 2
