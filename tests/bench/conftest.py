"""Benchmarks are no part of the package: their folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)
