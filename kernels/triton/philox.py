"""The numbers of core/rng.py on a GPU: Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), bit by bit.

    key      = (seed, choice)
    counter  = (block, 0, position, 0)        block b = 1, 2 ... gives four 64-bit words: 32 bits for each of the tokens 8 (b - 1) ...
    word j   = tokens 2 j (low half) and 2 j + 1 (high half)

    w = (x + 0.5) / 2^32      g = -log(-log(1 - w)), a standard Gumbel number

1 - w is exact in float64, so that its logarithm is log1p(-w) within a unit in the last place.
"""

# Triton's language is read by its compiler, whose types pyright does not know.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import launch, power_of_two

_M0 = tl.constexpr(0xD2E7470EE14C6C93)
_M1 = tl.constexpr(0xCA5A826395121157)
_W0 = tl.constexpr(0x9E3779B97F4A7C15)
_W1 = tl.constexpr(0xBB67AE8584CAA73B)
_LOW = tl.constexpr(0xFFFFFFFF)
_UNIT = tl.constexpr(2.0**-32)


@triton.jit
def words(first, seed, position, choice, BLOCK: tl.constexpr):
    """uint32 [BLOCK] for the ids from `first` on, a multiple of 8, as BLOCK is. seed, position, choice: uint64."""
    block = first // 8 + 1 + tl.arange(0, BLOCK // 8)
    c0 = block.to(tl.uint64)
    c1 = tl.full([BLOCK // 8], 0, tl.uint64)
    c2 = c1 + position
    c3 = c1
    k0 = seed
    k1 = choice
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, _M0)
        low0 = c0 * _M0
        high1 = tl.umulhi(c2, _M1)
        low1 = c2 * _M1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + _W0
        k1 = k1 + _W1
    in_order = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [block, word // 2, word % 2]
    halves = tl.join((in_order & _LOW).to(tl.uint32), (in_order >> 32).to(tl.uint32))
    return tl.reshape(halves, [BLOCK])


@triton.jit
def gumbels(x):
    """float64, for uint32 words."""
    w = (x.to(tl.float64) + 0.5) * _UNIT
    return -tl.log(-tl.log(1.0 - w))


@triton.jit
def rough_gumbels(x):
    """float32, less than 1e-4 away from `gumbels`: a series for log(1 - w) where w is small, 1 - w from the word's complement elsewhere."""
    w = (x.to(tl.float32) + 0.5) * _UNIT
    rest = ((x ^ _LOW).to(tl.float32) + 0.5) * _UNIT
    near = w * (1.0 + w * (0.5 + w * (0.33333334 + w * 0.25)))
    return -tl.log(tl.where(w < 0.015625, near, -tl.log(rest)))


@triton.jit
def words_kernel(seeds, positions, choices, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    seed = tl.load(seeds + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row).to(tl.uint64, bitcast=True)
    choice = tl.load(choices + row).to(tl.uint64, bitcast=True)
    x = words(first, seed, position, choice, BLOCK)
    ids = first + tl.arange(0, BLOCK)
    tl.store(out + row.to(tl.int64) * size + ids, x.to(tl.int64), mask=ids < size)


def random_words(seeds: torch.Tensor, positions: torch.Tensor, choices: torch.Tensor, size: int) -> torch.Tensor:
    """int64 [B, size], each 0 <= x < 2^32: the words that belong to token ids 0 ... of each key; for tests and other kernels' checks.

    seeds, positions, choices: int64 [B], read as unsigned. Raises ValueError for others."""
    if any(t.dtype is not torch.int64 or t.dim() != 1 or t.shape != seeds.shape for t in (seeds, positions, choices)):
        raise ValueError("seeds, positions and choices must be int64 and of one length")
    out = torch.empty(len(seeds), size, dtype=torch.int64, device=seeds.device)
    block = min(1024, max(16, power_of_two(max(size, 1))))
    keys = (t.contiguous() for t in (seeds, positions, choices))
    launch(words_kernel, (len(seeds), triton.cdiv(size, block)), *keys, out, size, BLOCK=block, num_warps=4)
    return out
