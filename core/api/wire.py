"""Request bodies: their types, and how a JSON body becomes one. Only what an endpoint honours itself is named here; every other field
is left to the plugins (see `core/front/admission.py`), which refuses what nobody claims."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ..errors import FieldError, RequestError
from ..front.admission import fields_of

_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """One more chunk before the end, with the totals and no choices."""
    continuous_usage_stats: bool | None = None
    """Running totals in every chunk."""
    include_obfuscation: bool | None = None
    """Accepted: nothing is ever padded here."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body's `tokenbus` object."""

    features: dict[str, bool] = {}
    trusted_content: bool = False
    """Chat: control markers inside contents become control tokens."""


class Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    """Seconds until the request ends with a timeout error."""
    tokenbus: Options | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; on unless said otherwise."""


class CompletionBody(Body, kw_only=True):
    prompt: Any = None
    """str, list[str], list[int] or list[list[int]]; see `_check_prompt_shape`."""
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add what it adds (a start token); on unless said otherwise."""


class ChatBody(Body, kw_only=True):
    messages: list[Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool = False


class FeaturesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    features: dict[str, bool]


B = TypeVar("B", bound=msgspec.Struct)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The body as an object; RequestError when it isn't valid JSON (NaN and the like are not), or not an object."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    return data


def convert(data: dict[str, Any], body: type[B]) -> B:
    """Strict: no string for a number. FieldError names the field."""
    if body is CompletionBody:
        _check_prompt_shape(data.get("prompt"))
    try:
        return msgspec.convert({name: value for name, value in data.items() if value is not None}, body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def leftover(data: dict[str, Any], body: type[msgspec.Struct]) -> dict[str, Any]:
    return fields_of(data, body.__struct_fields__)


def _field_error(text: str) -> RequestError:
    match = _AT.match(text)
    path = match["path"] if match and match["path"] else None
    if path is None:
        named = re.search(r"field `([^`]+)`", text)
        return FieldError(named[1], "unknown field" if "unknown" in text else "is required") if named else RequestError(text)
    what = match["what"] if match else text
    if unknown := re.search(r"unknown field `([^`]+)`", what):
        return FieldError(f"{path}.{unknown[1]}", "unknown field")
    return FieldError(path, what[0].lower() + what[1:])


def _check_prompt_shape(prompt: Any) -> None:
    """msgspec has no unions of several list types."""
    if prompt is None:
        raise FieldError("prompt", "is required")
    if isinstance(prompt, str):
        return
    shape = "must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if not isinstance(prompt, list):
        raise FieldError("prompt", shape)
    if not prompt:
        raise FieldError("prompt", "is empty: there is nothing to start from")
    kinds = {type(item) for item in prompt}
    if kinds in ({str}, {int}):
        return
    if kinds != {list} or any({type(item) for item in ids} - {int} for ids in prompt):
        raise FieldError("prompt", shape)
