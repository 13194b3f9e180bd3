"""Counter-based random numbers for sampling, and Gumbel-max over one row of logits.

The numbers of a token depend on (seed, position, choice, token id) and on nothing else: no state is kept, so batch mates, chunk borders,
preemption, and restarts can't move them.

    Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), through numpy's raw output, whose
    stream numpy keeps stable:

        key      = (seed mod 2**64, choice)
        counter  = (block, 0, position, stream)       block counts up as words are drawn; one block is four 64-bit words
        word j   = 64 bits = tokens 2j (low half) and 2j + 1 (high half), 32 bits x each

    Different (seed, choice) are different keys; different (position, stream) are counters that differ in a word which `block` never
    reaches (a vocabulary would need 2**64 blocks). So no two keys share a number.

    w = (x + 0.5) / 2**32                             in (0, 1), exact in float64, never 0 or 1
    g = -log(-log1p(-w))                              standard Gumbel, in [-3.14, 22.88]

The tail that decides is the one near w = 0, where resolution is finest relative to g. A token of probability p is drawn with a relative
error of about 2**-32 / p.
"""

from __future__ import annotations

import numpy as np

MASK64 = (1 << 64) - 1
SAMPLING = 0
"""The stream that draws tokens. Other uses of randomness take other numbers."""

_SCALE = 2.0**-32
_SLACK = 1.001
"""Covers the float32 rounding of the candidate test; the decision itself is made in float64."""


def words(seed: int, position: int, choice: int, size: int, stream: int = SAMPLING) -> np.ndarray:
    """uint32 [size]: number i belongs to token id i."""
    key = np.array([seed & MASK64, choice & MASK64], dtype=np.uint64)
    counter = np.array([0, 0, position & MASK64, stream], dtype=np.uint64)
    philox = np.random.Philox(key=key, counter=counter)
    raw = philox.random_raw((size + 1) // 2)
    return raw.astype("<u8", copy=False).view("<u4")[:size]


def uniforms(x: np.ndarray) -> np.ndarray:
    """float64 in (0, 1) for uint32 words."""
    return (x.astype(np.float64) + 0.5) * _SCALE


def gumbels(x: np.ndarray) -> np.ndarray:
    """Standard Gumbel numbers, float64, for uint32 words."""
    return -np.log(-np.log1p(-uniforms(x)))


def sample(logits: np.ndarray, seed: int, position: int, choice: int) -> int:
    """The id drawn with probability softmax(logits): argmax(logits - max + g), ties to the lowest id.

    logits: float32 [vocab_size], contiguous, at least one finite, no NaN, no +inf; -inf ids are never drawn. Sums in float64.

    The logarithms are taken only for ids that can still win. With `top` the most likely id, another one needs
    g >= g[top] + logit[top] - logit; since g <= -log(w), that needs w <= exp(logit - logit[top] - g[top]). Few ids pass (`top` does),
    and the result is that of the full computation.
    """
    x = words(seed, position, choice, len(logits))
    top = int(logits.argmax())
    reach = logits - logits[top]
    reach -= np.float32(gumbels(x[top : top + 1])[0])
    np.exp(reach, out=reach)
    reach *= np.float32(_SLACK / _SCALE)
    ids = np.flatnonzero(x.astype(np.float32) <= reach)
    ids = ids[logits[ids] > -np.inf]
    totals = logits[ids].astype(np.float64) - float(logits[top]) + gumbels(x[ids])
    return int(ids[totals.argmax()])
