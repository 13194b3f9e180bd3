"""The parser that a model's chat template and vocabulary ask for beyond doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from . import hermes, llama3_json, mistral

if TYPE_CHECKING:
    from ...core.contexts import ParserContext
    from .marked import MarkedCalls


class Auto(Plugin):
    info = PluginInfo(
        name="tools.auto",
        summary="reads tool calls by the built-in parser that the chat template asks for",
        scope="step",
        lossless=True,
        slot="tool_calls",
        default=True,
    )

    @hookimpl
    def tool_parser(self, request: ParserContext) -> MarkedCalls | None:
        """None unless exactly one fits."""
        made = [family.make(request) for family in (hermes, llama3_json, mistral) if family.fits(request)]
        return made[0] if len(made) == 1 else None
