from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chromium


@pytest.fixture(scope="session")
def serve_demo() -> Any:
    """`with serve_demo(*flags) as server`: a real server with the demo model (tests/api/demo_process.py)."""
    path = Path(__file__).parent.parent / "api" / "demo_process.py"
    spec = importlib.util.spec_from_file_location("tokenbus_dashboard_tests_demo", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.serve_demo


@pytest.fixture
async def tab(anyio_backend: str, tmp_path: Path) -> Any:
    program = chromium.find_chromium()
    if program is None:
        pytest.skip(f"none of these browsers is installed: {', '.join(chromium.NAMES)}")
    async with chromium.open_tab(program, tmp_path) as tab:
        await tab.size(1280, 1000)
        yield tab
