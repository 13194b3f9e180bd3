"""Multimodal checkpoints: which they are, their text part's config.json, and what their tensors are called. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ModelError

TOWERS = ("vision_config", "audio_config")
"""Keys of a config.json that describe an encoder of something else than text."""
QUANTIZATION = "quantization_config"
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
    ("lm_head.", "lm_head."),
    ("model.layers.", "model.layers."),
    ("model.embed_tokens.", "model.embed_tokens."),
    ("model.norm.", "model.norm."),
)
"""How the names of the text part begin, in the ways that checkpoints have been written, and in a text model's own."""


def is_multimodal(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in TOWERS)


def text_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The text part's config.json, with what it leaves to its class's defaults. Old checkpoints have its keys beside the tower's; some have
    little more in it than what differs from a default. Nothing in it says that weights are quantised (`quantization_of` does). ModelError
    when transformers does not know the model."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{name} can't be run: transformers does not know the multimodal model type {kind!r}")
    try:
        whole: Any = CONFIG_MAPPING[kind].from_dict(without_quantization(config))
        text = whole.get_text_config()
        found: dict[str, Any] = text.to_dict()
    except (KeyError, TypeError, ValueError, AttributeError, StrictDataclassError) as error:
        raise ModelError(f"{name} can't be run: its config.json is malformed ({type(error).__name__}: {error})") from error
    if text is whole:
        raise ModelError(f"{name} can't be run: {kind} has no text part of its own")
    found.pop("architectures", None)
    found["model_type"] = text.model_type
    found["tie_word_embeddings"] = bool(getattr(whole, "tie_word_embeddings", found.get("tie_word_embeddings", False)))
    found["eos_token_id"] = sorted({*_ids(config.get("eos_token_id")), *_ids(found.get("eos_token_id"))})
    return found


def quantization_of(config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json, which that of a multimodal checkpoint may have in its text part; None when there is none.
    ModelError when there are two, and they differ."""
    text = config.get("text_config") if is_multimodal(config) else None
    found = [part[QUANTIZATION] for part in (config, text) if isinstance(part, Mapping) and part.get(QUANTIZATION)]
    if len(found) == 2 and found[0] != found[1]:
        raise ModelError(
            f"{name} can't be run: its config.json has one {QUANTIZATION} for all of it, and another one in its text_config"
        )
    return found[0] if found else None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that says nothing of it: of a quantised multimodal checkpoint what transformers is to know, which has only the tower."""
    found = copy.deepcopy({key: value for key, value in config.items() if key != QUANTIZATION})
    for part in found.values():
        if isinstance(part, dict):
            part.pop(QUANTIZATION, None)
    return found


def text_names(names: Iterable[str]) -> dict[str, str]:
    """A text model's name for each of a multimodal checkpoint's tensors that is of the text part: {text model's: checkpoint's}."""
    found = {}
    for name in names:
        for prefix, own in TEXT_PREFIXES:
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
                break
    return found


def spellings(name: str) -> tuple[str, ...]:
    """What a module of the text part ("model.layers.0.mlp.down_proj", as a text model has it) is called in models as wholes, in each of the
    ways that they have been written; the name itself is one of them."""
    dotted = f"{name}."
    found = [prefix + dotted.removeprefix(own) for prefix, own in TEXT_PREFIXES if dotted.startswith(own)]
    return tuple(dict.fromkeys([name, *(other.removesuffix(".") for other in found)]))


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())
