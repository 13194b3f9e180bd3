"""What bytes a token stands for. With them, decoding is exact, incremental, and O(1) a token.

Two kinds of vocabulary cover nearly all models: byte-level BPE (GPT-2's alphabet, one printable character a byte) and SentencePiece
(spaces as U+2581, bytes outside the vocabulary as <0xAB>). For any other kind `supported` is False and whoever decodes has to ask the
tokenizer itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class _Form:
    """How the tokenizer's decoder makes bytes of tokens."""

    kind: Literal["byte_level", "sentencepiece"]
    space: str = ""
    """What stands for a space."""
    bytes_spelled: bool = False
    """<0xAB> is a byte."""
    strips_first_space: bool = False


class TokenBytes:
    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = special_ids
        self._form = _form(json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else None)
        self.strips_first_space = self._form is not None and self._form.strips_first_space
        """The first space of a whole text is the tokenizer's own addition, not the text's."""
        self._known: dict[int, bytes] = {}

    @property
    def supported(self) -> bool:
        return self._form is not None

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
        added = self._added.get(token_id)
        token = self._backend.id_to_token(token_id) if added is None else added
        if token is None:
            return b""
        form = self._form
        if form is None:
            return token.encode() if added is not None else self._backend.decode([token_id], skip_special_tokens=False).encode()
        if form.kind == "byte_level":
            alphabet = byte_alphabet()
            if added is None and all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()
        if token_id in self.special_ids:
            return token.encode()
        # Gemma's runs of spaces are added tokens, spelled like ordinary ones
        match = _BYTE_TOKEN.fullmatch(token) if form.bytes_spelled else None
        return bytes((int(match[1], 16),)) if match else token.replace(form.space, " ").encode()


def _form(decoder: dict[str, Any] | None) -> _Form | None:
    """None: tokens have no fixed bytes, or not in a way known here."""
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [part["type"] for part in parts]
    if "ByteLevel" in kinds:
        return _Form("byte_level") if set(kinds) <= {"ByteLevel", "Fuse", "ByteFallback"} else None
    space, strips, fused = "", False, False
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": replaced}, "content": " "} if not space:
                space = replaced
            case {"type": "Metaspace", "replacement": replaced} if not space:
                space, strips = replaced, part.get("prepend_scheme") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                strips = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "ByteFallback"}:
                continue
            case _:
                return None
    if not space:
        return None
    return _Form("sentencepiece", space, bytes_spelled="ByteFallback" in kinds, strips_first_space=strips)


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
