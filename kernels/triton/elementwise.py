"""Norms, rotary embedding, gated activations and embeddings on a GPU, each in one pass over memory.

They round where kernels/torch_ops/elementwise.py rounds, so that a decoder can use either; results differ in the last bits, as sums are
ordered otherwise and a GPU's exp, erf and reciprocal root are not numpy's. A row is reduced in an order that its width alone decides:
its bits do not depend on the other rows. Block sizes are untuned, and how fast the kernels are is not yet measured.

An interpreted kernel (TRITON_INTERPRET=1) cuts bfloat16 off where a GPU rounds to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import triton

from . import configs
from .elementwise_kernels import (
    embed_kernel,
    gated_kernel,
    norm_add_norm_kernel,
    rms_norm_kernel,
    rope_kernel,
    softcap_kernel,
)
from .launch import FLOATS, check_floats, check_ids, launch, power_of_two, rows_of, sizes

Config = Mapping[str, int]
Activation = Literal["silu", "gelu_tanh", "gelu"]
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; a new contiguous tensor of x's dtype.

    x: [..., n], n >= 1, any strides; float32, bfloat16 or float16. weight: [n], any of these dtypes; None: no scale
    (https://arxiv.org/abs/1910.07467). The mean is float32. The normalised value is rounded to x's dtype before it is multiplied with
    weight; with `unit_offset` (Gemma) it is multiplied with 1 + weight in float32 and then rounded. `residual`, like x, is added to x
    before all, rounded to x's dtype; see `add_rms_norm` for the sum. config: sizes in place of the stored ones: BLOCK columns that a
    program holds at a time (wider rows are read twice), TILE elements up to which narrow rows share a program.
    Raises ValueError for other shapes, dtypes, devices or sizes.
    """
    return _rms_norm(x, weight, eps, unit_offset, residual, config)[0]


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), both new and contiguous, in one pass: what stands between two halves of a layer.

    The sum is rounded to x's dtype and is what the norm is of. Everything else as in `rms_norm`.
    """
    return _rms_norm(x, weight, eps, unit_offset, residual, config)


def norm_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    inner_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(sum), sum) with sum = residual + rms_norm(x), in one pass: between two halves of a layer with "sandwich" norms (Gemma).

    x, residual: [rows, n] of one dtype, rows strided. inner_weight, of x's norm, and weight: [n]. Rounded as `rms_norm`, the sum and
    `rms_norm` one after the other. Everything else as in `rms_norm`."""
    use = sizes(configs.config("rms_norm"), config)
    block = power_of_two(max(x.shape[-1], 1))
    if block > use["BLOCK"] or x.dim() != 2 or not x.numel():
        inner = rms_norm(x, inner_weight, eps, unit_offset=unit_offset, config=config)
        return add_rms_norm(inner, residual, weight, eps, unit_offset=unit_offset, config=config)
    check_floats(x=x, residual=residual)
    rows, n = x.shape
    for name, w in (("inner_weight", inner_weight), ("weight", weight)):
        check_floats(**{name: w})
        if tuple(w.shape) != (n,) or w.device != x.device:
            raise ValueError(f"{name} is {list(w.shape)} on {w.device}; expected [{n}] on {x.device}")
    if residual.shape != x.shape:
        raise ValueError(f"residual is {list(residual.shape)}, x {list(x.shape)}")
    x, residual = rows_of(x)[:, 0], rows_of(residual)[:, 0]
    out, total = x.new_empty(rows, n), x.new_empty(rows, n)
    at_a_time = max(1, use["TILE"] // block)
    launch(
        norm_add_norm_kernel,
        (triton.cdiv(rows, at_a_time),),
        x,
        residual,
        inner_weight.contiguous(),
        weight.contiguous(),
        out,
        total,
        rows,
        x.stride(0),
        residual.stride(0),
        eps,
        n=n,
        UNIT_OFFSET=unit_offset,
        ROWS=at_a_time,
        BLOCK=block,
        num_warps=use["num_warps"],
    )
    return out, total


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    unit_offset: bool,
    residual: torch.Tensor | None,
    config: Config | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    use = sizes(configs.config("rms_norm"), config)
    check_floats(x=x, **({} if residual is None else {"residual": residual}))
    n = x.shape[-1]
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual is {list(residual.shape)}, x {list(x.shape)}")
    if weight is not None:
        check_floats(weight=weight)
        if tuple(weight.shape) != (n,) or weight.device != x.device:
            raise ValueError(f"weight is {list(weight.shape)} on {weight.device}; expected [{n}] on {x.device}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if not x.numel():
        return out, total
    source, added = rows_of(x), rows_of(x if residual is None else residual)
    rows, inner = source.shape[0] * source.shape[1], source.shape[1]
    block = min(use["BLOCK"], power_of_two(n))
    at_a_time = max(1, use["TILE"] // block)
    launch(
        rms_norm_kernel,
        (triton.cdiv(rows, at_a_time),),
        source,
        added,
        x if weight is None else weight.contiguous(),
        out,
        total,
        rows,
        inner,
        *source.stride()[:2],
        *added.stride()[:2],
        eps,
        n=n,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        UNIT_OFFSET=unit_offset,
        ONE_TILE=block >= n,
        ROWS=at_a_time,
        BLOCK=block,
        num_warps=use["num_warps"],
    )
    return out, total


def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    config: Config | None = None,
) -> None:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864) of q and k, in place.

    q: [T, heads, head_dim], k: [T, kv_heads, head_dim], of one dtype; any strides (parts of one projection, say) whose last is 1, and
    no overlap. positions: int32 or int64 [T], each below the tables' length, which is not checked. cos, sin: float32 [positions, r / 2]
    with r <= head_dim, last stride 1; dimensions from r on are left alone. Element i < r / 2 is paired with i + r / 2 (GPT-NeoX, Llama),
    `interleaved`: 2 i with 2 i + 1 (GPT-J). Computed in float32, rounded once. q_weight and k_weight, [head_dim] both: each head is
    normalised before, as `rms_norm` does it with such a weight, eps and unit_offset (Qwen3, Gemma 3). config: sizes in place of the
    stored ones; HEADS: heads of a token in a program.
    Raises ValueError for other shapes, dtypes, strides or sizes.
    """
    use = sizes(configs.config("rope"), config)
    check_floats(q=q, k=k)
    half = cos.shape[-1]
    if q.dim() != 3 or k.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(f"q is {list(q.shape)}, k {list(k.shape)}; expected [T, heads, head_dim] and [T, kv_heads, head_dim]")
    if any(t.dtype is not torch.float32 or t.dim() != 2 or t.shape != cos.shape or t.device != q.device for t in (cos, sin)):
        raise ValueError(
            f"cos is {cos.dtype} {list(cos.shape)}, sin {sin.dtype} {list(sin.shape)}; expected float32 [n, r / 2]"
        )
    if not 1 <= half <= q.shape[2] // 2:
        raise ValueError(f"the tables have {half} columns; expected 1 to {q.shape[2] // 2}, half of a head")
    if any(t.shape[-1] > 1 and t.stride(-1) != 1 for t in (q, k, cos, sin)):
        raise ValueError("the last dimension of q, k, cos and sin must be contiguous")
    positions = check_ids("positions", positions, (q.shape[0],), q.device)
    dim, norm = q.shape[2], q_weight is not None
    if norm != (k_weight is not None):
        raise ValueError("q_weight and k_weight go together")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_floats(**{name: weight})
            if tuple(weight.shape) != (dim,) or weight.device != q.device or not weight.is_contiguous():
                raise ValueError(
                    f"{name} is {list(weight.shape)} on {weight.device}; expected [{dim}] on {q.device}, contiguous"
                )
    heads = use["HEADS"]
    q_groups, k_groups = triton.cdiv(q.shape[1], heads), triton.cdiv(k.shape[1], heads)
    launch(
        rope_kernel,
        (q.shape[0], q_groups + k_groups),
        q,
        k,
        cos if q_weight is None else q_weight,
        cos if k_weight is None else k_weight,
        positions,
        cos,
        sin,
        q.shape[1],
        k.shape[1],
        *q.stride()[:2],
        *k.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        q_groups,
        half,
        dim,
        eps,
        INTERLEAVED=interleaved,
        HEADS=heads,
        HALF=power_of_two(half),
        REST=power_of_two(dim - 2 * half) if norm and dim > 2 * half else 0,
        NORM=norm,
        UNIT_OFFSET=unit_offset,
        num_warps=use["num_warps"],
    )


def softcap(x: torch.Tensor, cap: float, *, dtype: torch.dtype = torch.float32, config: Config | None = None) -> torch.Tensor:
    """cap * tanh(x / cap), computed in float32; a new contiguous tensor [rows, n] of `dtype`: of a head's output, say, logits in float32.

    x: [rows, n], rows strided, float32, bfloat16 or float16. cap: above 0. config: sizes in place of the stored ones.
    Raises ValueError for other shapes, dtypes or sizes."""
    use = sizes(configs.config("softcap"), config)
    check_floats(x=x)
    if x.dim() != 2 or dtype not in FLOATS or not cap > 0:
        raise ValueError(f"x is {list(x.shape)}, dtype {dtype}, cap {cap}; expected [rows, n], a float dtype and a cap above 0")
    x = rows_of(x)[:, 0]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = min(use["BLOCK"], power_of_two(max(x.shape[1], 1)))
    grid = (x.shape[0], triton.cdiv(x.shape[1], block))
    launch(softcap_kernel, grid, x, out, x.shape[1], x.stride(0), float(cap), BLOCK=block, num_warps=use["num_warps"])
    return out


def gated(activation: Activation, gate: torch.Tensor, up: torch.Tensor, *, config: Config | None = None) -> torch.Tensor:
    """activation(gate) * up, the activation rounded to gate's dtype before the product; a new contiguous tensor.

    gate, up: [..., n] of one shape and dtype, any strides (halves of one tensor, say). activation: "silu"; "gelu_tanh", the tanh
    approximation of gelu (https://arxiv.org/abs/1606.08415); "gelu", the exact one, with erf. config: sizes in place of the stored ones.
    Raises ValueError for other names, shapes, dtypes or sizes.
    """
    use = sizes(configs.config("gated"), config)
    check_floats(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"gate is {list(gate.shape)}, up {list(up.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    g, u = rows_of(gate), rows_of(up)
    outer, inner, n = g.shape
    block = min(use["BLOCK"], power_of_two(n))
    grid = (outer * inner, triton.cdiv(n, block))
    code = ACTIVATIONS[activation]
    strides = (*g.stride()[:2], *u.stride()[:2])
    launch(gated_kernel, grid, g, u, out, inner, n, *strides, ACTIVATION=code, BLOCK=block, num_warps=use["num_warps"])
    return out


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; see `gated`."""
    return gated("silu", gate, up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with gelu's tanh approximation; see `gated`."""
    return gated("gelu_tanh", gate, up)


def embed(table: torch.Tensor, ids: torch.Tensor, scale: float = 1.0, *, config: Config | None = None) -> torch.Tensor:
    """table[ids] * scale, the product rounded once; a new contiguous tensor [T, n] of the table's dtype.

    table: [vocabulary, n], last stride 1. ids: int32 or int64 [T]; an id outside the vocabulary gives a row of NaN, which the sampler
    turns into the request's error, where an index beyond the table would end the device's context. scale: a model whose scale is rounded
    to its dtype first (Gemma) gives it so. config: sizes in place of the stored ones. Raises ValueError for other shapes, dtypes or sizes.
    """
    use = sizes(configs.config("embed"), config)
    check_floats(table=table)
    if table.dim() != 2 or not table.shape[0] or (table.shape[1] > 1 and table.stride(1) != 1):
        raise ValueError(
            f"table is {list(table.shape)} with strides {table.stride()}; expected [vocabulary, n] with rows in one piece"
        )
    ids = check_ids("ids", ids, (ids.numel(),), table.device)
    vocabulary, n = table.shape
    out = torch.empty(len(ids), n, dtype=table.dtype, device=table.device)
    block = min(use["BLOCK"], power_of_two(max(n, 1)))
    launch(
        embed_kernel,
        (len(ids), triton.cdiv(n, block)),
        table,
        ids,
        out,
        vocabulary,
        n,
        table.stride(0),
        float(scale),
        SCALED=scale != 1.0,
        BLOCK=block,
        num_warps=use["num_warps"],
    )
    return out
