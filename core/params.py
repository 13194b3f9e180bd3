"""Sampling parameters as a Python caller writes them. See `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import FieldError, shorten

MAX_NAME_CHARS = 200
"""No field and no plugin has a longer name: longer ones are refused before anything looks for what they resemble."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt. Field names and meanings are those of the HTTP API.

    `n`, `max_tokens`, `temperature` and `seed` are core's; every other field is honoured by the plugin that claims it and is an
    error when that plugin is off. `None` (or the neutral default) means "not asked for". `extra` holds fields of third-party plugins.
    """

    n: int = 1
    max_tokens: int | None = None
    """New tokens at most; None: as many as the context has room for."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, ties to the lowest id."""
    seed: int | None = None
    """None: drawn at admission and reported. The same seed gives the same tokens, whatever else runs."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None
    """Seconds until the request ends with a timeout error; None: the server's own limit."""
    features: dict[str, bool] = {}
    """Request-scope plugins to switch for this request only, by name."""
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """FieldError for what core itself can see; the plugins check their own fields at admission, as for HTTP."""
        for name in ("n", "max_tokens", "seed"):
            self._check_type(name, int, "an integer")
        for name in ("temperature", "timeout"):
            self._check_type(name, (int, float), "a number")
        if not isinstance(self.skip_special_tokens, bool):
            raise FieldError("skip_special_tokens", f"must be True or False, got {type(self.skip_special_tokens).__name__}")
        for name in ("features", "extra"):
            self._check_type(name, dict, "a dict")
        check_switches(self.features, "features")
        if not 0.0 <= self.temperature <= 100.0:
            raise FieldError("temperature", f"must be between 0 and 100, got {shorten(self.temperature)}")
        if self.max_tokens is not None and self.max_tokens < 0:
            raise FieldError("max_tokens", f"must be 0 or more, got {shorten(self.max_tokens)}")
        if self.n < 1:
            raise FieldError("n", f"must be at least 1, got {shorten(self.n)}")

    def _check_type(self, name: str, kind: type | tuple[type, ...], what: str) -> None:
        value = getattr(self, name)
        if value is None and name in ("max_tokens", "seed", "timeout"):
            return
        if not isinstance(value, kind) or isinstance(value, bool):
            raise FieldError(name, f"must be {what}, got {type(value).__name__}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise FieldError(name, "must fit 64 bits")


def check_switches(features: Mapping[Any, Any], where: str) -> None:
    """FieldError unless it maps names of plugins to true or false; it names the one that is wrong."""
    for name, wish in features.items():
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS:
            raise FieldError(f"{where}.{name}", "no plugin is called so")
        if not isinstance(wish, bool):
            raise FieldError(f"{where}.{name}", f"must be true or false, got {type(wish).__name__}")


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "top_p": (1.0, 1),
    "min_p": (0.0, 0),
    "repetition_penalty": (1.0, 1),
    "presence_penalty": (0.0, 0),
    "frequency_penalty": (0.0, 0),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "logit_bias": ({},),
    "bad_words": ([], ()),
    "allowed_token_ids": ([], ()),
    "stop": ([], ()),
    "stop_token_ids": ([], ()),
    "tools": ([],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
}
"""Values that ask for nothing, by field; None asks for nothing in every field."""


def asks_for_nothing(field: str, value: Any) -> bool:
    """Whether `value` is the neutral value of `field`: anyone can honour it, so no plugin needs to be on for it.

    An empty string, list or object is not neutral in general: whether it makes sense is for the plugin that owns the field to say.
    """
    return value is None or any(type(value) is type(v) and value == v for v in NEUTRAL.get(field, ()))
