"""What a plugin finds in the text of an answer: reasoning, tool calls, and the content that is left. See the hooks `reasoning_parser`
and `tool_parser`.

Events come in the order of the text. A call is `CallStart`, any number of `CallArguments`, and `CallEnd` once its arguments are
complete; calls don't stand in each other. A call that is never ended was cut off, or broke off: what there was of it has been shown,
and it does not count as made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text that is neither reasoning nor a call."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    name: str
    """The function's."""
    call_id: str | None = None
    """None: core makes one."""


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of the call's arguments: all of them together are the text of a JSON object."""

    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call is whole."""


OutputEvent = Content | Reasoning | CallStart | CallArguments | CallEnd


class OutputParser(Protocol):
    """Reads one choice's text, piece by piece. What it makes of a text must not depend on how the text is cut into pieces: the events
    may come later or in more pieces, but joined they are the same."""

    special_tokens: frozenset[str]
    """Control tokens, as they are spelled, that it must see in the text, whatever `skip_special_tokens` says."""

    def feed(self, text: str, *, final: bool) -> Sequence[OutputEvent]:
        """What can be told now. Text may be held back until a later call; with `final` everything held must come out. A text that is not
        what it is looking for is content: nothing is lost, nothing is raised."""
        ...
