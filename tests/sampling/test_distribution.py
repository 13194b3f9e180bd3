"""What is drawn follows softmax after temperature and filters: chi-squared tests with fixed seeds, so that they always say the same.

Each test is of the sampler as a whole, with the plugins' filters, against probabilities that are worked out here in float64. The bounds: a
right sampler may look this unlikely once in 10,000 tests, and a wrong one has to look ten thousand times less likely than that.
"""

from __future__ import annotations

import numpy as np
import pytest
from sampling_kit import Kit
from scipy import stats

from tokenbus.core import rng

VOCAB = 24
DRAWS = 5_000
RIGHT, WRONG = 1e-4, 1e-8
LOGITS = np.random.default_rng(7).normal(0, 1.5, VOCAB).astype(np.float32)
KINDS = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 6},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1, "temperature": 1.3},
    "all": {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "bias": {"logit_bias": [[3, 2.0], [5, -100.0]], "temperature": 0.9},
}
SOURCES = {
    "seeds": lambda i: {"seed": i},
    "positions": lambda i: {"seed": 5 + i // 200, "position": 2 + i % 200},  # a row has as many tokens as its position says
    "choices": lambda i: {"seed": 5, "choice": i},
}
"""Where different draws come from: requests, one request's tokens, the answers to one request."""


def expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logit_bias=()):
    """Probabilities as the fields' definitions have them: bias, temperature, then each filter on what is left of the one before."""
    values = logits.astype(np.float64)
    for token, bias in logit_bias:
        values[token] += bias
    chance = np.exp((values - values.max()) / temperature)
    chance /= chance.sum()
    order = np.argsort(-chance, kind="stable")
    if top_k:
        chance[order[top_k:]] = 0
        chance /= chance.sum()
    if top_p < 1:
        before = np.cumsum(chance[order]) - chance[order]
        chance[order[before >= top_p]] = 0
        chance /= chance.sum()
    chance[chance < min_p * chance.max()] = 0
    return chance / chance.sum()


class Rows:
    """Draws from given logits, in batches."""

    def __init__(self):
        self.kit = Kit()

    def draw(self, logits, keys, fields):
        """One token for each row of `logits`; keys: seed, choice and position of each."""
        rows = [
            self.kit.row(
                [1] * key.get("position", 2), 1, request_id=str(i), seed=key["seed"], choice=key.get("choice", 0), **fields
            )
            for i, key in enumerate(keys)
        ]
        outcome = self.kit.sample(logits, rows)
        assert not outcome.errors
        return np.array(outcome.token_ids)

    def same_logits(self, source, fields, draws=DRAWS, size=500):
        keys = [SOURCES[source](i) for i in range(draws)]
        batches = [keys[start : start + size] for start in range(0, draws, size)]
        return np.concatenate([self.draw(np.tile(LOGITS, (len(batch), 1)), batch, fields) for batch in batches])


@pytest.fixture(scope="module")
def rows():
    return Rows()


def likely(counts, chances):
    """How likely counts this far from the expected ones are; 0 when something came that can't."""
    counts, chances = np.ravel(counts), np.ravel(chances)
    if counts[chances == 0].any():
        return 0.0
    want = chances * counts.sum()
    rare = want < 5  # too few for the approximation: taken as one
    seen = np.append(counts[~rare], counts[rare].sum())
    hoped = np.append(want[~rare], want[rare].sum())
    kept = hoped > 0
    return float(stats.chisquare(seen[kept], hoped[kept]).pvalue)


@pytest.mark.parametrize(
    ("kind", "source"), [*((kind, "seeds") for kind in KINDS), *(("all", source) for source in ("positions", "choices"))]
)
def test_one_token(rows, kind, source):
    drawn = rows.same_logits(source, KINDS[kind])
    assert likely(np.bincount(drawn, minlength=VOCAB), expected(LOGITS, **KINDS[kind])) > RIGHT


