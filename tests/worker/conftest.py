from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenbus.core.worker import runner
from tokenbus.kernels.torch_ops.limits import MachineLimits

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _no_measuring(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners start without measuring the machine, but for tests that ask for it."""
    if "measures" not in request.fixturenames:
        monkeypatch.setattr(runner, "measure_limits", lambda *_: MachineLimits(1.0, 1.0))


@pytest.fixture
def measures() -> None:
    """Marks a test whose runner measures the machine for real."""
