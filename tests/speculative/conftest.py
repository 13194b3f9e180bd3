from __future__ import annotations

from pathlib import Path

import pytest

from tokenbus.core.selftest.tiny import make_tiny, truncate


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def shorter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model without its last layer."""
    return truncate(str(tiny), 2, tmp_path_factory.mktemp("shorter"))
