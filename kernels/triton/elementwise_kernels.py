"""The kernels of elementwise.py. Strides are in elements; rows are numbered through [outer, inner]; what is written is contiguous.

Neither the number of rows nor where numbers of rows lie is specialised upon: one binary serves every batch. (Rows of a tensor [4, T]
begin at a multiple of 16 bytes or not as T has it; Triton would compile both, the second in the middle of serving.)"""

# Triton's language is read by its compiler, whose types pyright does not know.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read(x, residual, x_at, r_at, column, mask, HAS_RESIDUAL: tl.constexpr):
    """Rows of x, plus those of residual rounded to x's dtype."""
    value = tl.load(x + x_at[:, None] + column[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + r_at[:, None] + column[None, :], mask=mask, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _scaled(value, scale, weight, column, n, HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    normal = value.to(tl.float32) * scale[:, None]
    if HAS_WEIGHT:
        w = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        if UNIT_OFFSET:  # noqa: SIM108
            normal = normal * (1.0 + w)
        else:
            normal = normal.to(value.dtype).to(tl.float32) * w
    return normal.to(value.dtype)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, residual, weight, out, total, rows, inner, x_outer, x_inner, r_outer, r_inner, eps,
    n: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ONE_TILE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows. ONE_TILE: BLOCK is not smaller than n."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    x_at = (row // inner) * x_outer + (row % inner) * x_inner
    r_at = (row // inner) * r_outer + (row % inner) * r_inner
    out_at = row * n
    if ONE_TILE:
        column = tl.arange(0, BLOCK)
        mask = known[:, None] & (column < n)[None, :]
        value = _read(x, residual, x_at, r_at, column, mask, HAS_RESIDUAL)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / n + eps)
        if HAS_RESIDUAL:
            tl.store(total + out_at[:, None] + column[None, :], value, mask=mask)
        tl.store(
            out + out_at[:, None] + column[None, :],
            _scaled(value, scale, weight, column, n, HAS_WEIGHT, UNIT_OFFSET),
            mask=mask,
        )
    else:
        sums = tl.full([ROWS], 0.0, tl.float32)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = known[:, None] & (column < n)[None, :]
            value = _read(x, residual, x_at, r_at, column, mask, HAS_RESIDUAL)
            wide = value.to(tl.float32)
            sums += tl.sum(wide * wide, axis=1)
            if HAS_RESIDUAL:
                tl.store(total + out_at[:, None] + column[None, :], value, mask=mask)
        scale = tl.rsqrt(sums / n + eps)
        for start in range(0, n, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = known[:, None] & (column < n)[None, :]
            value = _read(x, residual, x_at, r_at, column, mask, HAS_RESIDUAL)
            tl.store(
                out + out_at[:, None] + column[None, :],
                _scaled(value, scale, weight, column, n, HAS_WEIGHT, UNIT_OFFSET),
                mask=mask,
            )


@triton.jit(do_not_specialize=["rows"])
def norm_add_norm_kernel(
    x, residual, inner_weight, weight, out, total, rows, x_stride, r_stride, eps,
    n: tl.constexpr, UNIT_OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ROWS rows, [rows, n] each: total = residual + norm(x), out = norm(total). BLOCK is not smaller than n."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < n)[None, :]
    value = tl.load(x + (row * x_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    other = tl.load(residual + (row * r_stride)[:, None] + column[None, :], mask=mask, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / n + eps)
    normal = _scaled(value, scale, inner_weight, column, n, True, UNIT_OFFSET)
    value = (other.to(tl.float32) + normal.to(tl.float32)).to(value.dtype)
    to = (row * n)[:, None] + column[None, :]
    tl.store(total + to, value, mask=mask)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / n + eps)
    tl.store(out + to, _scaled(value, scale, weight, column, n, True, UNIT_OFFSET), mask=mask)


@triton.jit
def _rotate(
    x, weight, head_stride, heads, first, c, s, half, dim, eps, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """Heads from `first` on of one token, in place; with NORM they are normalised before. REST: at least dim - 2 half, which is not
    rotated; 0: there is none, or it is left alone."""
    head = first + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    mask = (head < heads)[:, None] & (i < half)[None, :]
    row = x + head.to(tl.int64)[:, None] * head_stride
    if INTERLEAVED:
        a_of = 2 * i
        b_of = 2 * i + 1
    else:
        a_of = i
        b_of = i + half
    narrow_a = tl.load(row + a_of[None, :], mask=mask, other=0.0)
    narrow_b = tl.load(row + b_of[None, :], mask=mask, other=0.0)
    a = narrow_a.to(tl.float32)
    b = narrow_b.to(tl.float32)
    if NORM:
        total = tl.sum(a * a + b * b, axis=1)
        if REST > 0:
            rest_of = 2 * half + tl.arange(0, REST)
            rest_mask = (head < heads)[:, None] & (rest_of < dim)[None, :]
            narrow_rest = tl.load(row + rest_of[None, :], mask=rest_mask, other=0.0)
            rest = narrow_rest.to(tl.float32)
            total += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(total / dim + eps)
        limit = dim if INTERLEAVED else half
        a = _scaled(narrow_a, scale, weight, a_of, limit, True, UNIT_OFFSET).to(tl.float32)
        b = _scaled(narrow_b, scale, weight, b_of, dim, True, UNIT_OFFSET).to(tl.float32)
        if REST > 0:
            tl.store(
                row + rest_of[None, :], _scaled(narrow_rest, scale, weight, rest_of, dim, True, UNIT_OFFSET), mask=rest_mask
            )
    tl.store(row + a_of[None, :], (a * c[None, :] - b * s[None, :]).to(narrow_a.dtype), mask=mask)
    tl.store(row + b_of[None, :], (b * c[None, :] + a * s[None, :]).to(narrow_a.dtype), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope_kernel(
    q, k, q_weight, k_weight, positions, cos, sin, q_heads, k_heads, q_token, q_head, k_token, k_head, cos_row, sin_row, q_groups, half,
    dim, eps, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):  # fmt: skip
    """One token, HEADS heads: groups of q's heads first, then k's."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    i = tl.arange(0, HALF)
    c = tl.load(cos + position * cos_row + i, mask=i < half, other=0.0)
    s = tl.load(sin + position * sin_row + i, mask=i < half, other=0.0)
    if group < q_groups:
        first = group * HEADS
        _rotate(
            q + token * q_token, q_weight, q_head, q_heads, first, c, s, half, dim, eps, INTERLEAVED, HEADS, HALF, REST, NORM, UNIT_OFFSET,
        )  # fmt: skip
    else:
        first = (group - q_groups) * HEADS
        _rotate(
            k + token * k_token, k_weight, k_head, k_heads, first, c, s, half, dim, eps, INTERLEAVED, HEADS, HALF, REST, NORM, UNIT_OFFSET,
        )  # fmt: skip


@triton.jit
def softcap_kernel(x, out, n, x_stride, cap, BLOCK: tl.constexpr):
    """BLOCK columns of one row. The hyperbolic tangent: a series near 0, where 1 - exp(-2 x) would lose what it is of."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ratio = tl.load(x + row * x_stride + column, mask=column < n, other=0.0).to(tl.float32) / cap
    square = ratio * ratio
    near = ratio * (1.0 + square * (-0.33333333 + square * (0.13333333 + square * -0.053968254)))
    small = tl.exp(tl.abs(ratio) * -2.0)
    far = (1.0 - small) / (1.0 + small)
    found = tl.where(tl.abs(ratio) < 0.125, near, tl.where(ratio < 0.0, -far, far))
    tl.store(out + row * n + column, (found * cap).to(out.dtype.element_ty), mask=column < n)


@triton.jit
def gated_kernel(
    gate, up, out, inner, n, g_outer, g_inner, u_outer, u_inner, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    g = tl.load(gate + (row // inner) * g_outer + (row % inner) * g_inner + column, mask=mask, other=0.0)
    u = tl.load(up + (row // inner) * u_outer + (row % inner) * u_inner + column, mask=mask, other=0.0)
    x = g.to(tl.float32)
    if ACTIVATION == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:  # 0.5 x (1 + tanh(z)) = x / (1 + exp(-2 z)), which loses nothing where tanh is near -1
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    y = y.to(g.dtype).to(tl.float32) * u.to(tl.float32)
    tl.store(out + row * n + column, y.to(g.dtype), mask=mask)


@triton.jit
def embed_kernel(table, ids, out, vocabulary, n, row_stride, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(ids + token).to(tl.int64)
    known = (chosen >= 0) & (chosen < vocabulary)
    row = tl.load(table + tl.where(known, chosen, 0) * row_stride + column, mask=column < n, other=0.0)
    wide = row.to(tl.float32)
    if SCALED:
        wide = wide * scale
    tl.store(out + token * n + column, tl.where(known, wide, float("nan")).to(row.dtype), mask=column < n)
