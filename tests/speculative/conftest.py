from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenbus.core.selftest.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shorter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its last layer."""
    return truncated(tiny, 2, tmp_path_factory.mktemp("shorter"))


def truncated(model: Path, layers: int, folder: Path, **options: Any) -> Path:
    """A copy of a model with its first `layers` layers, saved in `folder`."""
    import transformers

    whole = transformers.AutoModelForCausalLM.from_pretrained(model, num_hidden_layers=layers, **options)
    whole.save_pretrained(folder)
    return folder
