"""Request bodies: their types, and how a JSON body becomes one. Only what an endpoint honours itself is named here; every other field
is left to the plugins (see `core/front/admission.py`), which refuses what nobody claims."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ..errors import FieldError, RequestError, shorten
from ..front.admission import fields_of
from ..front.values import MAX_DEPTH, SURROGATE, check_depth, is_text
from ..params import MAX_NAME_CHARS

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
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

    features: dict[str, Any] | None = None
    """Checked by `check_switches`."""
    trusted_content: bool | None = None
    """Chat: control markers inside contents become control tokens."""


class Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    seed: Int64 | None = None
    n: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = None
    """Seconds until the request ends with a timeout error."""
    tokenbus: Options | None = None
    prompt_logprobs: Int64 | None = None
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; on unless said otherwise."""


class CompletionBody(Body, kw_only=True):
    prompt: Any = None
    """str, list[str], list[int] or list[list[int]]; see `_check_prompt_shape`."""
    echo: bool | None = None
    logprobs: Int64 | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add what it adds (a start token); on unless said otherwise."""


class ChatBody(Body, kw_only=True):
    messages: list[Any] | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    """Tools that the chat template shows, as for /v1/chat/completions."""
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
    features: dict[str, Any]
    """Checked by `check_switches`."""


class SettingsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    settings: dict[str, Any]
    """Checked by `live_settings.check`."""


class ExperimentBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    action: Literal["start", "ramp", "stop", "rollback"]
    traffic: float | None = None
    """Share of units that take part, for start and ramp."""


B = TypeVar("B", bound=msgspec.Struct)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The body as an object, no value of which nests too deeply. RequestError when it isn't valid JSON (NaN and the like are not) or not
    an object; FieldError where the field is known."""
    try:
        data = msgspec.json.decode(raw)
    except RecursionError:
        raise _too_deep(raw) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _explained(raw, error) from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    for name, value in data.items():
        if name != "prompt":  # has a shape of its own, and may be long
            check_depth(name, value)
    return data


def _too_deep(raw: bytes) -> RequestError:
    """Of a body that nests too deeply to be read at all: its last key before that."""
    depth, key = 0, b""
    for match in _STRING_OR_BRACKET.finditer(raw):
        if match[0][:1] == b'"':
            key = match[0][1:-1] if depth == 1 else key
        else:
            depth += 1 if match[0] in b"[{" else -1
            if depth > MAX_DEPTH:
                break
    reason = f"is nested more than {MAX_DEPTH} levels deep"
    return FieldError(key.decode(errors="replace"), reason) if key else RequestError(f"the body {reason}")


def _explained(raw: bytes, error: Exception) -> RequestError:
    """Python's own reader takes numbers beyond any float and half surrogate pairs: what it reads tells where they stand."""
    try:
        data = json.loads(raw, parse_int=lambda text: math.inf if len(text) > 400 else 0, parse_constant=_refuse)
        found = next(_unusable(data, ""), None)
    except (ValueError, RecursionError):
        found = None
    if found is None:
        return RequestError(f"the body is not valid JSON: {shorten(error)}")
    path, reason = found
    return FieldError(path, reason) if path else RequestError(f"the body {reason}")


def _refuse(text: str) -> None:
    raise ValueError(text)


def _unusable(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(where, why) of numbers out of range and of texts that are none."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "holds a number that is out of range"
    elif isinstance(value, str) and not is_text(value):
        yield path, SURROGATE
    elif isinstance(value, dict):
        for key, item in value.items():
            inside = f"{path}.{key}" if path else key
            if not is_text(key):
                yield inside, SURROGATE
            yield from _unusable(item, inside)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unusable(item, f"{path}[{index}]")


def convert(data: dict[str, Any], body: type[B]) -> B:
    """Strict: no string for a number. FieldError names the field."""
    if body is CompletionBody:
        _check_prompt_shape(data.get("prompt"))
    try:
        return msgspec.convert({name: value for name, value in data.items() if value is not None}, body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error)) from None


def leftover(data: dict[str, Any], body: type[msgspec.Struct]) -> dict[str, Any]:
    """What is left to the plugins. FieldError for a name that is longer than any field's."""
    fields = fields_of(data, body.__struct_fields__)
    if (name := next((name for name in fields if len(name) > MAX_NAME_CHARS), None)) is not None:
        raise FieldError(name, "unknown field")
    return fields


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
