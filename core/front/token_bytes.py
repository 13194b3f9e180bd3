"""What bytes a token stands for. With them, decoding is exact, incremental, and O(1) a token.

Two kinds of vocabulary cover nearly all models: byte-level BPE (GPT-2's alphabet, one printable character a byte) and SentencePiece
(spaces as U+2581, bytes outside the vocabulary as <0xAB>). For any other kind `supported` is False and whoever decodes has to ask the
tokenizer itself.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = special_ids
        self.kind = _kind(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None)
        self.strips_first_space = self.kind == "sentencepiece"
        """The first space of a whole text is the tokenizer's own addition, not the text's."""
        self._known: dict[int, bytes] = {}

    @property
    def supported(self) -> bool:
        return self.kind is not None

    def __getitem__(self, token_id: int) -> bytes:
        """The token's bytes; empty for ids that no token has (a padded embedding table)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._find(token_id)
        return known

    def shown(self, token_id: int, skip_special: bool) -> bytes:
        """The token's bytes, none for a special token that is not to be shown."""
        return b"" if skip_special and token_id in self.special_ids else self[token_id]

    def _find(self, token_id: int) -> bytes:
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self.kind == "byte_level":
            alphabet = byte_alphabet()
            try:
                return bytes(alphabet[char] for char in token)
            except KeyError:
                return token.encode()
        if self.kind == "sentencepiece":
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes((int(match[1], 16),)) if match else token.replace("\u2581", " ").encode()
        return self._backend.decode([token_id], skip_special_tokens=False).encode()


def _kind(decoder: dict[str, Any] | None) -> str | None:
    if decoder is None:
        return None
    if decoder["type"] == "ByteLevel":
        return "byte_level"
    if decoder["type"] == "Metaspace":
        return "sentencepiece"
    if decoder["type"] == "Sequence":
        parts = decoder["decoders"]
        kinds = [part["type"] for part in parts]
        if kinds and all(_kind(part) == "byte_level" or part["type"] in ("Fuse", "ByteFallback") for part in parts):
            return "byte_level" if "ByteLevel" in kinds else None
        if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return "sentencepiece"
    return None


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
