"""Reasoning content: what a model thinks between `<think>` and `</think>` at the beginning of its answer is shown as `reasoning_content`.

An answer begins with thought when its text does, or when the chat template has opened the tag in the prompt. Thought that is never closed
is reasoning to the end. Tags anywhere else are content. White space beside a tag belongs to neither.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from ...core.output import Content, OutputEvent, Reasoning
from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.contexts import ParserContext

BEGIN, END = "<think>", "</think>"
GRAMMARS = frozenset({"response_format", "structured_outputs"})
SPACE = frozenset(string.whitespace)


class ReasoningContent(Plugin):
    info = PluginInfo(
        name="reasoning",
        summary="shows what stands in <think> tags as reasoning_content, for models whose template or vocabulary has them",
        scope="request",
        lossless=True,
        default=True,
    )

    @hookimpl
    def reasoning_parser(self, request: ParserContext) -> ThinkParser | None:
        if GRAMMARS & request.fields.keys():
            return None  # the answer is the grammar's from its first character on
        known = END in request.added_tokens or END in request.chat_template
        return ThinkParser(open_already=request.prompt_end.rstrip().endswith(BEGIN)) if known else None


class ThinkParser:
    """open_already: the text begins inside the tag."""

    special_tokens = frozenset({BEGIN, END})

    def __init__(self, *, open_already: bool) -> None:
        self._where = "thought" if open_already else "start"
        self._held = ""
        """At the start: all of the text; later: what may be the beginning of the closing tag."""
        self._space: list[str] = []
        """White space of the thought before what is held: it may stand beside the tag."""
        self._begun = False
        """Something of the thought, or of the content behind it, has been told."""

    def feed(self, text: str, *, final: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        text, self._held = self._held + text, ""
        if self._where == "start":
            text = self._at_start(text, final)
        if self._where == "thought":
            text = self._in_thought(text, final, events)
        if self._where == "answer":
            text = text if self._begun else text.lstrip()
            self._begun = self._begun or bool(text)
            if text:
                events.append(Content(text))
        return events

    def _at_start(self, text: str, final: bool) -> str:
        """What is left for the next state; nothing while it isn't clear which that is."""
        shown = text.lstrip()
        if shown.startswith(BEGIN):
            self._where = "thought"
            return shown.removeprefix(BEGIN)
        if BEGIN.startswith(shown) and not final:
            self._held = text
            return ""
        self._where, self._begun = "answer", True
        return text

    def _in_thought(self, text: str, final: bool, events: list[OutputEvent]) -> str:
        """What is left for the answer."""
        thought, end, rest = text.partition(END)
        if not (end or final):
            cut = next((n for n in range(len(END) - 1, 0, -1) if thought.endswith(END[:n])), 0)
            thought, self._held = thought[: len(thought) - cut], thought[len(thought) - cut :]
        sure = thought if final and not end else thought.rstrip()
        before = "".join(self._space) if self._begun and (sure or (final and not end)) else ""
        if shown := before + (sure if self._begun else sure.lstrip()):
            events.append(Reasoning(shown))
            self._begun = True
            self._space.clear()
        self._space.append(thought[len(sure) :])
        if end:
            self._where, self._begun = "answer", False
        return rest
