from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog

from tokenbus.core.commands import replay

sys.path.insert(0, str(Path(__file__).parent))

from stage import Ask, Stage


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stage(name, ...)`: a stage that records into a folder of that name."""

    def make(name: str = "recordings", **options: Any) -> Stage:
        return Stage(tmp_path / name, monkeypatch, **options)

    return make


@pytest.fixture
def quiet_commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands that would set up logging for a process of their own leave this one's alone, but for its level."""
    only_warnings = structlog.make_filtering_bound_logger(logging.WARNING)
    monkeypatch.setattr(replay, "configure_logs", lambda *_: structlog.configure(wrapper_class=only_warnings))
    yield
    structlog.reset_defaults()


def load(count: int, rate: float, seed: int = 1, shared: int = 0) -> list[Ask]:
    """Requests at random times; every second prompt begins with the same `shared` tokens."""
    draw = random.Random(seed)
    asks, at = [], 0.0
    head = [draw.randrange(200, 900) for _ in range(shared)]
    for i in range(count):
        at += draw.expovariate(rate)
        prompt = [draw.randrange(200, 900) for _ in range(draw.randint(5, 60))]
        asks.append(Ask(at, head + prompt if i % 2 else prompt, draw.randint(2, 30)))
    return asks


@pytest.fixture
def some_load() -> Any:
    return partial(load)
