"""Selections in one row of logits, with ties decided by the lower token id. Imports numpy: for hooks that run in the worker."""

from __future__ import annotations

import math

import numpy as np

SPANS = (1.5, 3.0, 6.0, 12.0)
"""First guesses, in logits below the maximum, of where an upper part of a row ends. They change the cost, never the result."""


def descending(row: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`ids` sorted by falling value, ties by rising id.

    Sorts 64-bit keys: above, the value's bits, changed so that they rise as the value falls; below, the id.
    """
    bits = (row[ids] + np.float32(0)).view(np.uint32)  # + 0: -0.0 equals 0.0
    falling = bits ^ np.where(bits >> 31, np.uint32(0), np.uint32(0x7FFFFFFF))
    keys = (falling.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def largest(row: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest finite values (fewer when there are not as many), sorted as `descending`. No sort of the whole row."""
    top = row.max()
    for span in SPANS:
        ids = np.flatnonzero(row >= top - span)
        if len(ids) >= k:
            break
    else:
        ids = np.flatnonzero(row > -np.inf)
        if len(ids) > k:
            kth = np.partition(row, len(row) - k)[len(row) - k]
            ids = np.flatnonzero(row >= kth)
    return descending(row, ids)[:k]


def log_sum_exp(row: np.ndarray) -> float:
    """log(sum(exp(row))) for a row with a finite maximum; exponentials in float32, their sum in float64: error below 1e-6."""
    top = row.max()
    return float(top) + math.log(np.exp(row - top).sum(dtype=np.float64))
