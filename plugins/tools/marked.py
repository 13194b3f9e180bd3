"""What parsers of tool calls share: content goes through, a marker begins a call. Whatever follows the marker and is no call is content,
marker and all. White space beside a call is not content.

Parsers work a character at a time, so that what they find can't depend on how the text is cut into pieces.
"""

from __future__ import annotations

import hashlib
import itertools
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ...core.output import CallArguments, Content, OutputEvent
from .call_object import CallObject
from .json_text import WHITE, Found

if TYPE_CHECKING:
    from ...core.contexts import ParserContext

SPACE = frozenset(string.whitespace)
Step = Callable[[str], bool]
"""Takes a character and returns whether it did; if not, it has changed the state, and the character is taken by the next one's step."""


class MarkedCalls(ABC):
    """marker: what begins calls. A subclass's `after_marker` is the state that follows it; it comes back by `leave` or by `give_up`."""

    special_tokens: frozenset[str] = frozenset()

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._seen = ""
        """The beginning of a marker at the end of the text."""
        self.space: list[str] = []
        """White space at the end of the text, before `_seen`."""
        self._beside_call = False
        """Nothing but white space has followed the last call: it is no content."""
        self._events: list[OutputEvent] = []
        self._step: Step = self._in_text
        self.held = ""
        """Text behind the marker that may still be content."""

    def feed(self, text: str, *, final: bool) -> list[OutputEvent]:
        for char in text:
            while not self._step(char):
                pass
        if final:
            self.at_end()
            self._say(self._seen)
            space = "".join(self.space)
            self.space.clear()
            self._say("" if self._beside_call else space)
        events, self._events = _joined(self._events), []
        return events

    # ---- for subclasses ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def after_marker(self, char: str) -> bool:
        """The step that follows a marker."""

    def at_end(self) -> None:
        """The text is over: what is held and no call is content."""
        self.give_up()

    def go(self, step: Step) -> bool:
        """The next state, which takes the present character."""
        self._step = step
        return False

    def read(self, call: CallObject, char: str) -> Found:
        """Hand a character to a call and collect what it finds."""
        found = call.take(char)
        self.tell(call.events)
        call.events = []
        return found

    def tell(self, events: list[OutputEvent]) -> None:
        """Of a call: then its marker and the white space before it are not content."""
        if events:
            self._events += events
            self.held = ""
            self.space.clear()

    def leave(self, step: Step | None = None) -> None:
        """A call is over: what follows is `step`'s, by default text."""
        self.held, self._beside_call = "", True
        self.space.clear()
        self._step = step or self._in_text

    def give_up(self, text: str = "") -> bool:
        """What is held, and `text` behind it, is content. The present character is the text's next one."""
        held, self.held = self.held + text, ""
        self._say(held)
        return self.go(self._in_text)

    # ---- text -------------------------------------------------------------------------------------------------------------------

    def _in_text(self, char: str) -> bool:
        seen = self._seen + char
        if self._marker.startswith(seen):
            self._seen = seen
            if seen == self._marker:
                self._seen, self.held, self._step = "", seen, self.after_marker
            return True
        if self._seen:  # no marker after all; only a marker's first character begins one
            seen, self._seen = self._seen, ""
            self._say(seen)
            return False
        if char in SPACE:
            self.space.append(char)
        else:
            self._say(char)
        return True

    def _say(self, text: str) -> None:
        """Content, with the white space before it."""
        if text:
            self._events.append(Content(text if self._beside_call else "".join(self.space) + text))
            self._beside_call, self._seen = False, ""
            self.space.clear()


class CallList:
    """`{...}, {...}]`: calls as JSON objects, what follows the opening bracket of a list. An empty list is no call: text."""

    def __init__(self, make: Callable[[], CallObject]) -> None:
        self._make = make
        self._call: CallObject | None = None
        self._expect = "call"

    @property
    def held(self) -> str:
        """Of the object that is being read, beside what the parser holds."""
        return "" if self._call is None else self._call.held

    def take(self, char: str, parser: MarkedCalls) -> Found:
        """As of `CallObject`."""
        if self._call is None and char == "{" and self._expect != ", or ]":
            self._call = self._make()
        if self._call is not None:
            found = parser.read(self._call, char)
            if found is Found.END:
                self._call, self._expect = None, ", or ]"
            return Found.BROKEN if found is Found.BROKEN else Found.MORE
        if char == "]" and self._expect == ", or ]":
            return Found.END
        if char == "," and self._expect == ", or ]":
            self._expect = "call"
        elif char not in WHITE:
            return Found.BROKEN
        parser.held += char
        return Found.MORE


def call_id(request: ParserContext, index: int, length: int) -> str:
    """A call's id of letters and digits: unlike any other's, and the same whenever this answer is made again."""
    alphabet = string.ascii_letters + string.digits
    digest = hashlib.sha256(f"{request.request_id} {index}".encode()).digest()
    return "".join(alphabet[byte % len(alphabet)] for byte in digest[:length])


def names_of(request: ParserContext) -> Collection[str]:
    return frozenset(tool["function"]["name"] for tool in request.tools)


def _joined(events: list[OutputEvent]) -> list[OutputEvent]:
    """Pieces of one text as one event."""
    joined: list[OutputEvent] = []
    for kind, group in itertools.groupby(events, type):
        if kind is Content or kind is CallArguments:
            joined.append(kind("".join([event.text for event in group if isinstance(event, Content | CallArguments)])))
        else:
            joined += group
    return joined
