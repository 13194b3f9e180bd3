"""Temperature, top-k, top-p, min-p and the draw in one kernel, one program a row, without a sort and without leaving the device.

The result is that of core/sampler.py with plugins/sampling/truncation.py: the same set survives, and the same token is drawn.

Order. Tokens are ordered by how far below the most likely one they are, (max - logit) / temperature in float32, ties by id. Not negative,
such a distance's bits are an integer in the same order: the key. What top-k, top-p and min-p leave is always a beginning of that order,
given by a last key and the last id among those that have it.

Search. That key is found by pivots: each pass over the row counts (top-k) or adds up in float64 (top-p) what lies below three pivots and
keeps the quarter in which the wanted amount is reached, drawn in to the keys that there are, until one token or one key is left. Sampling
without a sort in FlashInfer (https://arxiv.org/abs/2501.01005; https://flashinfer.ai/2025/03/10/sampling.html) narrows such a bracket by
pivots, too; it then draws by rejection, which takes random numbers one after the other. Here they are counted: a token's number depends
on (seed, position, choice, id) alone, so the draw is Gumbel-max over what survives (Maddison et al., "A* sampling", 2014), with the
numbers of core/rng.py.

Draw. A tile whose rough float32 sums can't reach the best so far by MARGIN is left out; the others are computed in float64, as rng.py
does. So the token is the same unless two ids are within about 1e-14 of each other.

The weights of top-p are float32 exponentials, a GPU's here and numpy's there: sets can differ where top_p falls within about 1e-6 of the
sum at a token's end. In Triton's interpreter, which is numpy, they are the same.
"""

# Triton's language is read by its compiler, whose types pyright does not know.
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .philox import gumbels, rough_gumbels, words

_GREEDY = tl.constexpr(1e-5)
_LAST_KEY = tl.constexpr(0x7F7FFFFF)
"""Of the largest finite distance. A token at -inf has the next one."""
_MARGIN = tl.constexpr(1e-3)
_SOME = tl.constexpr(1e-30)
_NUMBERS = ["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions", "choices"]
"""A number for each row, read one by one: where they lie must not make for another binary (see elementwise_kernels.py)."""


@triton.jit
def _distances(logits, start, size, top, temperature, BLOCK: tl.constexpr):
    """ids and distances, float32 [BLOCK]; +inf beyond the row."""
    ids = start + tl.arange(0, BLOCK)
    values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    return ids, tl.div_rn(top - values, temperature)


@triton.jit
def _most_likely(logits, size, BLOCK: tl.constexpr):
    """The largest logit, its lowest id (size, if all are -inf), and whether one is NaN or +inf."""
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    best = tl.full([BLOCK], 0, tl.int32) + size
    broken = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        more = values > tops
        best = tl.where(more, ids, best)
        tops = tl.where(more, values, tops)
        broken = broken | ((values != values) | (values == float("inf"))).to(tl.int32)  # noqa: PLR0124
    top = tl.max(tops, axis=0)
    return top, tl.min(tl.where(tops == top, best, size), axis=0), tl.max(broken, axis=0)


