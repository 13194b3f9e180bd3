"""Rows of one run of one experiment as columns: what is compared, and how many rows were left out for which reason.

Rows are read one at a time and only numbers are kept, so that files much larger than memory's share of Python objects can be
read: about 100 bytes a row, and 4 for each inter-token latency.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StartupError
from ..records import Row
from .clusters import Design, Floats, Indices

MOST_CLUSTERS = 400
"""Where an arm has more, units are put together by their hash into this many groups; a sum of independent units is as good a
cluster."""

MOST_SLICES = 64
"""Of one block."""


@dataclass
class ArmFacts:
    """What is known of an arm beside its compared rows."""

    name: str
    control: bool = False
    weight: float = 0.0
    """The newest row's that isn't excluded."""
    config: str = ""
    configs: int = 0
    """Different ones in this run."""
    washout: int = 0
    excluded: Counter[str] = field(default_factory=Counter)
    until: float = math.inf
    """Unix seconds of the first request that a guard rail or a rollback gave the control's switches; the arm is compared up to
    there."""
    older: int = 0
    """Rows from before the newest change of any arm's configuration."""
    unfinished: int = 0
    """Rows of slices that have no finished partner: the newest block, and blocks that lack an arm."""


@dataclass(frozen=True)
class Table:
    """Compared rows as columns of one length; times in ms. `arm` indexes `arms`, whose first is the control; the others come by
    name."""

    experiment: str
    run: int
    split: str
    shared_steps: bool
    own_engines: bool
    """Arms ran at the same time, each on an engine of its own; `slice` is then the time window."""
    arms: tuple[ArmFacts, ...]
    arm: Indices
    cluster: Indices
    """Within `design`: of the row's arm, or of all arms where they are paired."""
    design: Design
    units: tuple[int, ...]
    """Different units of each arm: users, requests or slices."""
    columns: dict[str, Floats]
    gaps: Floats
    """ms, of all rows one after the other."""
    gap_row: Indices
    """For each gap its row."""

    def __len__(self) -> int:
        return len(self.arm)

    @property
    def by_slice(self) -> bool:
        return self.split == "slice"


COLUMNS = (
    "arrival", "ended", "prompt_tokens", "cached_tokens", "completion_tokens", "ttft", "e2e", "failed", "preemptions",
    "draft_tokens", "accepted_tokens", "allocation_failures", "weight",
)  # fmt: skip


