from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, which transformers does: see kernels_triton
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # before torch: several processes share the cores here, and none should spin

import pytest
import structlog
import torch

ROOT = Path(__file__).parent.parent


class _RootIsAFolder:
    """The repository root is the package `tokenbus`; to pytest it is a plain folder, whatever the checkout is called."""

    @pytest.hookimpl
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RootIsAFolder())
    configure = structlog.configure
    # a logger that keeps what was configured at its first line would go on past every `capture_logs` of later tests
    structlog.configure = lambda *args, **kwargs: configure(*args, **{**kwargs, "cache_logger_on_first_use": False})


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes may hold the time (gzip, WAV), and names must be the same in every process that runs tests."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def on_a_gpu() -> bool:
    """Triton kernels run on a GPU here: there is one, and they are not interpreted (scripts/gpu sets TRITON_INTERPRET=0)."""
    return os.environ["TRITON_INTERPRET"] != "1" and torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` need a GPU."""
    if on_a_gpu():
        return
    skip = pytest.mark.skip(reason="needs a GPU, and TRITON_INTERPRET=0")
    for item in items:
        if item.get_closest_marker("cuda") is not None:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton kernels run: on the CPU in the interpreter, and on a GPU in tests that `-m cuda` selects."""
    if request.param == "cpu" and os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("Triton's kernels run on the CPU in the interpreter only (TRITON_INTERPRET=1)")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
