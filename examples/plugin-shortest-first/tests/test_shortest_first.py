from __future__ import annotations

import pytest
from tokenbus_shortest_first import ShortestFirst

from tokenbus.testing import Request, TinyEngine, assert_lossless

NAME = ShortestFirst.info.name


@pytest.fixture
def make():
    made = []

    def make(**settings):
        made.append(TinyEngine(ShortestFirst, settings={NAME: settings}))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def begun(engine):
    """Lengths of the prompts in the order in which they began, one at a time; they came as 30, 10, 20."""
    requests = [Request("x" * length, 2, fields={"repetition_penalty": 1.5}) for length in (30, 10, 20)]
    engine.run(requests, max_running=1)
    return [call.arguments["request"].num_prompt_tokens for call in engine.called("worker_request_added")]


def test_the_shortest_goes_first(make):
    assert begun(make(seconds_per_token=1.0)) == [10, 20, 30]


def test_whoever_came_much_earlier_goes_before_a_shorter_one(make):
    assert begun(make(seconds_per_token=0.001)) == [30, 10, 20]


def test_it_changes_no_answer(make):
    assert_lossless(make(), NAME)
