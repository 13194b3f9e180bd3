from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: several processes share the cores here, and none should spin

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
