"""Which model and kernels a run was made with: what must be the same for its steps to give the same tokens again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

from ..config import Config
from ..device import batch_invariant, device_kind
from ..errors import ModelError


def model_hash(config: Config) -> str:
    """SHA-256 of the model's config.json, as it is resolved; "" when there is no such model here."""
    from ..models.resolve import resolve

    try:
        found = resolve(config.model.model)
    except (ModelError, OSError):
        return ""
    return hashlib.sha256(json.dumps(found.config, sort_keys=True).encode()).hexdigest()


def version() -> str:
    """Of Tokenbus."""
    from ... import __version__

    return __version__


def layers(config: Config) -> str:
    """What the decoder's layers run on here, under this configuration: "cpu avx2", or "torch" and its version; on a GPU its name, and what
    the products' bits depend on: "triton 3.6.0, torch 2.11.0, NVIDIA H200, batch invariant"."""
    from ...kernels.cpu import lib

    kind, wish = device_kind(config.model.device), config.model.kernels
    if kind == "cuda" or wish == "triton":
        names = ["torch"] if wish == "torch" else ["triton", "torch"]
        parts = [f"{name} {importlib.metadata.version(name)}" for name in names]
        return ", ".join([*parts, *_device(kind), *_invariance(config.model.batch_invariant, kind)])
    if config.model.kernels != "torch" and lib.load() is not None:
        return f"cpu {lib.isa()}"
    return f"torch {importlib.metadata.version('torch')}"


def _device(kind: str) -> list[str]:
    if kind != "cuda":
        return []
    import torch

    return [torch.cuda.get_device_name()] if torch.cuda.is_available() else []


def _invariance(setting: str, kind: str) -> list[str]:
    return ["batch invariant"] if setting != "off" and batch_invariant(setting, kind) else []
