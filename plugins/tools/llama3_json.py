"""Calls as Llama 3.1 and later write them: `{"name": "f", "parameters": {...}}`, the whole answer or what follows `<|python_tag|>`; more of
them after a semicolon. Without the tag an object is a call only when it names one of the request's tools and has parameters: an answer
in JSON is an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .call_object import CallObject
from .json_text import WHITE, Found
from .marked import MarkedCalls, names_of

if TYPE_CHECKING:
    from ...core.contexts import ParserContext

TAG = "<|python_tag|>"


class Llama3Json(Plugin):
    info = PluginInfo(
        name="tools.llama3_json",
        summary="reads tool calls as Llama 3.1 and later write them, whatever the chat template says",
        scope="step",
        lossless=True,
        slot="tool_calls",
    )

    @hookimpl
    def tool_parser(self, request: ParserContext) -> Llama3Parser:
        return Llama3Parser(request)


def fits(request: ParserContext) -> bool:
    return TAG in request.added_tokens and '{"name": function name, "parameters":' in request.chat_template.replace("\\", "")


def make(request: ParserContext) -> MarkedCalls:
    return Llama3Parser(request)


class Llama3Parser(MarkedCalls):
    special_tokens = frozenset({TAG})

    def __init__(self, request: ParserContext) -> None:
        super().__init__(TAG)
        self._names = names_of(request)
        self._call: CallObject | None = None
        self._step = self._at_start

    def _at_start(self, char: str) -> bool:
        if char in WHITE:
            self.space.append(char)
            return True
        return self.go(self._before_call if char == "{" else self._in_text)

    def after_marker(self, char: str) -> bool:
        if char in WHITE:
            self.held += char
            return True
        return self._before_call(char) if char == "{" else self.give_up()

    def _before_call(self, char: str) -> bool:
        self._call = CallObject(self._names)
        return self.go(self._in_call)

    def _in_call(self, char: str) -> bool:
        assert self._call is not None
        found = self.read(self._call, char)
        if found is Found.BROKEN:
            return self._break_off()
        if found is Found.END:
            self._call = None
            self.leave(self._after_call)
        return True

    def _break_off(self) -> bool:
        text = "" if self._call is None else self._call.held
        self._call = None
        return self.give_up(text)

    def _after_call(self, char: str) -> bool:
        """White space and one semicolon may stand between calls."""
        if char in WHITE or (char == ";" and ";" not in self.held):
            self.held += char
            return True
        if char == "{":
            return self._before_call(char)
        if not self.held.strip():
            self.held = ""
        return self.give_up()

    def at_end(self) -> None:
        if self._step == self._after_call:
            self.held = ""
        self._break_off()
