"""The Triton code of paged attention. `attention.py` says what is computed, makes the work items and launches it.

Sources: the online softmax of FlashAttention-2 (arXiv 2307.08691); K/V divided among programs and merged, Flash-Decoding (2023); block
tables and a query tile shared by the query heads of one KV head, "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581).

To be launched without fusion (`enable_fp_fusion=False`): a tile that every row of a program sees is computed without a mask, others with
one, and a row's bits may not depend on which it was. Fused multiply-adds are spelled out, so that no compiler chooses them here and not
there.
"""

# Triton's language is read by its compiler, whose types pyright does not know.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(m_all, l_all, acc_all, m, l, acc, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """What two runs of positions give together: maximum, sum and weighted values, of which the first is older. float32.

    One of them may be empty (maximum -inf, zeros): the other comes out bit by bit."""
    m_new = tl.maximum(m_all, m)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m_all - base)
    new = tl.exp2(m - base)
    l_new = tl.fma(l_all, old, l * new)
    acc_new = tl.fma(acc_all, tl.broadcast_to(old[:, None], [BLOCK_M, D_PAD]), acc * new[:, None])
    return m_new, l_new, acc_new


@triton.jit
def pinned(x):
    """x of two bytes each, as it is, behind an instruction that the compiler takes for one with side effects.

    Triton would move a conversion to the layout of a product's operand in front of what made x: it would read one-byte values of V in that
    layout, one by one. So it reads 16 of them at once, and x goes through shared memory."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)


