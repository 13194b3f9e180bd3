"""Checks of request fields that the sampling plugins share. Each raises FieldError naming the field."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...core.errors import FieldError


def number(field: str, value: Any, low: float, high: float, *, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `above`. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FieldError(field, f"must be a number, got {_kind(value)}")
    inside = low < value <= high if above else low <= value <= high
    if not inside or not math.isfinite(value):
        bounds = f"above {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise FieldError(field, f"must be {bounds}, got {value}")
    return float(value)


def integer(field: str, value: Any, low: int, high: int | None = None, *, what: str = "") -> int:
    """An integer in [low, high]. `what` says where the upper bound comes from."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise FieldError(field, f"must be an integer, got {_kind(value)}")
    if value < low:
        raise FieldError(field, f"must be {low} or more, got {value}")
    if high is not None and value > high:
        raise FieldError(field, f"must be at most {high}{what and f' ({what})'}, got {value}")
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
        raise FieldError(field, f"token id {value} is outside the vocabulary of {vocab_size}")
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
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
