"""Tool calling: the fields `tools`, `tool_choice` and `parallel_tool_calls` of chats.

Core shows the tools to the model (its chat template decides how) and makes the message. What the model writes is read by the parser that
holds the slot "tool_calls": `tools.auto`, which goes by the chat template, or one that was chosen (`--enable tools.mistral`). Calls that
`tool_choice` forces are JSON: the field implies a grammar, which the plugin `structured` holds the answer to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ...core.contexts import Implied
from ...core.errors import FieldError, shorten
from ...core.plugin import Plugin, PluginInfo, hookimpl
from .forced import forced_parser, forced_schema

if TYPE_CHECKING:
    from ...core.contexts import AdmissionContext, ParserContext
    from ...core.output import OutputParser


class ToolSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    strict: Literal["refuse", "unchecked"] = "refuse"
    """What becomes of a tool with `strict: true` while the model is free to write what it likes (`tool_choice` "auto"): its arguments can't
    be promised to keep to the schema. Refused, or taken as if it were not strict."""


class Tools(Plugin):
    """Hands on: tools as the list of their names, parallel_tool_calls only when false, tool_choice only when it forces a call, as {"name":
    the function's, or None for any}."""

    info = PluginInfo(
        name="tools",
        summary="tool calling in chats: tools, tool_choice, parallel_tool_calls",
        scope="request",
        lossless=False,
        claims={"tools", "tool_choice", "parallel_tool_calls"},
        default=True,
    )
    Settings = ToolSettings

    @hookimpl
    def implied_fields(self, fields: dict[str, Any], endpoint: str) -> Implied | None:
        check_endpoint(fields, endpoint)
        tools = fields.get("tools", [])
        forced = forced_choice(fields.get("tool_choice", "auto"), names_of(tools))
        if forced is None:
            return None
        schema = forced_schema(tools, forced["name"], parallel=fields.get("parallel_tool_calls", True) is not False)
        return Implied(by="tool_choice", fields={"structured_outputs": {"json": schema}}, plugin="structured")

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> dict[str, Any]:
        check_endpoint(fields, request.endpoint)
        tools = fields.get("tools", [])
        names = names_of(tools)
        handed_on: dict[str, Any] = {"tools": names} if names else {}
        forced = forced_choice(fields.get("tool_choice", "auto"), names)
        if forced is not None:
            handed_on["tool_choice"] = forced
        elif self.settings.strict == "refuse":
            _refuse_strict(tools)
        parallel = fields.get("parallel_tool_calls", True)
        if not isinstance(parallel, bool):
            raise FieldError("parallel_tool_calls", "must be true or false")
        if not parallel:
            if not names:
                raise FieldError("parallel_tool_calls", "only makes sense with tools")
            handed_on["parallel_tool_calls"] = False
        return handed_on

    @hookimpl(tryfirst=True)
    def tool_parser(self, request: ParserContext) -> OutputParser | None:
        forced = request.fields.get("tool_choice")
        return None if forced is None else forced_parser(forced["name"])


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def check_endpoint(fields: dict[str, Any], endpoint: str) -> None:
    """FieldError for anything but a chat; in a chat core has checked the tools' form before."""
    if endpoint != "chat":
        raise FieldError(min(fields), "is for /v1/chat/completions: no chat template shows tools here")


def _refuse_strict(tools: list[dict[str, Any]]) -> None:
    strict = next((index for index, tool in enumerate(tools) if tool["function"].get("strict")), None)
    if strict is not None:
        raise FieldError(
            f"tools[{strict}].function.strict",
            'can\'t be upheld with tool_choice "auto", where the model writes what it likes: leave it out (an operator may set '
            '[plugins.tools] strict = "unchecked")',
        )


def forced_choice(choice: Any, names: list[str]) -> dict[str, str | None] | None:
    """What `tool_choice` forces: None for "auto", else {"name": the function's, or None for any}. FieldError when it is none of these."""
    if choice == "auto":
        return None
    if choice == "required":
        if not names:
            raise FieldError("tool_choice", '"required" only makes sense with tools')
        return {"name": None}
    shape = 'must be "auto", "none", "required" or {"type": "function", "function": {"name": NAME}}'
    if not isinstance(choice, dict) or choice.get("type") != "function" or choice.keys() - {"type", "function"}:
        raise FieldError("tool_choice", shape)
    function = choice.get("function")
    if not isinstance(function, dict) or function.keys() != {"name"} or not isinstance(function["name"], str):
        raise FieldError("tool_choice.function", shape)
    if function["name"] not in names:
        raise FieldError("tool_choice.function.name", f"{shorten(function['name'])!r} is the name of none of the tools")
    return {"name": function["name"]}
