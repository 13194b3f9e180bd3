"""The equivalence suite with media: any two ways of running meet in some cell, with any kind of sampling, and change no answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.selftest.matrix import Matrix
from tokenbus.core.selftest.stand import Ask, Stand
from tokenbus.core.selftest.ways import Way, pairwise_ways
from tokenbus.kernels.cpu import lib

KINDS = ("greedy", "seeded", "truncated", "penalties", "logprobs", "stop ids", "n=3")
CELLS = pairwise_ways(KINDS, text=False)
FREE = [(way, kind) for way, kind in CELLS if not way.proposer.startswith("speculative.")]
"""Without proposers that look for repetitions."""
SIZES = ([0], [1, 0], [2], [])
"""Of the items in each prompt."""
FAMILIES = {"qwen2-vl": True, "gemma3": False}
"""M-RoPE; and spans that attend in both directions. Whether answers are of few ids: Gemma's would only repeat one."""


@pytest.fixture(scope="module")
def matrix_of(tiny_media: Any) -> Iterator[Callable[[str], Matrix]]:
    made: dict[str, Matrix] = {}

    def get(family: str) -> Matrix:
        if family not in made:
            tiny = tiny_media(family)
            prompts = [tiny.prompt(sizes, seed=seed) for seed, sizes in enumerate(SIZES)]
            asks = [Ask(prompt.tokens, media=prompt.media) for prompt in prompts]
            config = from_mapping({"model": {"model": str(tiny.path), "dtype": "float32"}, "cache": {"block_size": 8}}, "test")
            stand = Stand(config, enable=("multimodal",))
            made[family] = Matrix(stand, KINDS, (), 28, few=FAMILIES[family], prompts=asks)
        return made[family]

    yield get
    for matrix in made.values():
        matrix.stand.close()


def name(value: Any) -> str:
    return value.name if isinstance(value, Way) else value


def check(matrix: Matrix, way: Way, kind: str) -> None:
    (cell,) = matrix.run(way, (kind,))
    assert cell.passed, cell
    assert any("tokens of media" in fired for fired in cell.fired)


@pytest.mark.skipif(lib.load() is None, reason="no CPU kernels")
@pytest.mark.parametrize(("way", "kind"), CELLS, ids=name)
def test_any_two_meet(matrix_of: Callable[[str], Matrix], way: Way, kind: str) -> None:
    check(matrix_of("qwen2-vl"), way, kind)


@pytest.mark.long
@pytest.mark.parametrize(("way", "kind"), FREE, ids=name)
def test_any_two_meet_where_items_attend_in_both_directions(matrix_of: Callable[[str], Matrix], way: Way, kind: str) -> None:
    check(matrix_of("gemma3"), way, kind)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_answers_are_not_trivial(matrix_of: Callable[[str], Matrix], family: str) -> None:
    matrix = matrix_of(family)
    assert matrix.kinds == list(KINDS)
    assert len({tuple(answer.tokens) for answer in matrix.plain}) == len(matrix.plain)
    assert sum(bool(question.ask.media) for question in matrix.questions) == 3 * len(matrix.questions) // 4
