from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest

from tokenbus.core.experiments.records import Row
from tokenbus.core.experiments.report.make import make_report
from tokenbus.core.experiments.report.result import Options, Report
from tokenbus.core.experiments.report.table import Reader, Table

RowMaker = Callable[..., Row]


@pytest.fixture
def row() -> RowMaker:
    """A row that counts, of arm A unless said otherwise."""

    def make(**changes: Any) -> Row:
        arm = changes.get("arm", "A")
        values: dict[str, Any] = {
            "experiment": "cache", "run": 1, "arm": arm, "control": arm == "A", "weight": 0.5, "split": "request", "unit": "0",
            "arrival": 1000.0, "ended": 1001.0, "prompt_tokens": 100, "completion_tokens": 3, "ttft": 0.1, "gap_count": 2,
            "gaps": [20.0, 22.0], "e2e": 0.15, "finish_reason": "length",
        }  # fmt: skip
        return Row(**(values | changes))

    return make


@pytest.fixture
def slices(row: RowMaker) -> Callable[..., list[Row]]:
    """Time slices of two arms in blocks of two, `per_slice` requests each; `change(rng, values, arm)` makes an arm's values
    what they are."""

    def make(blocks: int, per_slice: int, seed: int = 3, slower: float = 1.0, **more: Any) -> list[Row]:
        draw = np.random.default_rng(seed)
        found = []
        for block in range(blocks):
            load = 0.4 * np.sin(block / 5) + draw.normal(0, 0.05)
            for place, arm in enumerate(draw.permutation(2)):
                index = 2 * block + place
                ttft = 0.1 * np.exp(load + draw.normal(0, 0.4, per_slice)) * (slower if arm else 1.0)
                gaps = 20 * np.exp(draw.normal(0, 0.2, (per_slice, 3)))
                for i in range(per_slice):
                    arrival = 60.0 * index + 50.0 * (i + 1) / per_slice
                    values = {
                        "arm": "AB"[arm], "split": "slice", "slice": index, "unit": "", "arrival": arrival, "ended": arrival + 1,
                        "ttft": float(ttft[i]), "gaps": gaps[i].tolist(), "gap_count": 3, "e2e": float(ttft[i]) + 0.1,
                        "prompt_tokens": int(draw.integers(10, 1000)),
                    }  # fmt: skip
                    found.append(row(**(values | more)))
        newest = 2 * blocks
        return [*found, row(split="slice", slice=newest, unit="", arrival=60.0 * newest, ended=60.0 * newest + 1)]

    return make


@pytest.fixture
def table_of() -> Callable[[Iterable[Row]], Table]:
    def make(rows: Iterable[Row], **choice: Any) -> Table:
        reader = Reader(**choice)
        reader.add(rows)
        return reader.table(1)

    return make


@pytest.fixture
def report_of() -> Callable[..., Report]:
    def make(rows: Iterable[Row], **options: Any) -> Report:
        reader = Reader()
        reader.add(rows)
        return make_report(reader, Options(**options))

    return make