CHAIN = np.random.default_rng(8).normal(0, 1.2, (6, 6)).astype(np.float32)
"""Logits after each token: the second token depends on the first."""


def two_tokens(rows, fields, keys, between=lambda key: key):
    """The first and the second token of each request; between: what becomes of the key from one to the other."""
    first = rows.draw(np.tile(CHAIN[0], (len(keys), 1)), [{"position": 2, **key} for key in keys], fields)
    after = [{"position": 3, **between(key)} for key in keys]
    second = rows.draw(np.ascontiguousarray(CHAIN[first]), after, fields)
    return first, second


def joint(first, second, size=6):
    return np.bincount(first * size + second, minlength=size * size).reshape(size, size)


def chain_chances(fields):
    return np.stack([expected(CHAIN[0], **fields)[a] * expected(CHAIN[a], **fields) for a in range(6)])


@pytest.mark.parametrize("fields", [{}, {"temperature": 0.7, "top_p": 0.9}])
def test_two_tokens_of_one_request_are_independent_draws(rows, fields):
    first, second = two_tokens(rows, fields, [{"seed": i} for i in range(5000)])
    assert likely(joint(first, second), chain_chances(fields)) > RIGHT


def test_choices_of_one_request_are_independent_draws(rows):
    keys = [{"seed": i} for i in range(5000)]
    three = [rows.draw(np.tile(CHAIN[0], (5000, 1)), [key | {"choice": choice} for key in keys], {}) for choice in range(3)]
    one = expected(CHAIN[0])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert likely(joint(three[a], three[b]), np.outer(one, one)) > RIGHT
        assert stats.chi2_contingency(joint(three[a], three[b])).pvalue > RIGHT
    assert (
        likely(np.bincount(three[0] * 36 + three[1] * 6 + three[2], minlength=216), np.einsum("a,b,c->abc", one, one, one))
        > RIGHT
    )


# ---- the tests can fail: samplers that are wrong in ways that have happened ---------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "top_k"])
def test_a_temperature_that_is_a_quarter_off_is_found(rows, kind, monkeypatch):
    sample = rng.sample
    monkeypatch.setattr(rng, "sample", lambda logits, *key: sample(logits * np.float32(0.75), *key))
    drawn = rows.same_logits("seeds", KINDS[kind])
    assert likely(np.bincount(drawn, minlength=VOCAB), expected(LOGITS, **KINDS[kind])) < WRONG


def test_filters_in_another_order_are_found(rows):
    """Top-p taken before temperature keeps other tokens."""
    fields = {"temperature": 1.7, "top_p": 0.8}
    wrong = expected(LOGITS, top_p=0.8)
    wrong = np.where(wrong > 0, expected(LOGITS, temperature=1.7), 0)
    drawn = rows.same_logits("seeds", fields)
    assert likely(np.bincount(drawn, minlength=VOCAB), expected(LOGITS, **fields)) > RIGHT
    assert likely(np.bincount(drawn, minlength=VOCAB), wrong / wrong.sum()) < WRONG


def test_noise_that_is_used_twice_is_found(rows):
    """Each token by itself is right; only together they are not."""
    fields: dict = {}
    keys = [{"seed": i} for i in range(5000)]
    first, second = two_tokens(rows, fields, keys, between=lambda key: key | {"position": 2})
    assert likely(np.bincount(first, minlength=6), expected(CHAIN[0])) > RIGHT
    assert likely(joint(first, second), chain_chances(fields)) < WRONG


def test_drafts_that_are_taken_too_easily_are_found(rows):
    """A verifier that accepts a likely draft without drawing: the share of that token grows."""
    drawn = rows.same_logits("seeds", {})
    best = int(LOGITS.argmax())
    lenient = np.where(np.arange(DRAWS) % 5 == 0, best, drawn)
    assert likely(np.bincount(lenient, minlength=VOCAB), expected(LOGITS)) < WRONG
