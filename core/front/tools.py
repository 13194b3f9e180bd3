"""Tool definitions, and the calls of earlier turns, as clients send them: checked, and in the form that chat templates expect."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from ..config import LimitsConfig
from ..errors import FieldError, shorten
from .values import check_depth, check_texts

TOOL_KEYS = frozenset({"type", "function"})
FUNCTION_KEYS = frozenset({"name", "description", "parameters", "strict"})
CALL_KEYS = frozenset({"id", "type", "function", "index"})
CALLED_KEYS = frozenset({"name", "arguments"})
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def check_tools(tools: Any, limits: LimitsConfig) -> list[dict[str, Any]]:
    """`tools` without what is null; [] for None. FieldError with the exact place of what is wrong."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise FieldError("tools", f"must be a list, got {kind_of(tools)}")
    if len(tools) > limits.max_tools:
        raise FieldError("tools", f"{len(tools)} tools; at most {limits.max_tools} are allowed")
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if (size := len(msgspec.json.encode(checked))) > limits.max_tools_bytes:
        raise FieldError("tools", f"have {size} bytes as JSON; at most {limits.max_tools_bytes} are allowed")
    seen: set[str] = set()
    for index, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in seen:
            raise FieldError(f"tools[{index}].function.name", f"{name!r} is the name of an earlier tool too")
        seen.add(name)
    return checked


def _check_tool(tool: Any, where: str) -> dict[str, Any]:
    check_depth(where, tool)
    kept = _object(tool, where, TOOL_KEYS)
    if kept.get("type") != "function":
        raise FieldError(f"{where}.type", 'must be "function": there are no other tools here')
    if "function" not in kept:
        raise FieldError(f"{where}.function", "is required: an object with name, description and parameters")
    function = _object(kept["function"], f"{where}.function", FUNCTION_KEYS)
    check_texts(f"{where}.function", function)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise FieldError(f"{where}.function.name", "must be 1 to 128 letters, digits, '_', '-' and '.'")
    if not isinstance(function.get("description", ""), str):
        raise FieldError(f"{where}.function.description", f"must be a string, got {kind_of(function['description'])}")
    if not isinstance(function.get("strict", False), bool):
        raise FieldError(f"{where}.function.strict", f"must be true or false, got {kind_of(function['strict'])}")
    _check_parameters(function.get("parameters", {}), f"{where}.function.parameters")
    return {**kept, "function": function}


def _check_parameters(schema: Any, where: str) -> None:
    if not isinstance(schema, dict):
        raise FieldError(where, f"must be a JSON schema (an object), got {kind_of(schema)}")
    if schema.get("type", "object") != "object":
        raise FieldError(f"{where}.type", 'must be "object": arguments have names')
    if not isinstance(schema.get("properties", {}), dict):
        raise FieldError(f"{where}.properties", f"must be an object, got {kind_of(schema['properties'])}")


def check_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """A message's `tool_calls` for a template, which expects arguments as an object: a JSON text of one becomes it. A text that is no
    JSON object stays as it is (a model wrote it)."""
    if not isinstance(calls, list):
        raise FieldError(where, f"must be a list, got {kind_of(calls)}")
    check_depth(where, calls)
    for index, call in enumerate(calls):
        if not isinstance(call, dict):
            raise FieldError(f"{where}[{index}]", f"must be an object, got {kind_of(call)}")
    return [_check_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _check_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    kept = _object(call, where, CALL_KEYS)
    if kept.get("type", "function") != "function":
        raise FieldError(f"{where}.type", 'must be "function"')
    if not isinstance(kept.get("id", ""), str):
        raise FieldError(f"{where}.id", f"must be a string, got {kind_of(kept['id'])}")
    if "function" not in kept:
        raise FieldError(f"{where}.function", "is required: an object with name and arguments")
    function = _object(kept["function"], f"{where}.function", CALLED_KEYS)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise FieldError(f"{where}.function.name", "must be the name of the function that was called")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, (str, dict)):
        raise FieldError(f"{where}.function.arguments", f"must be a string of JSON, got {kind_of(arguments)}")
    as_object = _as_object(arguments) if isinstance(arguments, str) else arguments
    check_depth(f"{where}.function.arguments", as_object)
    kept.pop("index", None)
    return {**kept, "type": "function", "function": {**function, "arguments": as_object}}


def _as_object(text: str) -> Any:
    try:
        value = json.loads(text or "{}", parse_constant=_refuse, parse_float=_finite)
        msgspec.json.encode(value)  # half a surrogate pair, written as an escape, is no text
    except (ValueError, RecursionError, TypeError, OverflowError):
        return text
    return value if isinstance(value, dict) else text


def _refuse(text: str) -> None:
    raise ValueError(text)


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(text)
    return value


def _object(value: Any, where: str, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FieldError(where, f"must be an object, got {kind_of(value)}")
    kept = {key: item for key, item in value.items() if item is not None}
    if (unknown := next((key for key in kept if key not in known), None)) is not None:
        raise FieldError(f"{where}.{shorten(unknown)}", "unknown field")
    return kept


def kind_of(value: Any) -> str:
    """What JSON calls it."""
    return {dict: "object", list: "list", str: "string", bool: "true or false", int: "number", float: "number"}.get(
        type(value), type(value).__name__
    )