@triton.jit
def _amounts(logits, size, top, temperature, key, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have keys below `key`, how many have it, and the weight of the former, float64."""
    below = tl.full([BLOCK], 0, tl.int32)
    at = tl.full([BLOCK], 0, tl.int32)
    held = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        _, distances = _distances(logits, start, size, top, temperature, BLOCK)
        keys = distances.to(tl.int32, bitcast=True)
        below += (keys < key).to(tl.int32)
        at += (keys == key).to(tl.int32)
        if WEIGHTED:
            held += tl.where(keys < key, tl.exp(-distances), 0.0).to(tl.float64)
    return tl.sum(below, axis=0), tl.sum(at, axis=0), tl.sum(held, axis=0)


@triton.jit
def _below_pivots(
    logits, size, top, temperature, low, pivot1, pivot2, pivot3, high, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many tokens have keys up to each pivot; how much that is, float64: their weight, or how many; and the first and last key that
    there is in low + 1 .. high."""
    first = tl.full([BLOCK], _LAST_KEY, tl.int32)
    final = tl.full([BLOCK], -1, tl.int32)
    count1 = tl.full([BLOCK], 0, tl.int32)
    count2 = tl.full([BLOCK], 0, tl.int32)
    count3 = tl.full([BLOCK], 0, tl.int32)
    held1 = tl.full([BLOCK], 0.0, tl.float64)
    held2 = tl.full([BLOCK], 0.0, tl.float64)
    held3 = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        _, distances = _distances(logits, start, size, top, temperature, BLOCK)
        keys = distances.to(tl.int32, bitcast=True)
        first = tl.minimum(first, tl.where(keys > low, keys, _LAST_KEY))
        final = tl.maximum(final, tl.where(keys <= high, keys, -1))
        in1 = keys <= pivot1
        in2 = keys <= pivot2
        in3 = keys <= pivot3
        count1 += in1.to(tl.int32)
        count2 += in2.to(tl.int32)
        count3 += in3.to(tl.int32)
        if WEIGHTED:
            weights = tl.exp(-distances)
            held1 += tl.where(in1, weights, 0.0).to(tl.float64)
            held2 += tl.where(in2, weights, 0.0).to(tl.float64)
            held3 += tl.where(in3, weights, 0.0).to(tl.float64)
    n1 = tl.sum(count1, axis=0)
    n2 = tl.sum(count2, axis=0)
    n3 = tl.sum(count3, axis=0)
    if WEIGHTED:
        much1 = tl.sum(held1, axis=0)
        much2 = tl.sum(held2, axis=0)
        much3 = tl.sum(held3, axis=0)
    else:
        much1 = n1.to(tl.float64)
        much2 = n2.to(tl.float64)
        much3 = n3.to(tl.float64)
    return n1, n2, n3, much1, much2, much3, tl.min(first, axis=0), tl.max(final, axis=0)


@triton.jit
def _reach(
    logits, size, top, temperature, target, last, last_count, last_ties, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The shortest beginning of the order that holds `target` (float64, above 0): its last key, and how many of that key.

    It ends within `last`, the end of a beginning of last_count tokens of which last_ties have that key, and which holds enough."""
    low = tl.full([], -1, tl.int32)
    low_count = tl.full([], 0, tl.int32)
    low_much = tl.full([], 0.0, tl.float64)
    high = last
    high_count = last_count
    while (high - low > 1) & (high_count - low_count > 1):
        quarter = (high - low) // 4
        pivot1 = low + quarter
        pivot2 = low + (high - low) // 2
        pivot3 = pivot2 + quarter
        n1, n2, n3, much1, much2, much3, first, final = _below_pivots(
            logits, size, top, temperature, low, pivot1, pivot2, pivot3, high, WEIGHTED, BLOCK
        )
        in1 = much1 >= target
        in2 = much2 >= target
        in3 = much3 >= target
        high = tl.where(in1, pivot1, tl.where(in2, pivot2, tl.where(in3, pivot3, high)))
        high_count = tl.where(in1, n1, tl.where(in2, n2, tl.where(in3, n3, high_count)))
        low = tl.where(in1, low, tl.where(in2, pivot1, tl.where(in3, pivot2, pivot3)))
        low_count = tl.where(in1, low_count, tl.where(in2, n1, tl.where(in3, n2, n3)))
        low_much = tl.where(in1, low_much, tl.where(in2, much1, tl.where(in3, much2, much3)))
        low = tl.maximum(low, first - 1)  # no token is passed
        high = tl.minimum(high, final)
    each = tl.full([], 1.0, tl.float64)
    if WEIGHTED:
        each = tl.exp(-high.to(tl.float32, bitcast=True)).to(tl.float64)
    between = high_count - low_count
    needed = tl.ceil((target - low_much) / tl.where(each > 0.0, each, 1.0))
    needed = tl.where(each > 0.0, tl.minimum(tl.maximum(needed, 1.0), between.to(tl.float64)).to(tl.int32), between)
    ties = tl.where(high - low == 1, needed, tl.where(high == last, last_ties, size))
    return high, ties


@triton.jit
def _last_id(logits, size, top, temperature, key, ties, BLOCK: tl.constexpr):
    """The id of the `ties`-th token that has `key`, or of the last one."""
    seen = tl.full([], 0, tl.int32)
    found = tl.full([], -1, tl.int32)
    for start in range(0, size, BLOCK):
        ids, distances = _distances(logits, start, size, top, temperature, BLOCK)
        equal = (distances.to(tl.int32, bitcast=True) == key).to(tl.int32)
        rank = seen + tl.cumsum(equal, axis=0)
        found = tl.maximum(found, tl.max(tl.where((equal > 0) & (rank <= ties), ids, -1), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def _survivors(logits, size, top, temperature, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """The last key that survives, and the last id among those that have it."""
    key = tl.full([], _LAST_KEY, tl.int32)
    ties = tl.full([], 0, tl.int32) + size
    if (top_k > 0) & (top_k < size):
        below, at, _ = _amounts(logits, size, top, temperature, key, False, BLOCK)
        if top_k < below + at:
            key, ties = _reach(
                logits, size, top, temperature, top_k.to(tl.float64), key, below + at, ties, False, BLOCK
            )  # fmt: skip
    if top_p < 1.0:
        below, at, held = _amounts(logits, size, top, temperature, key, True, BLOCK)
        at = tl.minimum(at, ties)
        each = tl.exp(-key.to(tl.float32, bitcast=True)).to(tl.float64)
        target = tl.maximum(top_p * (held + at.to(tl.float64) * each), _SOME)
        key, ties = _reach(logits, size, top, temperature, target, key, below + at, ties, True, BLOCK)
    if min_p > 0.0:
        limit = (0.0 - tl.log(min_p)).to(tl.float32).to(tl.int32, bitcast=True)
        if limit < key:
            key = limit
            ties = tl.full([], 0, tl.int32) + size
    last = tl.full([], 0, tl.int32) + size
    if ties < size:
        last = _last_id(logits, size, top, temperature, key, ties, BLOCK)
    return key, last


@triton.jit
def _draw(logits, size, top, temperature, key, last, seed, position, choice, SUM: tl.constexpr, BLOCK: tl.constexpr):
    """The token (size: none survives), and with SUM the weight of all that survive, float64."""
    best = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], 0, tl.int32) + size
    held = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        ids, distances = _distances(logits, start, size, top, temperature, BLOCK)
        keys = distances.to(tl.int32, bitcast=True)
        kept = (keys < key) | ((keys == key) & (ids <= last))
        if SUM:
            held += tl.where(kept, tl.exp(-distances), 0.0).to(tl.float64)
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            x = words(start, seed, position, choice, BLOCK)
            rough = tl.max(tl.where(kept, rough_gumbels(x) - distances, float("-inf")), axis=0)
            if rough.to(tl.float64) + _MARGIN >= best:
                totals = tl.where(kept, gumbels(x) - distances.to(tl.float64), float("-inf"))
                most = tl.max(totals, axis=0)
                if most > best:
                    token = tl.min(tl.where(totals == most, ids, size), axis=0)
                    best = most
    return token, tl.sum(held, axis=0)


@triton.jit
def _raw_logprob(logits, size, top, token, BLOCK: tl.constexpr):
    """Of `token` by the logits as they are."""
    held = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        _, distances = _distances(logits, start, size, top, 1.0, BLOCK)
        held += tl.exp(-distances).to(tl.float64)
    value = tl.load(logits + token).to(tl.float64)
    return value - (top.to(tl.float64) + tl.log(tl.sum(held, axis=0)))


@triton.jit(do_not_specialize_on_alignment=_NUMBERS)
def sample_kernel(
    logits, row_stride, temperatures, top_ks, top_ps, min_ps, seeds, positions, choices, tokens, logprobs, states,
    size: tl.constexpr, LOGPROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row. LOGPROBS: 0 none, 1 raw, 2 processed."""
    row = tl.program_id(0)
    logits = logits + row.to(tl.int64) * row_stride
    top, token, broken = _most_likely(logits, size, BLOCK)
    wide_temperature = tl.load(temperatures + row)
    temperature = wide_temperature.to(tl.float32)
    greedy = wide_temperature < _GREEDY
    usable = (broken == 0) & (token < size)
    logprob = tl.full([], float("nan"), tl.float64)
    if usable:
        if greedy:
            if LOGPROBS > 0:
                logprob = _raw_logprob(logits, size, top, token, BLOCK)
        else:
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            min_p = tl.load(min_ps + row)
            key, last = _survivors(logits, size, top, temperature, top_k, top_p, min_p, BLOCK)
            seed = tl.load(seeds + row).to(tl.uint64)
            position = tl.load(positions + row).to(tl.uint64)
            choice = tl.load(choices + row).to(tl.uint64)
            token, held = _draw(logits, size, top, temperature, key, last, seed, position, choice, LOGPROBS == 2, BLOCK)
            if token < size:
                if LOGPROBS == 1:
                    logprob = _raw_logprob(logits, size, top, token, BLOCK)
                if LOGPROBS == 2:
                    value = tl.load(logits + token).to(tl.float32)
                    distance = tl.div_rn(top - value, temperature)
                    logprob = -distance.to(tl.float64) - tl.log(held)
    state = tl.where(broken > 0, 2, tl.where(token < size, 0, 1))
    tl.store(tokens + row, tl.where(state == 0, token, -1).to(tl.int64))
    tl.store(states + row, state)
    if LOGPROBS > 0:
        tl.store(logprobs + row, logprob.to(tl.float32))


@triton.jit(do_not_specialize_on_alignment=_NUMBERS[:4])
def filter_kernel(logits, row_stride, temperatures, top_ks, top_ps, min_ps, out, size: tl.constexpr, BLOCK: tl.constexpr):
    """One row."""
    row = tl.program_id(0)
    logits = logits + row.to(tl.int64) * row_stride
    out = out + row.to(tl.int64) * size
    top, token, broken = _most_likely(logits, size, BLOCK)
    wide_temperature = tl.load(temperatures + row)
    if (broken > 0) | (token >= size) | (wide_temperature < _GREEDY):
        for start in range(0, size, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            values = tl.load(logits + ids, mask=ids < size, other=0.0)
            tl.store(out + ids, values.to(tl.float32), mask=ids < size)
    else:
        temperature = wide_temperature.to(tl.float32)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        key, last = _survivors(logits, size, top, temperature, top_k, top_p, min_p, BLOCK)
        for start in range(0, size, BLOCK):
            ids, distances = _distances(logits, start, size, top, temperature, BLOCK)
            keys = distances.to(tl.int32, bitcast=True)
            kept = (keys < key) | ((keys == key) & (ids <= last))
            tl.store(out + ids, tl.where(kept, 0.0 - distances, float("-inf")), mask=ids < size)
