"""JSON schemas before they go to the grammar library: each keyword is enforced, is known to ask nothing, or is refused by name.

The library ignores keywords that it doesn't know, and a few rules that it does know it can't keep: those are refused here, so that an
answer that ended by itself always fits its schema. What is handed on has the same structure, without annotations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from ...core.errors import FieldError, shorten
from .formats import FORMATS

ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "$comment", "$schema", "deprecated", "readOnly", "writeOnly", "discriminator",
})  # fmt: skip
"""They ask nothing of an answer. So does every keyword that begins with "x-", but the library's own "x-guidance"."""
MAX_DEPTH = 64
"""Schemas, and values of `enum` and `const`, inside each other."""
EXACT = 2**53
"""Numbers up to here are exact in the library's arithmetic."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

Schema = dict[str, Any]
Pointer = tuple[str, ...]


def checked_schema(schema: Any, field: str, max_parts: int = 65536) -> str:
    """The schema as JSON text for the library. FieldError that names the keyword and where it stands, from `field` on.

    max_parts: keywords and values in it at most; what has more is refused before time is spent on it."""
    return _Checker(schema, field, max_parts).text()


class _Checker:
    def __init__(self, schema: Any, field: str, max_parts: int) -> None:
        self._root = schema
        self._field = field
        self._parts_left = max_parts
        self._steps_left = max_parts
        """For following references."""
        self._exclusive = False
        """Exclusive bounds stand somewhere in it."""
        self._seen: set[Pointer] = set()
        """Where schemas stand."""
        self._references: dict[Pointer, Pointer] = {}
        """Where it stands -> what it points to."""

    def text(self) -> str:
        if not isinstance(self._root, dict):
            raise FieldError(self._field, f"must be an object, got {_kind(self._root)}")
        made = self._schema(self._root, ())
        for where, target in self._references.items():
            if target not in self._seen:
                raise self._wrong((*where, "$ref"), f"there is no schema at #/{'/'.join(target)}")
        for where in self._seen if self._exclusive else ():
            self._check_conjunctions(where)
        for node, where in [(_at(made, where), where) for where in self._seen]:  # found first: what follows moves them
            self._alternatives(node, where)
        return json.dumps(made, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    def _wrong(self, where: Pointer, reason: str) -> FieldError:
        return FieldError(".".join((self._field, *where)), reason)

    def _count(self) -> None:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise FieldError(self._field, "is too large")

    # ---- one schema -------------------------------------------------------------------------------------------------------------

    def _schema(self, schema: Any, where: Pointer) -> Any:
        if len(where) > 2 * MAX_DEPTH:
            raise FieldError(self._field, f"schemas are nested more than {MAX_DEPTH} levels deep")
        self._seen.add(where)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._wrong(where, f"must be a schema (an object, true or false), got {_kind(schema)}")
        made: Schema = {}
        for keyword, value in schema.items():
            self._count()
            at = (*where, str(keyword))
            if keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword != "x-guidance"):
                continue
            if keyword == "$id" and not where:
                continue
            check = KEYWORDS.get(keyword)
            if check is None:
                raise self._wrong(at, "can't be enforced: this keyword is not supported")
            made[keyword] = check(self, value, at)
        self._finish(made, where)
        return made

    def _finish(self, made: Schema, where: Pointer) -> None:
        """What concerns several keywords of one schema."""
        if made.pop("uniqueItems", False):
            raise self._wrong((*where, "uniqueItems"), "can't be enforced")
        least = made.pop("minProperties", 0)
        if least > len(made.get("required", ())):  # names may come twice, so only required ones can be counted
            raise self._wrong((*where, "minProperties"), "can't be enforced beyond the number of required properties")
        rules = FORMATS.get(made.get("format", ""), {})
        if rules:
            del made["format"]
            made["allOf"] = [*made.get("allOf", ()), rules]

    def _alternatives(self, made: Any, where: Pointer) -> None:
        """Make `oneOf` an `anyOf` where a property tells its alternatives apart: the library does not look for it behind references."""
        if not isinstance(made, dict) or "oneOf" not in made or "anyOf" in made:
            return
        inside = (*where, "oneOf")
        if any(target[: len(inside)] == inside for target in self._references.values()):
            return
        found = [self._tags((*inside, str(index))) for index in range(len(made["oneOf"]))]
        for name, first in found[0].items():
            sets = [first, *(tags[name] for tags in found[1:] if name in tags)]
            if len(sets) == len(found) and len(frozenset().union(*sets)) == sum(map(len, sets)):
                made["anyOf"] = made.pop("oneOf")
                return

    def _tags(self, where: Pointer) -> dict[str, frozenset[str]]:
        """Of an object's required properties those that must be one of some strings, with the strings."""
        schema = self._at(self._references.get(where, where))
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return {}
        tags = {}
        for name in schema.get("required", ()):
            rule = schema.get("properties", {}).get(name)
            values = (rule.get("enum", [rule.get("const")]) if isinstance(rule, dict) else None) or [None]
            if all(isinstance(value, str) for value in values):
                tags[name] = frozenset(values)
        return tags

    # ---- keywords ---------------------------------------------------------------------------------------------------------------

    def one(self, value: Any, where: Pointer) -> Any:
        if where[-1] == "items" and isinstance(value, list):
            raise self._wrong(where, "can't be a list: write prefixItems")
        return self._schema(value, where)

    def several(self, value: Any, where: Pointer) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._wrong(where, "must be a list of schemas, not empty")
        return [self._schema(item, (*where, str(index))) for index, item in enumerate(value)]

    def named(self, value: Any, where: Pointer) -> Schema:
        if not isinstance(value, dict):
            raise self._wrong(where, f"must be an object of schemas, got {_kind(value)}")
        return {name: self._schema(item, (*where, str(name))) for name, item in value.items()}

    def types(self, value: Any, where: Pointer) -> Any:
        listed = value if isinstance(value, list) else [value]
        for name in listed:
            if name not in TYPES:
                raise self._wrong(where, f"{shorten(name, 60)!r} is no type; there are {', '.join(TYPES)}")
        if not listed:
            raise self._wrong(where, "must not be empty")
        return value

    def count(self, value: Any, where: Pointer) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= EXACT:
            raise self._wrong(where, f"must be an integer of 0 or more, got {shorten(value, 60)}")
        return value

    def number(self, value: Any, where: Pointer) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= EXACT:
            raise self._wrong(where, f"must be a number between -2^53 and 2^53, got {shorten(value, 60)}")
        self._exclusive = self._exclusive or where[-1].startswith("exclusive")
        if where[-1] == "multipleOf" and value <= 0:
            raise self._wrong(where, f"must be above 0, got {value}")
        return value

    def names(self, value: Any, where: Pointer) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong(where, "must be a list of strings")
        return list(dict.fromkeys(value))

    def boolean(self, value: Any, where: Pointer) -> bool:
        if not isinstance(value, bool):
            raise self._wrong(where, f"must be true or false, got {_kind(value)}")
        return value

    def string(self, value: Any, where: Pointer) -> str:
        if not isinstance(value, str):
            raise self._wrong(where, f"must be a string, got {_kind(value)}")
        return value

    def format(self, value: Any, where: Pointer) -> str:
        if value not in FORMATS:
            raise self._wrong(where, f"{shorten(value, 60)!r} can't be enforced; there are {', '.join(sorted(FORMATS))}")
        return value

    def reference(self, value: Any, where: Pointer) -> str:
        text = self.string(value, where)
        if text != "#" and not text.startswith("#/"):
            raise self._wrong(where, f"must point into this schema (#/...), got {shorten(text, 100)!r}")
        target = tuple(unquote(part).replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])
        self._references[where[:-1]] = target
        return text

    def constant(self, value: Any, where: Pointer) -> Any:
        for item in self._values(value, where, 0):
            if isinstance(item, str) and not _writable(item):
                raise self._wrong(where, "has a control character, which no answer can have")
            if isinstance(item, (int, float)) and not (math.isfinite(item) and abs(item) <= EXACT):
                raise self._wrong(where, "has a number beyond 2^53")
        return value

    def constants(self, value: Any, where: Pointer) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self._wrong(where, "must be a list of values, not empty")
        return self.constant(value, where)

    def _values(self, value: Any, where: Pointer, depth: int) -> Iterator[Any]:
        self._count()
        if depth > MAX_DEPTH:
            raise self._wrong(where, f"is nested more than {MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            for name, item in value.items():
                yield name
                yield from self._values(item, where, depth + 1)
        elif isinstance(value, list):
            for item in value:
                yield from self._values(item, where, depth + 1)
        elif value is None or isinstance(value, (bool, int, float, str)):
            yield value
        else:
            raise self._wrong(where, f"must be JSON, got {_kind(value)}")

    # ---- numeric bounds ---------------------------------------------------------------------------------------------------------

    def _check_conjunctions(self, where: Pointer) -> None:
        """Refuse exclusive bounds of numbers where the library is known to let the bound itself through: a bound that is a whole number,
        with the opposite bound less than 1 away. Bounds that come together from several schemas are not looked at so closely."""
        schema = self._at(where)
        if not isinstance(schema, dict):
            return
        own = self._together(where)
        branches = [
            [*own, *self._together((*where, name, str(i)))]
            for name in ("anyOf", "oneOf")
            for i in range(len(schema.get(name, ())))
        ]
        for parts in (own, *(branch for branch in branches if own)):
            if any(schema.get("type") == "integer" for schema in parts):
                continue
            exclusive = next(
                (name for part in parts for name in ("exclusiveMinimum", "exclusiveMaximum") if name in part), None
            )
            if exclusive is None:
                continue
            if sum(any(name in part for name in BOUNDS) for part in parts) > 1:
                raise self._wrong(
                    where, f"{exclusive!r} can't be enforced with bounds of other schemas: write them in one schema"
                )
            part = next(part for part in parts if exclusive in part)
            if _too_close(part):
                raise self._wrong((*where, exclusive), "can't be enforced with an opposite bound that is less than 1 away")

    def _together(self, where: Pointer) -> list[Schema]:
        """The schemas that a value must fit at the same time, less alternatives."""
        found: list[Schema] = []
        waiting: list[Pointer] = [where]
        seen = {where}
        while waiting:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise FieldError(self._field, "has too many references")
            place = waiting.pop()
            schema = self._at(place)
            if not isinstance(schema, dict):
                continue
            found.append(schema)
            more: list[Pointer] = [(*place, "allOf", str(index)) for index in range(len(schema.get("allOf", ())))]
            if place in self._references:
                more.append(self._references[place])
            waiting += [one for one in more if one not in seen]
            seen.update(more)
        return found

    def _at(self, where: Pointer) -> Any:
        return _at(self._root, where)


def _at(schema: Any, where: Pointer) -> Any:
    for part in where:
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


def _too_close(schema: Schema) -> bool:
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    return high - low < 1


def _writable(text: str) -> bool:
    return all(char >= " " or char in "\b\f\n\r\t" for char in text) and "\x7f" not in text


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


_Check = Callable[[_Checker, Any, Pointer], Any]

KEYWORDS: dict[str, _Check] = {
    "type": _Checker.types,
    "enum": _Checker.constants,
    "const": _Checker.constant,
    "$ref": _Checker.reference,
    "pattern": _Checker.string,
    "format": _Checker.format,
    "required": _Checker.names,
    "uniqueItems": _Checker.boolean,
    **dict.fromkeys(("properties", "patternProperties", "$defs", "definitions"), _Checker.named),
    **dict.fromkeys(("items", "additionalProperties"), _Checker.one),
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), _Checker.several),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Checker.count),
    **dict.fromkeys((*BOUNDS, "multipleOf"), _Checker.number),
}
"""What is enforced, and how its value is checked."""
