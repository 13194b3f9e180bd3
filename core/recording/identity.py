"""Which model and kernels a run was made with: what must be the same for its steps to give the same tokens again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

from ..config import Config
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
    """What the decoder's layers run on here, under this configuration: "cpu avx2", or "torch" and its version."""
    from ...kernels.cpu import lib

    if config.model.kernels != "torch" and lib.load() is not None:
        return f"cpu {lib.isa()}"
    return f"torch {importlib.metadata.version('torch')}"
