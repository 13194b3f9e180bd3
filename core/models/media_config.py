"""Multimodal checkpoints: which they are, their text part's config.json, and what their tensors are called. Imports no torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import ModelError

TOWERS = ("vision_config", "audio_config")
"""Keys of a config.json that describe an encoder of something else than text."""
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
    little more in it than what differs from a default. ModelError when transformers does not know the model, or it is quantised."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        raise ModelError(f"{name} can't be run: its weights are quantised ({method}), which is read of text models only")
    kind = config.get("model_type", "")
    if kind not in CONFIG_MAPPING:
        raise ModelError(f"{name} can't be run: transformers does not know the multimodal model type {kind!r}")
    try:
        whole: Any = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(config)))
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


def text_names(names: Iterable[str]) -> dict[str, str]:
    """A text model's name for each of a multimodal checkpoint's tensors that is of the text part: {text model's: checkpoint's}."""
    found = {}
    for name in names:
        for prefix, own in TEXT_PREFIXES:
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = name
                break
    return found


def _ids(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value or ())
