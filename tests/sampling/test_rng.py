from __future__ import annotations

import numpy as np
import pytest

from tokenbus.core import rng

M0, M1 = 0xD2E7470EE14C6C93, 0xCA5A826395121157
W0, W1 = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
MASK = (1 << 64) - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x64-10 after the paper, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = M0 * c0, M1 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & MASK, (p0 >> 64) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + W0) & MASK, (k1 + W1) & MASK
    return c0, c1, c2, c3


@pytest.mark.parametrize(("seed", "position", "choice"), [(0, 0, 0), (123, 77, 3), (2**64 - 1, 2**40, 15), (-1, 5, 0)])
def test_words_are_philox_keyed_by_seed_position_choice(seed, position, choice):
    key = (seed & MASK, choice)
    expected = []
    for block in range(1, 4):
        for word in philox((block, 0, position, 0), key):
            expected += [word & 0xFFFFFFFF, word >> 32]
    assert rng.words(seed, position, choice, 21).tolist() == expected[:21]


def test_first_words_are_what_they_always_were():
    assert rng.words(123, 4, 1, 4).tolist() == WORDS


WORDS = [1800076799, 3598279945, 2386607305, 1991072856]


def test_keys_do_not_collide():
    keys = [(s, p, c) for s in (0, 1, 2) for p in (0, 1, 2) for c in (0, 1, 2)]
    assert len({tuple(rng.words(*key, 8).tolist()) for key in keys}) == len(keys)


def test_a_longer_vocabulary_keeps_the_numbers():
    assert np.array_equal(rng.words(1, 2, 3, 1001)[:77], rng.words(1, 2, 3, 77))


def test_floats_at_the_ends():
    ends = np.array([0, 2**32 - 1], dtype=np.uint32)
    assert rng.uniforms(ends).tolist() == [2.0**-33, 1 - 2.0**-33]
    low, high = rng.gumbels(ends)[1], rng.gumbels(ends)[0]
    assert (round(low, 2), round(high, 2)) == (-3.13, 22.87)


def test_gumbels_are_gumbel():
    """Kolmogorov-Smirnov distance from exp(-exp(-g)); 1.63/sqrt(n) is the 1 % bound."""
    n = 200_000
    g = np.sort(rng.gumbels(rng.words(42, 0, 0, n)))
    distance = np.abs(np.exp(-np.exp(-g)) - np.arange(1, n + 1) / n).max()
    assert distance < 1.63 / np.sqrt(n)


def full(logits: np.ndarray, seed: int, position: int, choice: int) -> int:
    return int(
        (logits.astype(np.float64) - float(logits.max()) + rng.gumbels(rng.words(seed, position, choice, len(logits)))).argmax()
    )


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 5.0, 300.0])
@pytest.mark.parametrize("shift", [0.0, 5000.0])
def test_sample_is_the_full_computation(scale, shift):
    for trial in range(60):
        logits = (np.random.default_rng(trial).normal(0, scale, 5000) + shift).astype(np.float32)
        if trial % 3 == 0:
            logits[np.random.default_rng(trial).random(5000) < 0.99] = -np.inf
        assert rng.sample(logits, trial, 7, 1) == full(logits, trial, 7, 1)


def test_banned_ids_never_come():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[3, 40]] = (-1e30, -1e30)
    assert {rng.sample(logits, seed, 0, 0) for seed in range(50)} == {3, 40}


def test_distribution_of_samples():
    """Chi-squared over 8 ids, 20,000 draws, fixed seeds: 24.3 is the 0.1 % bound for 7 degrees of freedom."""
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2], dtype=np.float32)
    n = 20_000
    counts = np.bincount([rng.sample(logits, 9, position, 0) for position in range(n)], minlength=8)
    expected = n * np.exp(logits) / np.exp(logits).sum()
    assert ((counts - expected) ** 2 / expected).sum() < 24.3


def test_positions_and_choices_are_independent():
    logits = np.zeros(16, dtype=np.float32)
    a = np.array([rng.sample(logits, 1, p, 0) for p in range(4000)])
    b = np.array([rng.sample(logits, 1, p, 1) for p in range(4000)])
    for x, y in ((a, b), (a[1:], a[:-1])):
        assert abs((x == y).mean() - 1 / 16) < 0.015  # four standard deviations
