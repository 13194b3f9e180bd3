"""Text to token ids, chat messages to token ids, token ids to bytes. Loads in about 0.1 s: no transformers import on the usual path.

A `Tokenizer` wraps the Rust tokenizer of a folder's tokenizer.json; transformers is imported only when the folder has none.
Encoding of more than about a millisecond runs on a pool thread with a call that releases the interpreter lock.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from ..contexts import Vocabulary
from ..errors import ModelError
from ..models.resolve import ResolvedModel, read_json
from .token_bytes import TokenBytes
from .values import check_text

if TYPE_CHECKING:
    import tokenizers

INLINE_CHARS = 1500
"""Texts up to this length are encoded on the event loop: measured below 1 ms."""
POOL_THREADS = 2
"""Long texts encoded at the same time; more would take cores from the engine."""


class Tokenizer:
    """The served model's tokenizer. Safe to use from several threads at once."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._lock = threading.Lock()
        self._literal: _LiteralEncoder | None = None
        self._limiter: anyio.CapacityLimiter | None = None
        self._vocabulary: Vocabulary | None = None
        self.settings = settings
        """tokenizer_config.json."""
        added = backend.get_added_tokens_decoder()
        self.added_tokens: frozenset[str] = frozenset(token.content for token in added.values())
        """Tokens beyond the ordinary vocabulary, as they are spelled; the control markers are among them."""
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self.markers: dict[str, int] = {added[token_id].content: token_id for token_id in self.special_ids}
        """Control markers: special tokens as they are spelled, with their ids."""
        self.bytes = TokenBytes(backend, self.special_ids)
        bos = _token_text(settings.get("bos_token"))
        self.bos_token = bos
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.special_names: dict[str, str] = {
            key: text
            for key in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
            if (text := _token_text(settings.get(key))) is not None
        }
        """What chat templates may refer to by name."""
        self._marker_pattern = _any_of(self.markers)

    def encode_now(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a short text, here and now. Control markers in it become control tokens. Never two start tokens at the beginning.

        FieldError for a text with lone surrogates."""
        return self._one_bos(self._encode(text, add_special_tokens))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode_now`, on a pool thread when the text is long."""
        if len(text) <= INLINE_CHARS:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        return self._one_bos(await self._in_pool(self._encode, text, add_special_tokens))

    async def encode_with_literals(self, text: str, literals: dict[str, str], *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a rendered template in which each key of `literals` stands for a text that must stay plain text.

        Markers elsewhere in `text` become control tokens. Everything else is as one `encode` call of the whole text."""
        return self._one_bos(await self._in_pool(self._encode_literals, text, literals, add_special_tokens))

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[int] | None:
        """Where in `text` each of its ids begins, as the tokenizer itself says: of use when it changes texts before it splits them. None
        when these are not the text's ids."""
        for add_special_tokens in (True, False):
            encoded = self._backend.encode(text, add_special_tokens=add_special_tokens)
            if self._one_bos(encoded.ids) == list(token_ids):
                starts, place = [], 0
                for start, end in encoded.offsets[len(encoded.ids) - len(token_ids) :]:
                    place = start if end > start else place  # (0, 0): added, not in the text
                    starts.append(place)
                return starts
        return None

    def hide_markers(self, text: str, nonce: str, literals: dict[str, str]) -> str:
        """`text` with control markers replaced by placeholders, recorded in `literals`.

        A placeholder is built from `nonce` and survives what templates do to texts (JSON, trimming): letters and digits only."""
        if self._marker_pattern is None:
            return text

        def hide(match: re.Match[str]) -> str:
            placeholder = f"Hidden{nonce}x{self.markers[match[0]]:x}x"
            literals[placeholder] = match[0]
            return placeholder

        return self._marker_pattern.sub(hide, text)

    def token_id(self, token: str) -> int | None:
        """The id of a token that is spelled so; None when there is none."""
        return self._backend.token_to_id(token)

    def vocabulary(self, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
        """Every token's bytes, for a model with this many logits. Some 0.1 s the first time, then the same object."""
        with self._lock:
            known = self._vocabulary
            if known is None or (len(known.tokens), known.eos_token_ids) != (vocab_size, tuple(eos_token_ids)):
                known = self._vocabulary = Vocabulary(
                    tokens=[self.bytes[token_id] for token_id in range(vocab_size)],
                    special_ids=self.special_ids,
                    eos_token_ids=tuple(eos_token_ids),
                    exact=self.bytes.supported,
                    tokenize=lambda text: self.encode_now(text, add_special_tokens=False),
                )
            return known

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token, as the vocabulary spells it: no text has fewer tokens than its length divided by this."""
        return max(map(len, self._backend.get_vocab()), default=1)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_text("prompt", text)
        if len(text) <= INLINE_CHARS:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # the batch call releases the interpreter lock, the single one does not (tokenizers 0.23)
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _encode_literals(self, text: str, literals: dict[str, str], add_special_tokens: bool) -> list[int]:
        with self._lock:
            if self._literal is None:
                self._literal = _LiteralEncoder(self._backend, self.markers)
        return self._literal.encode(text, literals, add_special_tokens)

    async def _in_pool(self, call: Any, *arguments: Any) -> list[int]:
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(POOL_THREADS)
        return await anyio.to_thread.run_sync(call, *arguments, limiter=self._limiter)

    def _one_bos(self, ids: list[int]) -> list[int]:
        """A text that begins with the start token, and a tokenizer that adds one: one of the two goes."""
        if self.bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == self.bos_id and self._adds_bos():
            return ids[1:]
        return ids

    def _adds_bos(self) -> bool:
        return self._backend.encode("").ids[:1] == [self.bos_id]


class _LiteralEncoder:
    """A copy of the tokenizer that reads control markers as plain text, and knows a private alias for each instead.

    So template and content go through one call, and whatever depends on a word's place in the text (a SentencePiece prefix, say)
    comes out as in an ordinary call."""

    def __init__(self, backend: tokenizers.Tokenizer, markers: dict[str, int]) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        nonce = secrets.token_hex(8)
        self._aliases = {marker: f"\ue002{nonce}{token_id:x}\ue003" for marker, token_id in markers.items()}
        added = backend.get_added_tokens_decoder()
        self._backend.add_tokens([_alias(added[token_id], self._aliases[marker]) for marker, token_id in markers.items()])
        self._ids = {self._backend.token_to_id(alias): markers[marker] for marker, alias in self._aliases.items()}
        self._pattern = _any_of(markers)

    def encode(self, text: str, literals: dict[str, str], add_special_tokens: bool) -> list[int]:
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._aliases[match[0]], text)
        placeholders = _any_of(literals)
        if placeholders is not None:
            text = placeholders.sub(lambda match: literals[match[0]], text)
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        ids = self._ids
        return [ids.get(token_id, token_id) for token_id in encoded]


def _alias(token: Any, text: str) -> Any:
    import tokenizers

    return tokenizers.AddedToken(
        text, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
    )


def _any_of(texts: Any) -> re.Pattern[str] | None:
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def load_tokenizer(model: ResolvedModel) -> Tokenizer:
    """Blocking, about 0.1 s. ModelError when the folder holds no tokenizer that can be read."""
    settings_file = model.path / "tokenizer_config.json"
    settings = read_json(settings_file) if settings_file.is_file() else {}
    _fill_special(settings, model.path / "special_tokens_map.json")
    path = model.path / "tokenizer.json"
    return Tokenizer(_from_json(path) if path.is_file() else _from_transformers(model), settings)


def _from_json(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelError(f"{path} can't be read as a tokenizer: {error}") from None


def _from_transformers(model: ResolvedModel) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(model.path), local_files_only=True)
    except Exception as error:
        raise ModelError(f"{model.path} holds no tokenizer that can be loaded: {error}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{model.path}: its tokenizer ({type(loaded).__name__}) has no fast form")
    return backend


def _fill_special(settings: dict[str, Any], path: Path) -> None:
    if path.is_file():
        for key, value in read_json(path).items():
            settings.setdefault(key, value)