@triton.jit
def attend_tile(
    m, l, acc, query, seen, column, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
    MASKED: tl.constexpr, ALIKE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) after TILE positions from `column` on. Not MASKED: every row that counts sees all of them."""
    dims = tl.arange(0, D_PAD)
    j = column + tl.arange(0, TILE)
    inside = j < last
    if MASKED:
        keep = inside[:, None]
        if HEAD_DIM != D_PAD:
            keep = keep & (dims < HEAD_DIM)[None, :]
        block = tl.load(table + j // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        keep = (dims < HEAD_DIM)[None, :]
        block = tl.load(table + j // BLOCK_SIZE).to(tl.int64)
    offset = j % BLOCK_SIZE
    k_at = block * k_stride_b + offset * k_stride_t + head * k_stride_h
    v_at = k_at if ALIKE else block * v_stride_b + offset * v_stride_t + head * v_stride_h
    if MASKED or HEAD_DIM != D_PAD:
        k = tl.load(k_cache + k_at[:, None] + dims[None, :], mask=keep, other=0)
        v = tl.load(v_cache + v_at[:, None] + dims[None, :], mask=keep, other=0)
    else:
        k = tl.load(k_cache + k_at[:, None] + dims[None, :])
        v = tl.load(v_cache + v_at[:, None] + dims[None, :])
    if (
        FP8
    ):  # through float32, in which two instructions convert four values and more: straight to bfloat16 takes the slow converter
        k = k.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        v = v.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    scores = tl.dot(query, tl.trans(k.to(DOT)), input_precision="ieee")
    if QUANTIZED:
        scale_at = offset * KV_HEADS + head
        if MASKED:
            k_scale = tl.load(k_scales + block * k_scale_stride_b + scale_at, mask=inside, other=0.0)
            v_scale = tl.load(v_scales + block * v_scale_stride_b + scale_at, mask=inside, other=0.0)
        else:
            k_scale = tl.load(k_scales + block * k_scale_stride_b + scale_at)
            v_scale = tl.load(v_scales + block * v_scale_stride_b + scale_at)
        scores = scores * k_scale[None, :]
    if HAS_SOFTCAP:
        ratio = scores * (scale / softcap)
        small = tl.exp2(tl.abs(ratio) * -2.8853900817779268)
        tanh = (1.0 - small) / (1.0 + small)
        scores = tl.where(ratio < 0.0, -tanh, tanh)
        scale = softcap * 1.4426950408889634
    if MASKED:
        visible = j[None, :] <= seen[:, None]
        if HAS_WINDOW:
            visible = visible & (j[None, :] > seen[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    fade = tl.exp2(m - base)
    spread = tl.broadcast_to(-base[:, None], [BLOCK_M, TILE])
    weights = tl.exp2(tl.fma(scores, tl.zeros([BLOCK_M, TILE], tl.float32) + scale, spread))
    l = tl.fma(l, fade, tl.sum(weights, 1))
    if QUANTIZED:
        weights = weights * v_scale[None, :]
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
    v = v.to(DOT)
    if QUANTIZED and DOT != tl.float32:  # noqa: SIM300
        v = pinned(v)
    narrow = weights.to(DOT)
    acc = tl.dot(narrow, v, acc * fade[:, None], input_precision="ieee")
    return m_new, l, acc


@triton.jit
def attend_span(
    start, stop, query, seen, position, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
    APART: tl.constexpr, ALIKE: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, KV_HEADS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """(m, l, acc) of positions start ... stop - 1, start a multiple of TILE. APART: tiles that every row sees, without a mask, first."""
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    rest = start
    if APART:
        rest = tl.maximum(start, tl.minimum(stop, (position + 1) // TILE * TILE))
        for column in range(start, rest, TILE):
            m, l, acc = attend_tile(
                m, l, acc, query, seen, column, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
                k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
                False, ALIKE, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, TILE, KV_HEADS, HAS_WINDOW, HAS_SOFTCAP, QUANTIZED, FP8, DOT,
            )  # fmt: skip
    for column in range(rest, stop, TILE):
        m, l, acc = attend_tile(
            m, l, acc, query, seen, column, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
            k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
            True, ALIKE, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, TILE, KV_HEADS, HAS_WINDOW, HAS_SOFTCAP, QUANTIZED, FP8, DOT,
        )  # fmt: skip
    return m, l, acc


@triton.jit(do_not_specialize=["part_rows"])
def attention_kernel(
    out, q, k_cache, v_cache, k_scales, v_scales, tables, items, part_m, part_l, part_acc, part_rows, scale, softcap, window,
    out_stride_t, out_stride_h, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    k_scale_stride_b, v_scale_stride_b,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, FLAT: tl.constexpr, APART: tl.constexpr, ALIKE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One work item of one KV head, the heads of an item in neighbouring programs: BLOCK_M rows, row r is query head r % GROUP of token
    r // GROUP.

    items: int32 [n, 8]: first row in q, tokens, position of the first, where its block table begins in `tables`, first split, end of
    splits, slot of the partial result or -1 if the result is final, unused. One of no tokens (padding) reads and writes nothing.
    A partial result has part_rows rows, at least count * GROUP. Without soft-cap `scale` holds log2(e), too. FLAT: an item's splits are
    gone through as one. APART: see `attend_span`. ALIKE: V's strides are K's."""
    head = tl.program_id(0) % KV_HEADS
    item = items + tl.program_id(0) // KV_HEADS * 8
    row = tl.load(item)
    count = tl.load(item + 1)
    position = tl.load(item + 2)
    table = tables + tl.load(item + 3)
    first = tl.load(item + 4)
    end = tl.load(item + 5)
    slot = tl.load(item + 6)
    if count > 0:
        rows = tl.arange(0, BLOCK_M)
        token = rows // GROUP
        query_head = head * GROUP + rows % GROUP
        valid = token < count
        seen = tl.where(valid, position + token, -1)
        last = position + count
        dims = tl.arange(0, D_PAD)
        keep_q = valid[:, None]
        if HEAD_DIM != D_PAD:
            keep_q = keep_q & (dims < HEAD_DIM)[None, :]
        q_at = (row + token).to(tl.int64) * q_stride_t + query_head * q_stride_h
        query = tl.load(q + q_at[:, None] + dims[None, :], mask=keep_q, other=0.0).to(DOT)

        lowest = 0
        if HAS_WINDOW:
            lowest = tl.maximum(position - window + 1, 0) // TILE * TILE
        if FLAT:
            start = tl.maximum(first * SPLIT, lowest)
            stop = tl.minimum(end * SPLIT, last)
            m_all, l_all, acc_all = attend_span(
                start, stop, query, seen, position, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
                k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
                APART, ALIKE, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, TILE, KV_HEADS, HAS_WINDOW, HAS_SOFTCAP, QUANTIZED, FP8, DOT,
            )  # fmt: skip
        else:
            m_all = tl.full([BLOCK_M], float("-inf"), tl.float32)
            l_all = tl.zeros([BLOCK_M], tl.float32)
            acc_all = tl.zeros([BLOCK_M, D_PAD], tl.float32)
            for split in range(first, end):
                start = tl.maximum(split * SPLIT, lowest)
                stop = tl.minimum(split * SPLIT + SPLIT, last)
                m, l, acc = attend_span(
                    start, stop, query, seen, position, last, head, table, k_cache, v_cache, k_scales, v_scales, scale, softcap, window,
                    k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h, k_scale_stride_b, v_scale_stride_b,
                    APART, ALIKE, HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, TILE, KV_HEADS, HAS_WINDOW, HAS_SOFTCAP, QUANTIZED, FP8, DOT,
                )  # fmt: skip
                m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, BLOCK_M, D_PAD)

        if slot >= 0:
            part = (slot * KV_HEADS + head.to(tl.int64)) * part_rows + rows
            tl.store(part_m + part, m_all, mask=valid)
            tl.store(part_l + part, l_all, mask=valid)
            tl.store(part_acc + part[:, None] * D_PAD + dims[None, :], acc_all, mask=valid[:, None])
        else:
            norm = tl.where(l_all == 0.0, 1.0, l_all)
            out_at = (row + token).to(tl.int64) * out_stride_t + query_head * out_stride_h
            result = (acc_all / norm[:, None]).to(out.dtype.element_ty)
            tl.store(out + out_at[:, None] + dims[None, :], result, mask=keep_q)


