"""Checks of request fields that the sampling plugins share. Each raises FieldError naming the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...core.errors import FieldError, shorten


def number(field: str, value: Any, low: float, high: float) -> float:
    """A finite number in [low, high]. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(field, f"must be a number, got {_kind(value)}")
    if not low <= value <= high:  # NaN is not inside either
        raise FieldError(field, f"must be between {low:g} and {high:g}, got {shorten(value)}")
    return float(value)


def integer(field: str, value: Any, low: int, high: int | None = None, *, what: str = "") -> int:
    """An integer in [low, high]. `what` says where the upper bound comes from."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(field, f"must be an integer, got {_kind(value)}")
    if value < low:
        raise FieldError(field, f"must be {low} or more, got {shorten(value)}")
    if high is not None and value > high:
        raise FieldError(field, f"must be at most {high}{what and f' ({what})'}, got {shorten(value)}")
    return value


def boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FieldError(field, f"must be true or false, got {_kind(value)}")
    return value


def sequence(field: str, value: Any, limit: int) -> Sequence[Any]:
    """A list of at most `limit` entries."""
    if not isinstance(value, (list, tuple)):
        raise FieldError(field, f"must be a list, got {_kind(value)}")
    if len(value) > limit:
        raise FieldError(field, f"has {len(value)} entries, the limit is {limit}")
    return value


def token_id(field: str, value: Any, vocab_size: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(field, f"token ids must be integers, got {_kind(value)}")
    if not 0 <= value < vocab_size:
        raise FieldError(field, f"token id {shorten(value)} is outside the vocabulary of {vocab_size}")
    return value


def token_ids(field: str, value: Any, limit: int, vocab_size: int) -> list[int]:
    """Distinct ids, ascending."""
    return sorted({token_id(field, v, vocab_size) for v in sequence(field, value, limit)})


def text(field: str, value: Any, max_chars: int) -> str:
    """A string of 1 to `max_chars` characters."""
    if not isinstance(value, str):
        raise FieldError(field, f"must hold strings, got {_kind(value)}")
    if not value:
        raise FieldError(field, "must not hold an empty string")
    if len(value) > max_chars:
        raise FieldError(field, f"a string has {len(value)} characters, the limit is {max_chars}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise FieldError(field, "a string has half of a surrogate pair in it, which is no character") from None
    return value


def leaves_something(fields: Mapping[str, Any], vocab_size: int, banned: Collection[int] = ()) -> bool:
    """Whether allowed_token_ids and bad_words of one id, as handed on, and `banned` leave any token at all."""
    gone = {word[0] for word in fields.get("bad_words", ()) if len(word) == 1}.union(banned)
    allowed = fields.get("allowed_token_ids", range(vocab_size))
    return len(gone) < len(allowed) or not gone.issuperset(allowed)


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
