"""The Triton code of paged attention. `attention.py` says what is computed, makes the work items and launches it.

Sources: the online softmax of FlashAttention-2 (arXiv 2307.08691); K/V divided among programs and merged, Flash-Decoding (2023); block
tables and a query tile shared by the query heads of one KV head, "The Anatomy of a Triton Attention Kernel" (arXiv 2511.11581).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge(m_all, l_all, acc_all, m, l, acc, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr):
    """What two runs of positions give together: maximum, sum and weighted values, of which the first is older. float32.

    One of them may be empty (maximum -inf, zeros): the other comes out bit by bit. Fused multiply-adds are spelled out, so that no compiler
    chooses them here and not there."""
    m_new = tl.maximum(m_all, m)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m_all - base)
    new = tl.exp2(m - base)
    l_new = tl.fma(l_all, old, l * new)
    acc_new = tl.fma(acc_all, tl.broadcast_to(old[:, None], [BLOCK_M, D_PAD]), acc * new[:, None])
    return m_new, l_new, acc_new


@triton.jit
def attention_kernel(
    out,
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    tables,
    items,
    part_m,
    part_l,
    part_acc,
    scale,
    softcap,
    window,
    out_stride_t,
    out_stride_h,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_t,
    k_stride_h,
    v_stride_b,
    v_stride_t,
    v_stride_h,
    k_scale_stride_b,
    v_scale_stride_b,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8: tl.constexpr,
    DOT: tl.constexpr,
):
    """One work item (program 0) of one KV head (program 1): BLOCK_M rows, row r is query head r % GROUP of token r // GROUP.

    items: int32 [n, 8]: first row in q, tokens, position of the first, where its block table begins in `tables`, first split, end of
    splits, slot of the partial result or -1 if the result is final, unused. Without soft-cap `scale` holds log2(e), too."""
    head = tl.program_id(1)
    item = items + tl.program_id(0) * 8
    row = tl.load(item)
    count = tl.load(item + 1)
    position = tl.load(item + 2)
    table = tables + tl.load(item + 3)
    first = tl.load(item + 4)
    end = tl.load(item + 5)
    slot = tl.load(item + 6)

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

    m_all = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_all = tl.zeros([BLOCK_M], tl.float32)
    acc_all = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for split in range(first, end):
        start = split * SPLIT
        if HAS_WINDOW:
            start = tl.maximum(start, tl.maximum(position - window + 1, 0) // TILE * TILE)
        stop = tl.minimum(split * SPLIT + SPLIT, last)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
        for column in range(start, stop, TILE):  # pyright: ignore[reportArgumentType] - Triton's range
            j = column + tl.arange(0, TILE)
            inside = j < last
            keep = inside[:, None]
            if HEAD_DIM != D_PAD:
                keep = keep & (dims < HEAD_DIM)[None, :]
            block = tl.load(table + j // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            offset = j % BLOCK_SIZE
            k_at = block * k_stride_b + offset * k_stride_t + head * k_stride_h
            v_at = block * v_stride_b + offset * v_stride_t + head * v_stride_h
            scale_at = offset * tl.num_programs(1) + head
            k = tl.load(k_cache + k_at[:, None] + dims[None, :], mask=keep, other=0)
            v = tl.load(v_cache + v_at[:, None] + dims[None, :], mask=keep, other=0)
            if FP8:
                k = k.to(tl.float8e4nv, bitcast=True)
                v = v.to(tl.float8e4nv, bitcast=True)
            scores = tl.dot(query, tl.trans(k.to(DOT)), input_precision="ieee") * scale
            if QUANTIZED:
                k_scale = tl.load(k_scales + block * k_scale_stride_b + scale_at, mask=inside, other=0.0)
                scores = scores * k_scale[None, :]
            if HAS_SOFTCAP:
                ratio = scores / softcap
                small = tl.exp2(tl.abs(ratio) * -2.8853900817779268)
                tanh = (1.0 - small) / (1.0 + small)
                scores = tl.where(ratio < 0.0, -tanh, tanh) * (softcap * 1.4426950408889634)
            visible = j[None, :] <= seen[:, None]
            if HAS_WINDOW:
                visible = visible & (j[None, :] > seen[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            fade = tl.exp2(m - base)
            weights = tl.exp2(scores - base[:, None])
            l = tl.fma(l, fade, tl.sum(weights, 1))
            if QUANTIZED:
                v_scale = tl.load(v_scales + block * v_scale_stride_b + scale_at, mask=inside, other=0.0)
                weights = tl.where(visible, weights * v_scale[None, :], 0.0)
            narrow = weights.to(DOT)  # pyright: ignore[reportArgumentType] - a dtype, once it is compiled
            acc = tl.dot(narrow, v.to(DOT), acc * fade[:, None], input_precision="ieee")
            m = m_new
        m_all, l_all, acc_all = merge(m_all, l_all, acc_all, m, l, acc, BLOCK_M, D_PAD)

    if slot >= 0:
        part = (tl.num_programs(1).to(tl.int64) * slot + head) * BLOCK_M + rows
        tl.store(part_m + part, m_all, mask=valid)
        tl.store(part_l + part, l_all, mask=valid)
        tl.store(part_acc + part[:, None] * D_PAD + dims[None, :], acc_all, mask=valid[:, None])
    else:
        norm = tl.where(l_all == 0.0, 1.0, l_all)
        out_at = (row + token).to(tl.int64) * out_stride_t + query_head * out_stride_h
        result = (acc_all / norm[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_at[:, None] + dims[None, :], result, mask=keep_q)


@triton.jit
def merge_kernel(
    out,
    part_m,
    part_l,
    part_acc,
    jobs,
    out_stride_t,
    out_stride_h,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One query tile (program 0) of one KV head (program 1): its splits' partial results, merged in order, as `attention_kernel` does
    with splits that it goes through itself. jobs: int32 [n, 4]: first row in out, tokens, first slot, number of slots."""
    head = tl.program_id(1)
    job = jobs + tl.program_id(0) * 4
    row = tl.load(job)
    count = tl.load(job + 1)
    first = tl.load(job + 2)
    parts = tl.load(job + 3)

    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    valid = token < count
    dims = tl.arange(0, D_PAD)
    m_all = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_all = tl.zeros([BLOCK_M], tl.float32)
    acc_all = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for slot in range(first, first + parts):
        part = (tl.num_programs(1).to(tl.int64) * slot + head) * BLOCK_M + rows
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
