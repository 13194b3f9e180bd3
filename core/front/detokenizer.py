"""Token ids to text, a few at a time: a character is given out once, whole, and never taken back.

Joined deltas are the text: non-streamed answers are made by the same object, so the two can't differ.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from .token_bytes import TokenBytes
from .tokenizer import Tokenizer


class Detokenizer(ABC):
    """State of one choice. Cost per token does not depend on how many came before."""

    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that is complete now; bytes of a character that is not yet whole are kept."""

    @abstractmethod
    def flush(self) -> str:
        """At the end, once: what is left of a character that was cut off, as U+FFFD."""

    def ahead(self, token_id: int) -> int:
        """Characters between all that was given out and the place where the text of `token_id` begins, were it fed next: 1 when it leaves
        the character before it cut off, which then becomes U+FFFD, else 0: a token that goes on with a character begins where that does."""
        return 0


class ByteDetokenizer(Detokenizer):
    """For vocabularies whose tokens are bytes (see `token_bytes`)."""

    def __init__(self, table: TokenBytes, skip_special: bool, *, at_start: bool) -> None:
        self._table = table
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and table.strips_first_space

    def feed(self, token_ids: Sequence[int]) -> str:
        shown, skip = self._table.shown, self._skip
        return self._text(b"".join([shown(token_id, skip) for token_id in token_ids]), final=False)

    def flush(self) -> str:
        return self._text(b"", final=True)

    def ahead(self, token_id: int) -> int:
        begun = self._decoder.getstate()[0]
        data = self._table.shown(token_id, self._skip)
        if not (begun and data):
            return 0
        try:
            codecs.getincrementaldecoder("utf-8")().decode(begun + data[:1])
        except UnicodeDecodeError:
            return 1
        return 0

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._decoder.decode(data, final)
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer(Detokenizer):
    """For any other vocabulary: decode a short window that ends at the newest token, and give out what it has more than before.

    The window starts at a point where the text was complete, so that joining rules between neighbours (spaces, sub-word marks) apply."""

    MAX_HELD = 8
    """Tokens after which a piece that still ends in U+FFFD is given out as it is."""

    def __init__(self, backend: Any, skip_special: bool, context: Sequence[int]) -> None:
        self._backend = backend
        self._skip = skip_special
        self._window = list(context[-4:])
        self._shown = len(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._more(final=True)

    def _one(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._more(final=len(self._window) - self._shown >= self.MAX_HELD)

    def _more(self, *, final: bool) -> str:
        old = self._backend.decode(self._window[: self._shown], skip_special_tokens=self._skip)
        new = self._backend.decode(self._window, skip_special_tokens=self._skip)
        if len(new) <= len(old) or (new.endswith("\ufffd") and not final):
            return ""
        self._window = self._window[self._shown :] if self._shown else self._window
        self._shown = len(self._window)
        return new[len(old) :]


class ShowingDetokenizer(Detokenizer):
    """Another one, around which some control tokens are spelled out that it would leave out."""

    def __init__(self, inner: Detokenizer, shown: Mapping[int, str]) -> None:
        self._inner = inner
        self._shown = shown

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._one(token_id) for token_id in token_ids])

    def _one(self, token_id: int) -> str:
        if (text := self._shown.get(token_id)) is None:
            return self._inner.feed((token_id,))
        return self._inner.flush() + text

    def flush(self) -> str:
        return self._inner.flush()


def make_detokenizer(
    tokenizer: Tokenizer, *, skip_special: bool, context: Sequence[int] = (), shown: Mapping[int, str] | None = None
) -> Detokenizer:
    """For text that goes on after `context` (the prompt's ids); without one the text begins here. shown: control tokens, by id, that are
    spelled out even with `skip_special`."""
    if tokenizer.bytes.supported:
        made: Detokenizer = ByteDetokenizer(tokenizer.bytes, skip_special, at_start=not context)
    else:
        made = WindowDetokenizer(tokenizer._backend, skip_special, context)
    return ShowingDetokenizer(made, shown) if shown and skip_special else made


def decode_all(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special: bool) -> str:
    """The whole text of `token_ids`."""
    detokenizer = make_detokenizer(tokenizer, skip_special=skip_special)
    return detokenizer.feed(token_ids) + detokenizer.flush()
