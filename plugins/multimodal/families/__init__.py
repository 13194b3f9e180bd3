"""The families of models that read media, by `model_type` of their config.json. Modules are imported when a model needs them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..family import Family

FAMILIES: dict[str, str] = {
    "gemma3": "gemma3:Gemma3",
    "idefics3": "idefics3:Idefics3",
    "llava": "llava:Llava",
    "llava_next": "llava_next:LlavaNext",
    "qwen2_5_vl": "qwen_vl:QwenVL",
    "qwen2_audio": "qwen2_audio:Qwen2Audio",
    "qwen2_vl": "qwen_vl:QwenVL",
    "qwen3_vl": "qwen_vl:QwenVL",
    "qwen3_vl_moe": "qwen_vl:QwenVL",
    "smolvlm": "idefics3:Idefics3",
}
"""model_type -> "module:class" in this folder."""


def family_of(folder: Path, config: Mapping[str, Any]) -> Family | None:
    """The model's family; None for a model that reads text only (or whose family nobody has written yet)."""
    place = FAMILIES.get(str(config.get("model_type")))
    if place is None:
        return None
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f".{module}", __name__), name)(folder)
