from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from equivalence_stand import Stand

from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.kernels.cpu import lib


@pytest.fixture(scope="session", params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """The kernel sets, each by itself: bits are equal within one, not between two."""
    if request.param == "cpu" and lib.load() is None:
        pytest.skip(f"no CPU kernels: {lib.unavailable_reason()}")
    return request.param


@pytest.fixture(scope="session")
def tiny_stand(tiny_path: str, kernels: Any) -> Iterator[Stand]:
    with Stand(tiny_path, kernels) as stand:
        yield stand


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="session")
def demo_stand(kernels: Any) -> Iterator[Stand]:
    with Stand("demo", kernels) as stand:
        yield stand
