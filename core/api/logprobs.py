"""Logprobs as the two APIs show them. Values are JSON numbers: minus infinity is shown as -9999.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..front.detokenizer import make_detokenizer
from ..front.tokenizer import Tokenizer
from ..plan import TokenLogprobs

FLOOR = -9999.0


def finite(value: float) -> float:
    return max(FLOOR, value)


def name_of(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as the completions API writes it: its text, or `bytes:\\xf0\\x9f` when it is only part of a character."""
    data = tokenizer.bytes[token_id]
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_entries(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """The chat API's `logprobs.content`: the chosen token, and the `top` most likely ones."""
    return [
        _chat_token(tokenizer, entry.token_id, entry.logprob)
        | {
            "top_logprobs": [
                _chat_token(tokenizer, token_id, logprob)
                for token_id, logprob in zip(entry.top_ids[:top], entry.top_logprobs[:top], strict=True)
            ]
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.bytes[token_id]
    return {"token": data.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(data)}


def prompt_entries(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The `prompt_logprobs` extension: one entry a prompt token, the first null, each by token id."""
    return [None, *({str(i): item for i, item in _by_id(tokenizer, entry).items()} for entry in entries)]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[int, dict[str, Any]]:
    items = {
        token_id: {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.bytes[token_id].decode(errors="replace"),
        }
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    }
    chosen = tokenizer.bytes[entry.token_id].decode(errors="replace")
    items[entry.token_id] = {"logprob": finite(entry.logprob), "rank": entry.rank, "decoded_token": chosen}
    return items


class CompletionLogprobs:
    """The completions API's `logprobs` of one choice, piece by piece: four lists of equal length in each piece.

    text_offset: the place in the choice's text where the token's text begins; for a token that isn't shown, the place where it would stand.
    The parts of one character share its offset."""

    def __init__(self, tokenizer: Tokenizer, top: int, *, skip_special: bool, context: Sequence[int], start: int = 0) -> None:
        """skip_special: whether the answer leaves special tokens out; context: the prompt's ids; start: characters of the echo."""
        self._tokenizer = tokenizer
        self._top = top
        self._detokenizer = make_detokenizer(tokenizer, skip_special=skip_special, context=context)
        self._offset = start

    def piece(
        self,
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs],
        echoed: tuple[Sequence[int], Sequence[int], Sequence[TokenLogprobs]] = ((), (), ()),
    ) -> dict[str, list[Any]]:
        """entries: one for each of `token_ids`. echoed: ids and offsets of a prompt that is shown before them, and entries of all but
        its first token."""
        piece: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        ids, offsets, known = echoed
        for token_id, offset, entry in zip(ids, offsets, [None, *known] if ids else (), strict=True):
            self._add(piece, token_id, offset, entry)
        for token_id, entry in zip(token_ids, entries, strict=True):
            self._add(piece, token_id, self._offset + self._detokenizer.ahead(token_id), entry)
            self._offset += len(self._detokenizer.feed((token_id,)))
        return piece

    def _add(self, piece: dict[str, list[Any]], token_id: int, offset: int, entry: TokenLogprobs | None) -> None:
        piece["tokens"].append(name_of(self._tokenizer, token_id))
        piece["token_logprobs"].append(None if entry is None else finite(entry.logprob))
        piece["top_logprobs"].append(None if entry is None else self._tops(entry))
        piece["text_offset"].append(offset)

    def _tops(self, entry: TokenLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids[: self._top], entry.top_logprobs[: self._top], strict=True):
            tops.setdefault(name_of(self._tokenizer, token_id), finite(logprob))
        tops.setdefault(name_of(self._tokenizer, entry.token_id), finite(entry.logprob))
        return tops


def prompt_offsets(tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, *, skip_special: bool) -> list[int]:
    """Where each token of an echoed prompt stands in what is shown of it: `text` as the client wrote it, or the decoded ids.

    A text shows its control markers whatever `skip_special` says, and not what the tokenizer added (a start token)."""
    if text is None:
        return _offsets_of_ids(tokenizer, token_ids, skip_special=skip_special)
    offsets, end = _offsets_in_text(tokenizer, token_ids, text)
    if end == len(text):
        return offsets
    return tokenizer.offsets(text, token_ids) or [min(offset, len(text)) for offset in offsets]  # the tokenizer changes texts


def _offsets_of_ids(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip_special: bool) -> list[int]:
    detokenizer = make_detokenizer(tokenizer, skip_special=skip_special)
    offsets, shown = [], 0
    for token_id in token_ids:
        offsets.append(shown + detokenizer.ahead(token_id))
        shown += len(detokenizer.feed((token_id,)))
    return offsets


def _offsets_in_text(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[list[int], int]:
    """Offsets, and where the last token ends: len(text) if the tokens spell the text. A special token that the text hasn't got at its
    place was added by the tokenizer."""
    detokenizer = make_detokenizer(tokenizer, skip_special=False)
    offsets, place = [], 0
    for token_id in token_ids:
        offsets.append(place)
        if token_id in tokenizer.special_ids and not text.startswith(tokenizer.bytes[token_id].decode(errors="replace"), place):
            continue
        piece = detokenizer.feed((token_id,))
        if not text.startswith(piece, place):
            return offsets + [place] * (len(token_ids) - len(offsets)), -1
        place += len(piece)
    return offsets, place