class Reader:
    """Collects rows; `table()` gives the newest run, or the one asked for. StartupError where there is nothing to compare."""

    def __init__(self, experiment: str | None = None, run: int | None = None) -> None:
        self._experiment, self._run = experiment, run
        self._names: set[str] = set()
        self._begin(run)

    def _begin(self, run: int | None) -> None:
        self._current = run
        self._facts: dict[str, ArmFacts] = {}
        self._configs: dict[str, dict[str, float]] = {}
        self._units: dict[str, int] = {}
        self._split, self._shared, self._own = "", False, False
        self._columns = {name: array("d") for name in COLUMNS}
        self._arm, self._unit, self._slice = array("l"), array("l"), array("l")
        self._gaps, self._gap_counts = array("f"), array("l")

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self._experiment in (None, row.experiment):
                self._names.add(row.experiment)
                if self._run is None and (self._current is None or row.run > self._current):
                    self._begin(row.run)  # rows of different runs are not to be mixed
                if row.run == self._current:
                    self._take(row)

    def _take(self, row: Row) -> None:
        facts = self._facts.setdefault(row.arm, ArmFacts(row.arm))
        facts.control = row.control
        self._split, self._shared, self._own = row.split, self._shared or row.shared_steps, row.own_engine
        if row.excluded:
            facts.excluded[row.excluded] += 1
            if row.excluded == "tripped":
                facts.until = min(facts.until, row.arrival)
            return
        if row.washout:
            facts.washout += 1
            return
        facts.weight, facts.config = row.weight, row.config
        seen = self._configs.setdefault(row.arm, {})
        seen[row.config] = min(row.arrival, seen.get(row.config, math.inf))
        self._arm.append(list(self._facts).index(row.arm))
        unit = row.unit if row.own_engine else row.cluster
        self._unit.append(self._units.setdefault(unit, len(self._units)))
        self._slice.append(-1 if row.slice is None else row.slice)
        for name, column in self._columns.items():
            column.append(_number(getattr(row, name)))
        self._gaps.extend(row.gaps)
        self._gap_counts.append(len(row.gaps))

    def table(self, seed: int) -> Table:
        facts = list(self._facts.values())
        if len(self._names) > 1:
            raise StartupError(f"these rows are of several experiments: choose one of {', '.join(sorted(self._names))}")
        if not facts:
            asked = [
                f"of {kind} {value}"
                for kind, value in (("experiment", self._experiment), ("run", self._run))
                if value is not None
            ]
            raise StartupError(" ".join(["there are no rows", *asked, "to report on"]))
        new = np.array(sorted(range(len(facts)), key=lambda i: (not facts[i].control, facts[i].name)))
        arms = tuple(facts[i] for i in new)
        arm = np.argsort(new)[np.frombuffer(self._arm, dtype=np.int_).astype(np.int64)]
        unit, slices = (np.frombuffer(x, dtype=np.int_).astype(np.int64) for x in (self._unit, self._slice))
        keep, block = self._keep(arms, arm, slices)
        arm, unit = arm[keep], unit[keep]
        cluster, design = _design(
            arm, unit if block is None else block[keep], len(arms), block is not None, list(self._units), seed
        )
        counts = np.frombuffer(self._gap_counts, dtype=np.int_).astype(np.int64)
        position = np.cumsum(keep) - 1
        of_kept = np.repeat(keep, counts)
        columns = {name: np.frombuffer(column, dtype=np.float64)[keep].copy() for name, column in self._columns.items()}
        for name in ("ttft", "e2e"):
            columns[name] *= 1e3
        return Table(
            experiment=next(iter(self._names)),
            run=self._current or 0,
            split=self._split,
            shared_steps=self._shared,
            own_engines=self._own,
            arms=arms,
            arm=arm,
            cluster=cluster,
            design=design,
            units=tuple(len(np.unique(unit[arm == i])) for i in range(len(arms))),
            columns=columns | {"slice": slices[keep].astype(np.float64), "unit": unit.astype(np.float64)},
            gaps=np.frombuffer(self._gaps, dtype=np.float32).astype(np.float64)[of_kept],
            gap_row=np.repeat(position, counts)[of_kept],
        )

    def _keep(self, arms: tuple[ArmFacts, ...], arm: Indices, slices: Indices) -> tuple[NDArray[np.bool_], Indices | None]:
        """Which rows to compare, and the block of each row where slices come in blocks of all arms."""
        since = -math.inf
        for one in arms:
            seen = self._configs.get(one.name, {})
            one.configs = len(seen)
            if len(seen) > 1:
                since = max(since, *seen.values())
        keep = np.asarray(np.frombuffer(self._columns["arrival"], dtype=np.float64) >= since)
        for i, one in enumerate(arms):
            one.older = int(np.sum(~keep & (arm == i)))
        if not (self._split == "slice" or self._own) or not keep.any():
            return keep, None
        whole = keep & (slices < slices.max())  # the newest may still be running: only its quickest rows are here
        block = slices if self._own else _blocks(arm[whole], slices[whole], slices, [one.weight for one in arms])
        if block is not None:
            seen = [np.isin(block, block[whole & (arm == i)]) for i in range(len(arms))]
            whole &= np.logical_and.reduce(seen)
        for i, one in enumerate(arms):
            one.unfinished = int(np.sum(keep & ~whole & (arm == i)))
        return whole, block


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _blocks(arm: Indices, slices: Indices, all_slices: Indices, weights: list[float]) -> Indices | None:
    """The block of each of `all_slices`, if arms took turns in blocks, each as often in a block as its weight says: then they
    can be compared in pairs. The block's size is the smallest that fits what was seen."""
    pairs = np.unique(np.stack([slices, arm]), axis=1)
    if len(weights) < 2 or len(np.unique(pairs[0])) < pairs.shape[1]:
        return None
    for size in range(2, MOST_SLICES + 1):
        share = np.array(weights) * size
        if np.allclose(share, np.round(share), atol=1e-6) and min(share) >= 1 - 1e-6:
            counts = np.zeros((len(weights), int(pairs[0].max()) // size + 1))
            np.add.at(counts, (pairs[1], pairs[0] // size), 1)
            if (counts <= np.round(share)[:, None]).all():
                return all_slices // size
    return None


def _design(arm: Indices, unit: Indices, arms: int, paired: bool, names: list[str], seed: int) -> tuple[Indices, Design]:
    """Clusters numbered from 0 within each arm, or over all arms where they are paired; at most MOST_CLUSTERS."""
    cluster = np.zeros(len(unit), dtype=np.int64)
    sizes = [0] * arms
    for chosen, indices in (
        [(np.ones(len(unit), dtype=bool), range(arms))] if paired else [(arm == i, [i]) for i in range(arms)]
    ):
        values, numbers = np.unique(unit[chosen], return_inverse=True)
        if len(values) > MOST_CLUSTERS and not paired:
            groups = np.array([zlib.crc32(names[value].encode()) % MOST_CLUSTERS for value in values])
            values, numbers = np.unique(groups[numbers], return_inverse=True)
        elif len(values) > MOST_CLUSTERS:
            numbers, values = numbers * MOST_CLUSTERS // len(values), values[:MOST_CLUSTERS]
        cluster[chosen] = numbers
        for index in indices:
            sizes[index] = len(values)
    return cluster, Design(tuple(sizes), paired, seed)
