"""A vocabulary of bytes and a few longer tokens, grammars over it, and texts drawn at random from their masks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tokenbus.core.config import LimitsConfig
from tokenbus.core.contexts import AdmissionContext, Vocabulary
from tokenbus.plugins.structured.compile_process import compiled, source
from tokenbus.plugins.structured.fields import Wish, source_of
from tokenbus.plugins.structured.masks import Grammars, Progress

LONGER = [
    b'":',
    b'": ',
    b'", "',
    b'{"',
    b"true",
    b"null",
    b"al",
    b"ice",
    b"\xc3",
    b"\xa9\xc3",
    b"\xf0\x9f\x98",
    b"\n  ",
    b"    ",
    b"12",
    b"-",
    b"-0",
]
END, OTHER_END, START = 257, 258, 259
TOKENS = [*(bytes([i]) for i in range(256)), b"", b"<end>", b"<other_end>", b"<start>", *LONGER, b"", b""]
SIZE = len(TOKENS)


def tokenize(text: str) -> list[int]:
    return list(text.encode())


VOCABULARY = Vocabulary(
    tokens=TOKENS, special_ids=frozenset({END, OTHER_END, START}), eos_token_ids=(END, OTHER_END), exact=True, tokenize=tokenize
)
CONTEXT = AdmissionContext(
    prompt_len=3,
    max_tokens=100,
    vocab_size=SIZE,
    max_model_len=512,
    eos_token_ids=(END, OTHER_END),
    temperature=1.0,
    limits=LimitsConfig(),
    tokenize=tokenize,
    vocabulary=lambda: VOCABULARY,
)


def grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY, 16)


SHARED = grammars()


def library_form(kind: str, value: Any) -> str:
    """As the plugin hands it on. FieldError or ValueError when it is refused."""
    made = source_of(Wish(f"structured_outputs.{kind}", kind, value), 100_000, 1000)
    grammar = source(made.kind, made.text)
    compiled(SHARED.words()[0], grammar)
    return grammar


def progress(kind: str, value: Any, shared: Grammars = SHARED) -> Progress:
    return Progress(shared, library_form(kind, value))


def fits(state: Progress, text: str | bytes) -> bool:
    """Whether the text may stand, byte by byte, and the answer may end there."""
    data = text.encode() if isinstance(text, str) else text
    mask = state.mask(list(data))
    return mask is not None and bool(mask[END]) and bool(mask[OTHER_END])


def draw(state: Progress, seed: int, limit: int = 400) -> bytes | None:
    """A text made of ids that the masks allow, or None when it had not ended by `limit` tokens."""
    chance = random.Random(seed)
    output: list[int] = []
    while len(output) < limit:
        mask = state.mask(output)
        assert mask is not None
        allowed = np.flatnonzero(mask).tolist()
        assert allowed
        if END in allowed and (chance.random() < 0.5 or set(allowed) == {END, OTHER_END}):
            return b"".join(TOKENS[token] for token in output)
        inside = [token for token in allowed if token not in (END, OTHER_END)]
        assert START not in inside
        assert not [token for token in inside if not TOKENS[token]]
        closing = [token for token in inside if TOKENS[token] in (b'"', b"}", b"]")]
        plain = [token for token in inside if TOKENS[token].isalnum()]
        pool = closing if closing and chance.random() < 0.4 else plain if plain and chance.random() < 0.6 else inside
        output.append(chance.choice(pool))
    return None
