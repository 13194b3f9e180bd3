from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_kit import VOCAB, Kit, log_softmax, random_logits

from tokenbus.core.errors import FieldError
from tokenbus.plugins.sampling.rows import largest
from tokenbus.plugins.sampling.truncation import keep


def reference(row: np.ndarray, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The documented meaning in plain float64, sorting everything."""
    ids = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    if top_k > 0:
        ids = ids[:top_k]
    if top_p < 1:
        p = np.exp(row[ids].astype(np.float64) - float(row[ids[0]]))
        p /= p.sum()
        count, total = 0, 0.0
        while count < len(ids) and (count == 0 or total < top_p):
            total += p[count]
            count += 1
        ids = ids[:count]
    if min_p > 0:
        ids = [i for i in ids if row[i] >= row[ids[0]] + math.log(min_p)]
    return sorted(ids)


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1, 0), (1, 1, 0), (50, 1, 0), (990, 1, 0), (5000, 1, 0), (0, 0.001, 0), (0, 0.0, 0), (0, 0.3, 0), (0, 0.9, 0), (0, 0.99999, 0),
     (0, 1, 0.05), (0, 1, 1), (40, 0.8, 0), (40, 0.8, 0.1), (3, 0.99, 0.5), (0, 0.95, 0.02)],
)  # fmt: skip
def test_keeps_what_the_reference_keeps(scale, top_k, top_p, min_p):
    for seed in range(10):
        row = random_logits(1, seed, scale)[0]
        if seed % 2:
            row[::3] = -np.inf
        assert sorted(keep(row, top_k, top_p, min_p).tolist()) == reference(row, top_k, top_p, min_p)


@given(
    st.lists(st.sampled_from([-math.inf, -20.0, -9.0, -1.0, 0.0, 1.0, 1.5]), min_size=1, max_size=40).filter(
        lambda v: max(v) > -math.inf
    ),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.0, 0.13, 0.5, 0.77, 0.97]),
    st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_ties_are_decided_by_id(values, top_k, top_p, min_p):
    row = np.array(values, dtype=np.float32)
    assert sorted(keep(row, top_k, top_p, min_p).tolist()) == reference(row, top_k, top_p, min_p)


@given(st.lists(st.integers(-30, 3), min_size=1, max_size=60), st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_largest_is_the_head_of_a_full_sort(values, k):
    row = np.array(values, dtype=np.float32)
    assert largest(row, k).tolist() == sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


def test_only_survivors_are_sampled_and_in_proportion():
    kit, logits = Kit(), random_logits(1, scale=1.0)
    allowed = reference(logits[0] - logits[0].max(), 4, 1, 0)
    draws = [kit.sample(logits, [kit.row([1], top_k=4, seed=seed)]).token_ids[0] for seed in range(2000)]
    assert set(draws) == set(allowed)
    p = np.exp(log_softmax(logits[0][allowed]))
    counts = np.array([draws.count(i) for i in allowed])
    assert ((counts - 2000 * p) ** 2 / (2000 * p)).sum() < 16.3  # 0.1 % bound, 3 degrees of freedom


def test_temperature_comes_first():
    """At temperature 100 the distribution is flat: top_p 0.5 keeps about half of the ids."""
    kit, logits = Kit(), random_logits(1, scale=1.0)
    draws = {kit.sample(logits, [kit.row([1], top_p=0.5, temperature=100.0, seed=s)]).token_ids[0] for s in range(1500)}
    assert 350 < len(draws) <= 500


@pytest.mark.parametrize(
    ("fields", "normal"),
    [
        ({"top_k": -1}, {}), ({"top_k": 0}, {}), ({"top_k": 7}, {"top_k": 7}), ({"top_k": 10**9}, {"top_k": VOCAB}),
        ({"top_p": 1}, {}), ({"top_p": 0.5}, {"top_p": 0.5}), ({"top_p": 0}, {"top_p": 0.0}), ({"min_p": 0}, {}),
        ({"min_p": 1}, {"min_p": 1.0}),
    ],
)  # fmt: skip
def test_good_fields(fields, normal):
    assert Kit().check("sampling.truncation", fields) == normal


@pytest.mark.parametrize(
    "fields",
    [{"top_k": -2}, {"top_k": 1.5}, {"top_k": True}, {"top_k": "5"}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_p": math.nan},
     {"top_p": math.inf}, {"top_p": True}, {"top_p": "1"}, {"top_p": 10**400}, {"min_p": -1}, {"min_p": 2}, {"min_p": [0.1]}],
)  # fmt: skip
def test_bad_fields(fields):
    with pytest.raises(FieldError) as caught:
        Kit().check("sampling.truncation", fields)
    assert caught.value.param == next(iter(fields))
