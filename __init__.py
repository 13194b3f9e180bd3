"""Tokenbus: an inference engine for language models in which every feature is a plugin that can be switched on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .core.errors import TokenbusError
from .core.params import SamplingParams
from .core.plugin import HOOK_API_VERSION, Plugin, PluginInfo, Stash, StashKey, hookimpl

if TYPE_CHECKING:
    from .core.offline import LLM, Completion, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "HOOK_API_VERSION",
    "LLM",
    "Completion",
    "Plugin",
    "PluginInfo",
    "RequestOutput",
    "SamplingParams",
    "Stash",
    "StashKey",
    "TokenbusError",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    """The offline engine is imported when it is asked for: plugins and clients import this module and should not pay for it."""
    if name in ("LLM", "Completion", "RequestOutput"):
        from .core import offline

        return getattr(offline, name)
    raise AttributeError(f"module 'tokenbus' has no attribute {name!r}")
