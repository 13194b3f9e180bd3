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


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
