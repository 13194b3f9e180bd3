"""What proposers propose, and how many drafts are worth a wider step."""

from __future__ import annotations

import random

import pytest

from tokenbus.plugins.speculative.adaptive import LONGEST_PAUSE, Length, Record, StepCost, lengths
from tokenbus.plugins.speculative.ngram import Lookup
from tokenbus.plugins.speculative.suffix import Counts, Memory, draft


def test_a_lookup_goes_on_where_the_text_stood_before():
    tokens = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    assert Lookup(2).continuation(tokens, 3) == [4, 5, 6]
    assert Lookup(3).continuation(tokens, 9) == [4, 5, 6, 7, 1, 2, 3, 4, 5]
    assert Lookup(4).continuation(tokens, 3) == []
    assert Lookup(2).continuation([1], 3) == []
    assert Lookup(1).continuation([5, 5], 4) == [5, 5, 5, 5]


def test_the_longest_match_decides_as_far_as_its_rivals_agree():
    tokens = [9, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2, 70, 9, 1, 2]
    assert Lookup(2).continuation(tokens, 1) == [50]
    assert Lookup(2).continuation([*tokens[:-3], 4, 1, 2], 1) == [], "three matches, as long as each other, say three things"
    assert Lookup(2).continuation([9, 1, 2, 50, 60, 8, 1, 2, 50, 70, 4, 1, 2], 5) == [50], "as far as they agree"
    assert lengths([11, 7, 3], tokens, 32)[3] == 3
    assert lengths([], tokens, 32) == {}


def test_a_lookup_that_grows_is_that_of_the_whole_text():
    draw = random.Random(3)
    tokens = [draw.randrange(4) for _ in range(400)]
    growing = Lookup(3)
    for end in range(1, len(tokens)):
        assert growing.continuation(tokens[:end], 5) == Lookup(3).continuation(tokens[:end], 5)


def test_counts_follow_the_likeliest():
    counts, tokens = Counts(), [1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2]
    for place in range(1, len(tokens)):
        counts.add(tokens, place)
    assert counts.likeliest([1, 2], 2) == (8, pytest.approx(2 / 4))
    assert counts.likeliest([5, 5], 2) is None
    assert counts.likeliest([2], 2) is None
    assert draft([counts], tokens, 2, 0.1) == [8, 1]
    assert draft([counts], tokens, 9, 0.7) == []
    assert draft([Counts(), counts], tokens, 1, 0.1) == [8]
    assert draft([], tokens, 3, 0.1) == []


def test_a_memory_forgets_the_oldest_half():
    memory = Memory(20)
    memory.add([1, 2, 3, 4])
    assert draft([memory.young, memory.old], [1, 2], 1, 0.1) == [3]
    memory.add([5, 6, 7, 8, 5, 6, 7, 8])
    assert draft([memory.young, memory.old], [1, 2], 1, 0.1) == [3], "in the old half"
    memory.add(list(range(20, 60)))
    assert draft([memory.young, memory.old], [1, 2], 1, 0.1) == []
    assert len(memory.young) + len(memory.old) < 20 * 5


def test_a_row_costs_what_live_steps_say():
    cost = StepCost()
    assert 0 < cost.threshold(1) < 0.2
    draw = random.Random(1)
    for _ in range(200):
        tokens = draw.randint(1, 12)
        cost.learn(tokens, 0.010 + 0.0005 * tokens)
    assert cost.threshold(1) == pytest.approx(0.0005 / 0.0105, rel=0.05)
    assert cost.threshold(8) == pytest.approx(8 * 0.0005 / 0.014, rel=0.05)


def test_a_row_costs_at_most_its_share():
    """Where time grows with tokens, as with a batch that the machine's arithmetic limits, hardly a draft pays."""
    cost = StepCost()
    for tokens in [1, 2, 4, 8] * 20:
        cost.learn(tokens, 0.010 * tokens)
    assert cost.threshold(4) > 0.9


def test_drafts_become_more_while_they_are_right_and_rare_while_they_are_wrong():
    length = Length(Record())
    first = length.wanted(32, 0.05)
    for _ in range(10):
        length.verified(8, 8)
    assert length.wanted(32, 0.05) == 32 > first > 0
    tried = 0
    for _ in range(400):
        if count := length.wanted(32, 0.05):
            tried += count
            length.verified(count, 0)
    assert tried < 60
    waits = 0
    while not length.wanted(32, 0.05):
        waits += 1
    assert 0 < waits <= LONGEST_PAUSE
    length.verified(1, 1)
    assert length.wanted(32, 0.05) >= 1


def test_a_new_request_starts_with_what_others_found():
    everybody = Record()
    bad, good = Record(1, 100), Record(95, 100)
    assert Length(bad).wanted(16, 0.05) <= 1 < Length(everybody).wanted(16, 0.05) < Length(good).wanted(16, 0.05)
