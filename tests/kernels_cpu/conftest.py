from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from tokenbus.kernels.cpu import lib

NAMES = lib.ISAS  # not asked of the library here: collecting tests must not build it


@pytest.fixture(scope="session")
def library() -> lib.Library:
    found = lib.load()
    if found is None:
        pytest.skip(f"no CPU kernels: {lib.unavailable_reason()}")
    return found


@pytest.fixture(params=NAMES)
def isa(request: pytest.FixtureRequest, library: lib.Library) -> Iterator[str]:
    """Every instruction set of this machine in turn; what was in use before comes back."""
    if request.param not in lib.available_isas():
        pytest.skip(f"this machine has no {request.param}")
    before = lib.isa()
    lib.use_isa(request.param)
    yield request.param
    lib.use_isa(before)


@pytest.fixture
def threads(library: lib.Library) -> Iterator[Callable[[int], None]]:
    """Sets the kernels' thread count; what it was before comes back."""
    before = lib.threads()
    yield lib.set_threads
    lib.set_threads(before)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield
