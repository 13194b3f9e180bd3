"""What is asked: kinds of sampling, and prompts that are the same as ids and as text."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..front.tokenizer import Tokenizer
from .stand import Answer, Ask, Stand

REGEX = "([abc][0-9]){10}"
WORDLESS = 9
"""Id of the first letter where there is no tokenizer."""


@dataclass(frozen=True)
class Kind:
    """How tokens are chosen, and what ends the answer."""

    temperature: float = 0.0
    seed: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    few: dict[str, float] | None = None
    """Letters and their bias where text of a few ids is wanted; None: those of all kinds."""
    varied: float = 0.0
    """Frequency penalty where text of a few ids is wanted: a model that is sure of itself would only repeat one."""
    choices: int = 1
    ends: str = ""
    """What ends it, chosen by the answer that would come without: "stop", "stop_token_ids", "grammar" or nothing."""


KINDS: dict[str, Kind] = {
    "greedy": Kind(fields={"logprobs": 3}, varied=0.4),
    "seeded": Kind(0.9, 11, {"logprobs": 2, "top_p": 0.95}),
    "truncated": Kind(1.3, 12, {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 1}),
    "penalties": Kind(0.7, 13, {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logprobs": 1}),
    "bias": Kind(0.8, 14, {"logit_bias": {"19": 4.0, "18": -100}, "min_tokens": 4, "logprobs": 1}),
    "logprobs": Kind(0.6, 15, {"logprobs": 5, "prompt_logprobs": 2}),
    "stop ids": Kind(1.0, 16, {"logprobs": 1}, {"a": 60, "b": 60, "c": 58.5, " ": 57, "d": 56}, 1.0, ends="stop_token_ids"),
    "stop strings": Kind(1.0, 17, {"logprobs": 1}, varied=0.6, ends="stop"),
    "grammar": Kind(1.0, 18, {"logprobs": 1}, {"a": 60, "b": 60, "c": 58, "1": 60, "0": 59, "d": 62}, ends="grammar"),
    "n=3": Kind(1.0, 19, {"logprobs": 1}, choices=3),
}
FEW = {"a": 60, "b": 60, "c": 60, " ": 58}
"""Text of a few ids repeats itself, with exceptions: proposers are sometimes right."""


@dataclass
class Question:
    """One request of a kind, as ids and, where there is a tokenizer, as text."""

    kind: str
    ask: Ask
    """With ids."""
    text: str | None
    unheld: Answer | None = None
    """What comes without the grammar, or without the stop."""


def possible(stand: Stand, name: str) -> bool:
    """Whether the plugins that are on honour what the kind asks for, and the model can do it."""
    kind, front, tokenizer = KINDS[name], stand.front, stand.front.tokenizer
    if kind.ends == "grammar" and not (tokenizer and tokenizer.bytes.supported and stand.info.eos_token_ids):
        return False
    if kind.ends == "stop" and tokenizer is None:
        return False
    end = {"grammar": {"structured_outputs": REGEX}, "": {}}.get(kind.ends, {kind.ends: []})
    return front.honours(kind.fields | end)


def questions(
    stand: Stand, names: Sequence[str], lengths: Sequence[int], new: int, *, few: bool, plain: Callable[[Ask], Answer]
) -> list[Question]:
    """Requests of each kind, prompts of all lengths, the first of every kind before the second ones.

    lengths: tokens, about. new: tokens of an answer at most. few: answers of few ids (not for a test of what a model says).
    plain: answers a request by itself."""
    draw = random.Random(5)  # noqa: S311 - repeatable, not secret
    made = []
    for length in lengths:
        for name in names:
            kind = KINDS[name]
            text, prompt = _prompt(stand, draw, length)
            options = {"max_tokens": new, "temperature": kind.temperature, "seed": kind.seed, "group": f"{name}-{length}"}
            for choice in range(kind.choices):
                ask = Ask(prompt, choice=choice, fields=_fields(stand, kind, few=few), **options)
                made.append(_ended(kind, Question(name, ask, text), plain))
    return made


def questions_with(
    stand: Stand, names: Sequence[str], prompts: Sequence[Ask], new: int, *, few: bool, plain: Callable[[Ask], Answer]
) -> list[Question]:
    """The same about prompts that are given, with their media, as ids."""
    made = []
    for number, prompt in enumerate(prompts):
        for name in names:
            kind = KINDS[name]
            options = {"max_tokens": new, "temperature": kind.temperature, "seed": kind.seed, "group": f"{name}-{number}"}
            for choice in range(kind.choices):
                ask = replace(prompt, choice=choice, fields=_fields(stand, kind, few=few), **options)
                made.append(_ended(kind, Question(name, ask, None), plain))
    return made


def _fields(stand: Stand, kind: Kind, *, few: bool) -> dict[str, Any]:
    fields = dict(kind.fields)
    if few:
        letters = kind.few or FEW
        ids = _letters(stand.front.tokenizer, letters)
        fields |= {"frequency_penalty": kind.varied} if kind.varied else {}
        fields["logit_bias"] = {str(ids[letter]): bias for letter, bias in letters.items()} | fields.get("logit_bias", {})
    if kind.ends != "grammar" and stand.front.honours({"ignore_eos": True}):
        fields["ignore_eos"] = True
    return fields


def _letters(tokenizer: Tokenizer | None, letters: Iterable[str]) -> dict[str, int]:
    """Ids that stand for them; any where there is no tokenizer, or one without words."""
    found = {} if tokenizer is None else {letter: tokenizer.encode_now(letter, add_special_tokens=False) for letter in letters}
    if all(found.values()) and found:
        return {letter: ids[-1] for letter, ids in found.items()}
    return {letter: WORDLESS + place for place, letter in enumerate(letters)}


def _ended(kind: Kind, question: Question, plain: Callable[[Ask], Answer]) -> Question:
    """With what ends it. Stops are such that the answer is long: what comes first as late as possible, with something behind it."""
    if not kind.ends:
        return question
    ask, unheld = question.ask, plain(question.ask)
    if kind.ends == "grammar":
        end: dict[str, Any] = {"structured_outputs": {"regex": REGEX}}
    elif kind.ends == "stop_token_ids":
        tokens = unheld.tokens[:-4]
        end = {"stop_token_ids": [max(set(tokens), key=tokens.index)]}
    else:
        end = {"stop": [_late(unheld.text)]}
    return replace(question, ask=replace(ask, fields=ask.fields | end), unheld=unheld)


def _late(text: str) -> str:
    """A piece of a text that is not at its end, and has not been there before."""
    for size in (3, 4, 2, 1):
        for start in range(max(0, len(text) - size - 4), -1, -1):
            piece = text[start : start + size]
            if len(piece) == size and "\ufffd" not in piece and text.find(piece) == start:
                return piece
    return "\n\n"


def _prompt(stand: Stand, draw: random.Random, length: int) -> tuple[str | None, list[int]]:
    """Random words of the vocabulary, as text and as ids."""
    tokenizer, ids = stand.front.tokenizer, _ids(stand, draw, length + 8)
    if tokenizer is None:
        return None, ids[:length]
    text = _text(tokenizer, ids)
    prompt = tokenizer.encode_now(text)
    while len(prompt) > length and len(text) > 1:
        text = text[:-1]
        prompt = tokenizer.encode_now(text)
    return text, prompt


def words(stand: Stand, draw: random.Random, count: int) -> str:
    """A text of about so many random tokens. Only where there is a tokenizer."""
    tokenizer = stand.front.tokenizer
    assert tokenizer is not None
    return _text(tokenizer, _ids(stand, draw, count))


def _ids(stand: Stand, draw: random.Random, count: int) -> list[int]:
    size = stand.info.vocab_size
    return [draw.randrange(min(20, size - 1), size) for _ in range(count)]


def _text(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    pieces = [tokenizer.bytes.shown(token, True).decode(errors="ignore") for token in ids]
    return "".join(piece for piece in pieces if piece.isprintable()) or "a"
