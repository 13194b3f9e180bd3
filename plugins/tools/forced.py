"""`tool_choice` "required", or one function by name: the answer is JSON that a grammar holds to, and no longer the model's own way of
writing calls.

    named      the arguments of that function, and nothing else
    required   a list of {"name": ..., "arguments": ...}, at least one; one exactly when parallel_tool_calls is false

`forced_schema` is what the grammar is made from, `forced_parser` reads what comes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.output import CallArguments, CallEnd, CallStart, OutputEvent
from .call_object import CallObject
from .json_text import WHITE, Found, JsonValue
from .marked import CallList, MarkedCalls


def forced_schema(tools: Sequence[Mapping[str, Any]], name: str | None, *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of an answer that calls one of `tools` (definitions as the API has them). name: the function that is to be called;
    None: any."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if name is not None:
        return _parameters(functions[name])
    calls = []
    for index, (each, function) in enumerate(functions.items()):
        inside = "#/items/properties/arguments" if len(functions) == 1 else f"#/items/anyOf/{index}/properties/arguments"
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": each}, "arguments": _moved(_parameters(function), inside)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "items": one, "minItems": 1} | ({} if parallel else {"maxItems": 1})


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` of another one: its references to itself are found there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, place) for key, item in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    if "parameters" not in function:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **function["parameters"]}


def forced_parser(name: str | None) -> MarkedCalls:
    """Reads an answer that keeps to `forced_schema`; one that doesn't (it was cut off, say) is read as far as it does."""
    return ListParser() if name is None else NamedParser(name)


class _Bare(MarkedCalls):
    """The whole answer is the call or calls: there is no marker."""

    def __init__(self) -> None:
        super().__init__("\0")
        self._step = self._at_start

    def after_marker(self, char: str) -> bool:
        return self.give_up()

    def _at_start(self, char: str) -> bool:
        if char in WHITE:
            self.space.append(char)
            return True
        return self.go(self.begin)

    def begin(self, char: str) -> bool:
        raise NotImplementedError


class NamedParser(_Bare):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._value = JsonValue()

    def begin(self, char: str) -> bool:
        if char != "{":
            return self.give_up()
        start: list[OutputEvent] = [CallStart(self._name)]
        self.tell(start)
        return self.go(self._in_arguments)

    def _in_arguments(self, char: str) -> bool:
        found = self._value.take(char)
        if found is Found.BROKEN:
            return self.give_up()
        self.tell([CallArguments(self._value.drain())])
        if found is Found.END:
            self.tell([CallEnd()])
            self.leave()
        return True


class ListParser(_Bare):
    def __init__(self) -> None:
        super().__init__()
        self._list = CallList(lambda: CallObject(None))

    def begin(self, char: str) -> bool:
        if char != "[":
            return self.give_up()
        self.held += char
        self._step = self._in_list
        return True

    def _in_list(self, char: str) -> bool:
        found = self._list.take(char, self)
        if found is Found.BROKEN:
            text, self._list = self._list.held, CallList(lambda: CallObject(None))
            return self.give_up(text)
        if found is Found.END:
            self.leave()
        return True

    def at_end(self) -> None:
        self.give_up(self._list.held)
