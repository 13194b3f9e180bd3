"""Prompts with pictures and sounds: tiny ones, made here, which go the way of a Python caller's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import TokenbusError
from ..front.media import expand, place
from ..media import Kind, MediaPart, PreparedMedia
from .kinds import words
from .stand import TOKEN_BUDGET, Ask, Stand

SIZES = ((40, 30), (40, 30), (90, 64))
"""Width and height of the pictures."""
RATE = 16_000
SAMPLES = (6_000, 6_000, 15_000)
"""Of the sounds, at RATE."""


@dataclass
class MediaPrompts:
    asks: list[Ask] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    """What there is in them."""
    problem: str = ""
    """Why there are none, although the model reads some."""


def media_prompts(stand: Stand, new: int) -> MediaPrompts:
    """Of each kind that the model reads: one item, another one of the same size behind the same text, two of them, and the text alone.
    Nothing where the model reads text only, or the plugin is off. new: tokens of an answer."""
    found = MediaPrompts()
    if stand.runner.media is None:
        return found
    if stand.front.tokenizer is None:
        found.problem = "the model has no tokenizer that can be loaded, which places them in prompts"
        return found
    problems = []
    for kind, items in _items().items():
        try:
            prepared = stand.front.prepare_media([MediaPart(kind, kind, item, own=True) for item in items])
            asks = _asks(stand, prepared)
        except TokenbusError as error:
            problems.append(error.message)
            continue
        fitting = [ask for ask in asks if _fits(stand, ask, new)]
        if not any(ask.media for ask in fitting):
            problems.append(f"a prompt with one {kind} and an answer are longer than {stand.max_model_len} tokens")
            continue
        found.asks += fitting
        found.kinds.append(kind)
    if not found.asks:
        found.problem = "; ".join(dict.fromkeys(problems))
    return found


def _items() -> dict[Kind, list[Any]]:
    """Noise, so that no two are alike."""
    import numpy as np

    draw = np.random.default_rng(4)
    pictures = [draw.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in SIZES]
    sounds = [(draw.uniform(-0.5, 0.5, count).astype(np.float32), RATE) for count in SAMPLES]
    return {"image": pictures, "audio": sounds}


def _asks(stand: Stand, prepared: Sequence[PreparedMedia]) -> list[Ask]:
    draw = random.Random(6)  # noqa: S311 - repeatable, not secret
    first, other, last = prepared
    before, between, behind = (words(stand, draw, count) for count in (7, 4, 5))
    with_one = [_ask(stand, f"{before}{one.marker}{behind}", [one]) for one in (first, other)]
    with_two = _ask(stand, f"{before}{last.marker}{between}{first.marker}{behind}", [last, first])
    return [*with_one, with_two, _ask(stand, before + behind, [])]


def _ask(stand: Stand, text: str, prepared: Sequence[PreparedMedia]) -> Ask:
    tokenizer = stand.front.tokenizer
    assert tokenizer is not None
    if not prepared:
        return Ask(tokenizer.encode_now(text))
    ids = tokenizer.encode_now(expand(text, prepared, "prompt"))
    return Ask(ids, media=place(ids, prepared, tokenizer.token_id))


def _fits(stand: Stand, ask: Ask, new: int) -> bool:
    whole = max((item.length for item in ask.media if item.bidirectional), default=0)
    return len(ask.prompt) + new <= stand.max_model_len and whole <= TOKEN_BUDGET
