"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .call_object import CallObject
from .json_text import WHITE, Found
from .marked import MarkedCalls

if TYPE_CHECKING:
    from ...core.contexts import ParserContext

BEGIN, END = "<tool_call>", "</tool_call>"
_EXPLAINED = re.compile(r'"name":[^{}]{0,60}"arguments":')
"""How a template tells the model what to write behind the marker: others have XML there."""


class Hermes(Plugin):
    info = PluginInfo(
        name="tools.hermes",
        summary="reads tool calls as Hermes and Qwen write them, whatever the chat template says",
        scope="step",
        lossless=True,
        slot="tool_calls",
    )

    @hookimpl
    def tool_parser(self, request: ParserContext) -> HermesParser:
        return HermesParser()


def fits(request: ParserContext) -> bool:
    template = request.chat_template.replace("\\", "")
    return BEGIN in template and "<function=" not in template and _EXPLAINED.search(template) is not None


def make(_request: ParserContext) -> MarkedCalls:
    return HermesParser()


class HermesParser(MarkedCalls):
    special_tokens = frozenset({BEGIN, END})

    def __init__(self) -> None:
        super().__init__(BEGIN)
        self._call = CallObject(None)

    def after_marker(self, char: str) -> bool:
        self._call = CallObject(None)
        return self.go(self._in_call)

    def _in_call(self, char: str) -> bool:
        found = self.read(self._call, char)
        if found is Found.BROKEN:
            return self._break_off()
        if found is Found.END:
            self.leave(self._at_end_marker)
        return True

    def _break_off(self) -> bool:
        text, self._call = self._call.held, CallObject(None)
        return self.give_up(text)

    def _at_end_marker(self, char: str) -> bool:
        """The end marker, which may be missing."""
        if not self.held and char in WHITE:
            return True
        if not END.startswith(self.held + char):
            return self.give_up()
        self.held += char
        if self.held == END:
            self.leave()
        return True

    def at_end(self) -> None:
        if self._step == self._at_end_marker:
            self.held = ""  # the beginning of an end marker
        self._break_off()