@triton.jit(do_not_specialize=["part_rows"])
def merge_kernel(
    out, part_m, part_l, part_acc, part_rows, jobs, out_stride_t, out_stride_h,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One query tile of one KV head, as in `attention_kernel`: its splits' partial results, merged in order, as that does with splits
    that it goes through itself. jobs: int32 [n, 4]: first row in out, tokens (none: padding, nothing is done), first slot, number of
    slots."""
    head = tl.program_id(0) % KV_HEADS
    job = jobs + tl.program_id(0) // KV_HEADS * 4
    row = tl.load(job)
    count = tl.load(job + 1)
    first = tl.load(job + 2)
    parts = tl.load(job + 3)
    if count > 0:
        rows = tl.arange(0, BLOCK_M)
        token = rows // GROUP
        valid = token < count
        dims = tl.arange(0, D_PAD)
        m_all = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_all = tl.zeros([BLOCK_M], tl.float32)
        acc_all = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        for slot in range(first, first + parts):
            part = (slot * KV_HEADS + head.to(tl.int64)) * part_rows + rows
            m = tl.load(part_m + part, mask=valid, other=float("-inf"))
            l = tl.load(part_l + part, mask=valid, other=0.0)
            acc = tl.load(part_acc + part[:, None] * D_PAD + dims[None, :], mask=valid[:, None], other=0.0)
            m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, BLOCK_M, D_PAD)

        norm = tl.where(l_all == 0.0, 1.0, l_all)
        out_at = (row + token).to(tl.int64) * out_stride_t + (head * GROUP + rows % GROUP) * out_stride_h
        keep = valid[:, None]
        if HEAD_DIM != D_PAD:
            keep = keep & (dims < HEAD_DIM)[None, :]
        tl.store(out + out_at[:, None] + dims[None, :], (acc_all / norm[:, None]).to(out.dtype.element_ty), mask=keep)
