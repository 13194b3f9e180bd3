"""A plugin of one's own, whole: the request field `shout` makes an answer upper-case, at most `max_words` words of it.

Install it beside Tokenbus (`pip install ./examples/plugin-shout`), then `tokenbus serve --enable shout`; or try it without installing:
`PYTHONPATH=examples/plugin-shout tokenbus serve --load tokenbus_shout:Shout --enable shout`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus import Plugin, PluginInfo, hookimpl
from tokenbus.core.errors import FieldError


class ShoutSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_words: int = 1000
    """Answers end after this many words."""


class Shout(Plugin):
    info = PluginInfo(
        name="shout",
        summary="upper-case answers (an example)",
        scope="request",
        lossless=False,
        claims={"shout"},
        api_version=(1, 1),
    )
    Settings = ShoutSettings

    @hookimpl
    def check_fields(self, fields: dict[str, Any]) -> None:
        if fields["shout"] is not True:
            raise FieldError("shout", f"must be true or absent, got {fields['shout']!r}")

    @hookimpl
    def text_filter(self) -> Shouter:
        return Shouter(self.settings.max_words)


class Shouter:
    """Holds an unfinished word back, since only a finished one counts."""

    def __init__(self, max_words: int) -> None:
        self.left = max_words
        self.held = ""

    def feed(self, text: str, *, final: bool) -> tuple[str, str | None]:
        words = (self.held + text.upper()).split(" ")
        self.held = "" if final else words.pop()
        shown, self.left = words[: self.left], self.left - len(words)
        joined = " ".join(shown) + ("" if final or not shown else " ")
        return joined, ("enough words" if self.left < 0 else None)
