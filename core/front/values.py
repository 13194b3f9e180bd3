"""Bounds on free-form values that clients send, wherever they come in: how deep they may nest, and that their texts are texts."""

from __future__ import annotations

from typing import Any

from ..errors import FieldError

MAX_DEPTH = 64
"""Lists and objects inside each other. Whoever handles such a value may recurse."""
SURROGATE = "holds half of a surrogate pair (U+D800 to U+DFFF alone), which is no character: send valid UTF-8"


def check_depth(field: str, value: Any) -> None:
    """FieldError when lists and objects stand in each other more than MAX_DEPTH deep."""
    level = [value] if isinstance(value, (dict, list, tuple)) else []
    for _ in range(MAX_DEPTH):
        if not level:
            return
        level = [child for item in level for child in _children(item) if isinstance(child, (dict, list, tuple))]
    if level:
        raise FieldError(field, f"is nested more than {MAX_DEPTH} levels deep")


def check_text(field: str, text: str) -> None:
    """FieldError for a text that can't be encoded."""
    if not is_text(text):
        raise FieldError(field, SURROGATE)


def check_texts(field: str, value: Any) -> None:
    """`check_text` for every text inside a value, keys too. The value is no deeper than `check_depth` allows."""
    if isinstance(value, str):
        check_text(field, value)
    elif isinstance(value, dict):
        for key, item in value.items():
            check_texts(field, key)
            check_texts(field, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_texts(field, item)


def is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value
