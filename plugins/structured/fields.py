"""`response_format` and `structured_outputs`: what they ask for, as one `Wish`. Shapes are checked quickly, contents in `source_of`."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ...core.errors import FieldError, shorten
from .compiler import Source
from .schema import checked_schema

FORMAT_KEYS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
"""Types of `response_format`, with the keys that may stand in it."""
KINDS = ("json", "regex", "choice", "grammar", "json_object")
"""Keys of `structured_outputs`."""

FORBIDDEN = {
    "%json": "its keywords would go unchecked; use structured_outputs.json",
    "%llguidance": "the library's options are the server's",
}
"""What may not stand in a grammar, and why."""


class Wish(NamedTuple):
    field: str
    """Where it stands: "response_format.json_schema.schema"."""
    kind: str
    """One of KINDS."""
    value: Any


def wish_of(fields: dict[str, Any]) -> Wish | None:
    """None: text of any form. FieldError when it is not exactly one wish of the right shape."""
    if len(fields) > 1:
        raise FieldError("structured_outputs", "can't be used together with response_format: write one of them")
    if "response_format" in fields:
        return _response_format(fields["response_format"])
    return _structured_outputs(fields["structured_outputs"])


def source_of(wish: Wish, max_chars: int, max_choices: int) -> Source:
    """What is to be compiled. Not quick: a schema is walked. FieldError says what is wrong, and where."""
    if wish.kind == "json_object":
        return Source("json", '{"type":"object"}')
    if wish.kind == "json":
        return Source("json", _schema_text(wish, max_chars))
    if wish.kind == "choice":
        return Source("lark", _choices(wish, max_chars, max_choices))
    text = _text(wish.field, wish.value, max_chars)
    for name, instead in FORBIDDEN.items():
        if wish.kind == "grammar" and name in text:
            raise FieldError(wish.field, f"{name!r} is not allowed: {instead}")
    return Source(wish.kind, text)


def _response_format(value: Any) -> Wish | None:
    field = "response_format"
    given = _object(field, value)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in FORMAT_KEYS:
        raise FieldError(f"{field}.type", f"must be one of {', '.join(FORMAT_KEYS)}, got {shorten(kind, 60)!r}")
    _only(field, given, FORMAT_KEYS[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return Wish(field, "json_object", True)
    inner = f"{field}.json_schema"
    schema = _object(inner, given.get("json_schema"))
    _only(inner, schema, {"name", "description", "schema", "strict"})
    for name in ("name", "description"):
        if schema.get(name) is not None and not isinstance(schema[name], str):
            raise FieldError(f"{inner}.{name}", "must be a string")
    if schema.get("strict") is not None and not isinstance(schema["strict"], bool):
        raise FieldError(f"{inner}.strict", "must be true or false; the schema is enforced either way")
    if "schema" not in schema:
        raise FieldError(f"{inner}.schema", "is missing: it is what the answer has to fit")
    return Wish(f"{inner}.schema", "json", _object(f"{inner}.schema", schema["schema"]))


def _structured_outputs(value: Any) -> Wish:
    field = "structured_outputs"
    given = _object(field, value)
    _only(field, given, set(KINDS))
    asked = [name for name, item in given.items() if item is not None and not (name == "json_object" and item is False)]
    if len(asked) != 1:
        got = ", ".join(asked) or "none"
        raise FieldError(field, f"must have exactly one of {', '.join(KINDS)}; got {got}")
    kind, item = asked[0], given[asked[0]]
    wanted: dict[str, type | tuple[type, ...]] = {"json_object": bool, "choice": (list, tuple), "json": (dict, str)}
    if not isinstance(item, wanted.get(kind, str)):
        words = {
            "json_object": "true or false",
            "choice": "a list of strings",
            "json": "a schema (an object, or its JSON text)",
        }
        raise FieldError(f"{field}.{kind}", f"must be {words.get(kind, 'a string')}, got {type(item).__name__}")
    return Wish(f"{field}.{kind}", kind, item)


def _schema_text(wish: Wish, max_chars: int) -> str:
    schema = wish.value
    if isinstance(schema, str):
        _text(wish.field, schema, max_chars)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise FieldError(wish.field, f"is not JSON: {type(error).__name__}: {shorten(error)}") from None
    try:
        return _text(wish.field, checked_schema(schema, wish.field, max_chars), max_chars)
    except (ValueError, TypeError, RecursionError, AttributeError) as error:  # what a Python caller may put into a dict
        raise FieldError(wish.field, f"is not JSON: {shorten(error)}") from None


def _choices(wish: Wish, max_chars: int, max_choices: int) -> str:
    choices = list(dict.fromkeys(wish.value)) if all(isinstance(item, str) for item in wish.value) else None
    if not choices or "" in choices:
        raise FieldError(wish.field, "must be a list of strings, none of them empty")
    if len(choices) > max_choices:
        raise FieldError(wish.field, f"has {len(choices)} choices, the limit is {max_choices}")
    return _text(wish.field, "start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in choices), max_chars)


def _text(field: str, text: str, max_chars: int) -> str:
    if not text:
        raise FieldError(field, "must not be empty")
    if len(text) > max_chars:
        raise FieldError(field, f"has {len(text)} characters, the limit is {max_chars}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise FieldError(field, "has half of a surrogate pair in it, which is no character") from None
    return text


def _object(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(field, f"must be an object, got {'null' if value is None else type(value).__name__}")
    return value


def _only(field: str, given: dict[str, Any], allowed: set[str]) -> None:
    for name, item in given.items():
        if name not in allowed and item is not None:
            raise FieldError(f"{field}.{shorten(name, 60)}", f"is unknown here; there are {', '.join(sorted(allowed))}")
