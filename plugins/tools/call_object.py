"""A tool call written as a JSON object: `{"name": "f", "arguments": {...}}`, one character at a time.

A call is told as soon as it is sure to be one: its name is known and its arguments have begun. Then arguments are passed on as they come.
Until that moment nothing is given away, and a text that turns out to be something else is left whole to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from ...core.output import CallArguments, CallEnd, CallStart, OutputEvent
from .json_text import WHITE, Found, JsonValue, repaired

ARGUMENTS = frozenset({"arguments", "parameters"})
OTHERS = frozenset({"type", "id"})
"""Keys that some models write, too: their values are strings, and not needed."""


class CallObject:
    """names: the functions that there are; None when the text is sure to be meant as a call, whatever it names."""

    def __init__(self, names: Collection[str] | None, call_id: str | None = None) -> None:
        self.events: list[OutputEvent] = []
        """What was found; the caller takes it and empties the list."""
        self._held: list[str] = []
        self._names = names
        self._call_id = call_id
        self._expect = "{"
        self._key = ""
        self._value: JsonValue | None = None
        self._name: str | None = None
        self._arguments: str | None = None
        """Whole, where they came before the name or as a string."""
        self._told = False
        self._passing = False
        """The value that is being read is told of as it comes."""

    @property
    def held(self) -> str:
        """Text taken that no event tells of; all of it is content when the object breaks."""
        return "".join(self._held)

    def take(self, char: str) -> Found:
        """END with the closing brace. After BROKEN the character was not taken, and `held` is what was."""
        if self._value is not None:
            return self._in_value(self._value, char)
        self._held.append(char)
        if char in WHITE:
            return Found.MORE
        match self._expect, char:
            case "{", "{":
                self._expect = "key or }"
            case (("key or }" | "key"), '"'):
                self._begin(char)
            case ":", ":":
                self._expect = "value"
            case "value", ('"' | "{"):
                if not self._fits(char):
                    return self._broken()
                self._passing = char == "{" and self._key in ARGUMENTS and self._name is not None
                if self._passing:
                    self._tell()
                self._begin(char)
            case "next", ",":
                self._expect = "key"
            case (("next" | "key or }"), "}"):
                return self._close()
            case _:
                return self._broken()
        return Found.MORE

    def _begin(self, char: str) -> None:
        self._value = JsonValue()
        self._value.take(char)
        if self._passing:
            self._pass_on(self._value)

    def _broken(self) -> Found:
        self._held.pop()
        return Found.BROKEN

    def _fits(self, char: str) -> bool:
        if self._key == "name":
            return char == '"' and self._name is None
        if self._key in ARGUMENTS:
            return self._arguments is None
        return char == '"'

    def _in_value(self, value: JsonValue, char: str) -> Found:
        found = value.take(char)
        if found is Found.BROKEN:
            return found
        if self._passing:
            self._pass_on(value)
        else:
            self._held.append(char)
        if found is Found.MORE:
            return found
        self._value = None
        return Found.MORE if self._ended(value.drain()) else self._broken()

    def _pass_on(self, value: JsonValue) -> None:
        self.events.append(CallArguments(value.drain()))

    def _ended(self, text: str) -> bool:
        """A key or value is whole. Whether it may stand there."""
        if self._expect in ("key or }", "key"):
            self._key, self._expect = _text(text) or "", ":"
            return self._key == "name" or self._key in ARGUMENTS or self._key in OTHERS
        self._expect = "next"
        if self._passing:
            self._passing, self._arguments = False, ""
            self.events.append(CallEnd())
        elif self._key == "name":
            self._name = _text(text)
            return bool(self._name) and (self._names is None or self._name in self._names)
        elif self._key in ARGUMENTS:
            self._arguments = text if text[0] == "{" else repaired(_text(text) or "{}")
            return self._arguments is not None
        return True

    def _close(self) -> Found:
        if not self._told:
            if self._name is None or (self._arguments is None and self._names is not None):
                return self._broken()
            self._tell()
            self.events += [CallArguments(self._arguments or "{}"), CallEnd()]
        self._held.clear()
        return Found.END

    def _tell(self) -> None:
        assert self._name is not None
        self.events.append(CallStart(self._name, self._call_id))
        self._told = True
        self._held.clear()


def _text(value: str) -> str | None:
    """What a JSON string says; None when that is no text (half of a surrogate pair)."""
    decoded: Any = json.loads(value)
    try:
        decoded.encode()
    except UnicodeEncodeError:
        return None
    return decoded
