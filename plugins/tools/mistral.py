"""Calls as Mistral's models write them, behind `[TOOL_CALLS]`: a list, `[{"name": "f", "arguments": {...}}]`, or, since version 11 of
`f[ARGS]{...}` with a marker for each call. Call ids are nine letters and digits: Mistral's templates take no others."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from ...core.output import CallArguments, CallEnd, CallStart
from ...core.plugin import Plugin, PluginInfo, hookimpl
from .call_object import CallObject
from .json_text import WHITE, Found, JsonValue
from .marked import CallList, MarkedCalls, call_id

if TYPE_CHECKING:
    from ...core.contexts import ParserContext

BEGIN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9
_NAME = frozenset(string.ascii_letters + string.digits + "_-.")


class Mistral(Plugin):
    info = PluginInfo(
        name="tools.mistral",
        summary="reads tool calls as Mistral's models write them, whatever the chat template says",
        scope="step",
        lossless=True,
        slot="tool_calls",
    )

    @hookimpl
    def tool_parser(self, request: ParserContext) -> MistralParser:
        return MistralParser(request)


def fits(request: ParserContext) -> bool:
    return BEGIN in request.added_tokens and BEGIN in request.chat_template


def make(request: ParserContext) -> MarkedCalls:
    return MistralParser(request)


class MistralParser(MarkedCalls):
    special_tokens = frozenset({BEGIN, ARGUMENTS, CALL_ID})

    def __init__(self, request: ParserContext) -> None:
        super().__init__(BEGIN)
        self._request = request
        self._calls = 0
        self._list: CallList | None = None
        self._value: JsonValue | None = None
        self._name = ""
        self._tag = ""

    def after_marker(self, char: str) -> bool:
        if char in WHITE:
            self.held += char
            return True
        if char == "[":
            self.held += char
            self._list = CallList(self._object)
            self._step = self._in_list
            return True
        self._name = self._tag = ""
        return self.go(self._in_name)

    def at_end(self) -> None:
        text = "" if self._list is None else self._list.held
        self._list = self._value = None
        self.give_up(text)

    def _new_id(self) -> str:
        self._calls += 1
        return call_id(self._request, self._calls, ID_LENGTH)

    # ---- a list -----------------------------------------------------------------------------------------------------------------

    def _object(self) -> CallObject:
        return CallObject(None, self._new_id())

    def _in_list(self, char: str) -> bool:
        assert self._list is not None
        found = self._list.take(char, self)
        if found is Found.BROKEN:
            text, self._list = self._list.held, None
            return self.give_up(text)
        if found is Found.END:
            self._list = None
            self.leave()
        return True

    # ---- name and arguments -----------------------------------------------------------------------------------------------------

    def _in_name(self, char: str) -> bool:
        """A name, then nothing, or a tag and what belongs to it: [CALL_ID] and an id, [ARGS]; then the arguments."""
        if char == "{" and self._name and self._tag in ("", ARGUMENTS):
            return self._begin(char)
        if char in WHITE and self._tag == ARGUMENTS:
            self.held += char
            return True
        if not self._goes_on(char):
            return self.give_up()
        self.held += char
        return True

    def _goes_on(self, char: str) -> bool:
        if not self._tag and char in _NAME:
            self._name += char
            return True
        if self._tag.startswith(CALL_ID) and char in _NAME:
            return True
        begun = "" if self._tag == CALL_ID else self._tag
        tags = (ARGUMENTS,) if self._tag == CALL_ID else (ARGUMENTS, CALL_ID)
        if not self._name or not any(tag.startswith(begun + char) for tag in tags):
            return False
        self._tag = begun + char
        return True

    def _begin(self, char: str) -> bool:
        self._value = JsonValue()
        self.tell([CallStart(self._name, self._new_id())])
        return self.go(self._in_arguments)

    def _in_arguments(self, char: str) -> bool:
        assert self._value is not None
        found = self._value.take(char)
        if found is Found.BROKEN:
            self._value = None
            return self.give_up()
        self.tell([CallArguments(self._value.drain())])
        if found is Found.END:
            self.tell([CallEnd()])
            self._value = None
            self.leave()
        return True
