"""A few rows in which every two values of different axes meet: most interactions are between two features."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

V = TypeVar("V", bound=Hashable)


def pairwise(axes: Mapping[str, Sequence[V]]) -> list[dict[str, V]]:
    """Rows that hold one value of each axis. Greedy: each row begins with a pair that is still to come, and takes on every other axis the
    value that brings most new pairs, the first of equals. At least two axes, none of them empty."""
    order = {name: place for place, name in enumerate(axes)}

    def pair(one: str, value: V, other: str, with_value: V) -> tuple[str, V, str, V]:
        return (one, value, other, with_value) if order[one] < order[other] else (other, with_value, one, value)

    open_pairs = dict.fromkeys(
        pair(one, value, other, with_value)
        for one, other in itertools.combinations(axes, 2)
        for value, with_value in itertools.product(axes[one], axes[other])
    )
    rows: list[dict[str, V]] = []
    while open_pairs:
        one, value, other, with_value = next(iter(open_pairs))
        row = {one: value, other: with_value}
        for name in axes:
            if name not in row:
                gains = {v: sum(pair(name, v, n, row[n]) in open_pairs for n in row) for v in axes[name]}
                row[name] = max(gains, key=lambda v: gains[v])
        for one, other in itertools.combinations(axes, 2):
            open_pairs.pop(pair(one, row[one], other, row[other]), None)
        rows.append({name: row[name] for name in axes})
    return rows
