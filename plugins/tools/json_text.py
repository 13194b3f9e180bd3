"""JSON, one character at a time: where a value ends, and the first character that can't be right."""

from __future__ import annotations

import enum
import json

WHITE = " \t\n\r"
_ESCAPES = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"
_CONTROLS = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
_NUMBER: dict[str, list[tuple[str, str]]] = {
    "minus": [("0", "zero"), ("123456789", "int")],
    "zero": [(".", "dot"), ("eE", "e")],
    "int": [("0123456789", "int"), (".", "dot"), ("eE", "e")],
    "dot": [("0123456789", "fraction")],
    "fraction": [("0123456789", "fraction"), ("eE", "e")],
    "e": [("0123456789", "exponent"), ("+-", "sign")],
    "sign": [("0123456789", "exponent")],
    "exponent": [("0123456789", "exponent")],
}
"""By state: which characters lead to which state."""
_COMPLETE = frozenset({"zero", "int", "fraction", "exponent"})


class Found(enum.Enum):
    MORE = enum.auto()
    """The character belongs to the value, which goes on."""
    END = enum.auto()
    """The character is the value's last."""
    BROKEN = enum.auto()
    """No JSON goes on with this character; it was not taken."""


class JsonValue:
    """Reads one object or string (values whose last character shows that they end), strictly, but for one thing that models do: a control
    character inside a string is taken, and becomes its escape. No recursion; memory is one character for each level of nesting."""

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._levels: list[str] = []
        self._expect = "value"
        self._is_key = False
        self._rest = ""
        """What is left of a literal."""
        self._hex = 0
        """Digits of a \\u escape still to come."""

    def drain(self) -> str:
        """The JSON text of what was taken since the last call."""
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def take(self, char: str) -> Found:
        if self._expect == "string":
            return self._in_string(char)
        if self._expect in _NUMBER:
            if (after := next((state for chars, state in _NUMBER[self._expect] if char in chars), None)) is not None:
                return self._go(char, after)
            if self._expect not in _COMPLETE:
                return Found.BROKEN
            self._expect = "next"  # the number ended before this character
        if self._expect == "literal":
            if char != self._rest[0]:
                return Found.BROKEN
            self._rest = self._rest[1:]
            return self._go(char, "literal" if self._rest else "next")
        if char in WHITE:
            return self._go(char, self._expect)
        match self._expect:
            case "value" | "value or ]":
                return self._begin(char)
            case "key" | "key or }":
                if char == '"':
                    self._is_key = True
                    return self._go(char, "string")
                return self._close(char) if self._expect == "key or }" else Found.BROKEN
            case "colon":
                return self._go(char, "value") if char == ":" else Found.BROKEN
            case _:
                if char == ",":
                    return self._go(char, "key" if self._levels[-1] == "}" else "value")
                return self._close(char)

    def _go(self, char: str, expect: str) -> Found:
        self._taken.append(char)
        self._expect = expect
        return Found.MORE

    def _begin(self, char: str) -> Found:
        if char == "{":
            self._levels.append("}")
            return self._go(char, "key or }")
        if char == '"':
            self._is_key = False
            return self._go(char, "string")
        if not self._levels:
            return Found.BROKEN
        if char == "[":
            self._levels.append("]")
            return self._go(char, "value or ]")
        if char == "]" and self._expect == "value or ]":
            return self._close(char)
        for literal in ("true", "false", "null"):
            if char == literal[0]:
                self._rest = literal[1:]
                return self._go(char, "literal")
        if char == "-":
            return self._go(char, "minus")
        if char in "0123456789":
            return self._go(char, "zero" if char == "0" else "int")
        return Found.BROKEN

    def _close(self, char: str) -> Found:
        if char != self._levels[-1]:
            return Found.BROKEN
        self._levels.pop()
        self._go(char, "next")
        return Found.MORE if self._levels else Found.END

    def _in_string(self, char: str) -> Found:
        if self._hex:
            if char not in _HEX:
                return Found.BROKEN
            self._hex -= 1
            return self._go(char, "string")
        if self._rest == "\\":
            if char != "u" and char not in _ESCAPES:
                return Found.BROKEN
            self._rest, self._hex = "", 4 if char == "u" else 0
            return self._go(char, "string")
        if char == "\\":
            self._rest = "\\"
            return self._go(char, "string")
        if char < " ":
            self._taken.append(_CONTROLS.get(char, f"\\u{ord(char):04x}"))
            return Found.MORE
        if char != '"':
            return self._go(char, "string")
        self._go(char, "colon" if self._is_key else "next")
        return Found.MORE if self._levels else Found.END


def repaired(text: str) -> str | None:
    """`text` as strict JSON when it is an object, with control characters in strings escaped; else None."""
    text = text.strip(WHITE)
    try:
        return text if isinstance(json.loads(text, parse_constant=_refuse), dict) else None
    except (ValueError, RecursionError):
        pass
    value = JsonValue()
    for place, char in enumerate(text):
        found = value.take(char)
        if found is not Found.MORE:
            whole = found is Found.END and place == len(text) - 1 and text[0] == "{"
            return value.drain() if whole else None
    return None


def _refuse(constant: str) -> None:
    raise ValueError(constant)
