"""Norms, activations and rotary embedding whose rows do not depend on each other, bit by bit.

What makes an element's bits depend on its place is the end of a vectorised loop: torch computes the last few elements of each
thread's share with the scalar library, whose exp and tanh differ in the last bit. So:

- Additions, products, quotients, square roots, negations and casts are correctly rounded everywhere; they need no care. A sum of
  products is computed by two operations, never by one that might be compiled to a fused multiply-add.
- torch.exp, torch.tanh (and erf inside exact gelu) go through vector functions that treat the rest as a padded vector.
- silu and tanh-gelu do not; `_aligned` gives them only shares that are multiples of `LANES`.
- Reductions run over one row each, never divided among threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

LANES = 64
"""A multiple of what any of torch's vector loops takes at once (AVX-512: 2 x 16 float32, 2 x 32 bfloat16)."""
Into = Callable[[torch.Tensor, torch.Tensor], None]
GRAIN = 32768
"""Elements below which torch leaves an operation to one thread (at::internal::GRAIN_SIZE); each of n threads gets one n-th from n times
as many on, fewer threads take part between the two."""
SERIAL = 16384
"""The same for gelu, which has a limit of its own."""


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    unit_offset: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype.

    The mean is float32. As in transformers' Llama the normalised value is rounded to x's dtype before it is multiplied with weight;
    with `unit_offset` (Gemma) it is multiplied with 1 + weight in float32 and then rounded. `residual` is added to x, in place of
    nobody, before all: x + residual in x's dtype. weight None: no scale (https://arxiv.org/abs/1910.07467).
    """
    if residual is not None:
        x = x + residual
    wide = x.float()
    scale = _row_means(wide.square()).add_(eps).rsqrt_()
    normal = wide * scale
    if weight is None:
        return normal.to(x.dtype)
    if unit_offset:
        return normal.mul_(1.0 + weight.float()).to(x.dtype)
    return normal.to(x.dtype).mul_(weight)


def _row_means(x: torch.Tensor) -> torch.Tensor:
    """mean(x, -1, keepdim). Threads would share a single row's sum if it were long; of two rows they get one each."""
    width = x.shape[-1]
    if x.numel() == width >= GRAIN:
        return torch.stack([x, x]).mean(-1, keepdim=True)[0]
    return x.mean(-1, keepdim=True)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """torch's layer norm over the last dimension: each row by one thread, moments in float32 (https://arxiv.org/abs/1607.06450)."""
    return F.layer_norm(x.contiguous(), x.shape[-1:], weight, bias, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated against each other (GPT-NeoX, Llama).

    x: [T, heads, head_dim]; cos, sin: [T, r / 2] with r <= head_dim; dimensions from r on are left alone. Element i < r / 2 is paired
    with i + r / 2. Computed in float32, rounded once to x's dtype. Returns a new contiguous tensor.
    """
    half = cos.shape[-1]
    tokens, heads, dim = x.shape
    turned = x if dim == 2 * half else x[..., : 2 * half]
    pairs = turned.float().reshape(tokens, heads, 2, half)
    by_sin = pairs * sin.float().view(tokens, 1, 1, half)
    out = pairs * cos.float().view(tokens, 1, 1, half)
    out[:, :, 0].sub_(by_sin[:, :, 1])
    out[:, :, 1].add_(by_sin[:, :, 0])
    rotated = out.view(tokens, heads, 2 * half).to(x.dtype)
    return rotated if dim == 2 * half else torch.cat([rotated, x[..., 2 * half :]], dim=-1)


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, silu rounded to gate's dtype. [..., n] each, any strides (halves of one tensor, say)."""
    return silu(gate).mul_(up)


def gelu_tanh_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with gelu's tanh approximation (https://arxiv.org/abs/1606.08415), rounded to gate's dtype before the product."""
    return gelu_tanh(gate).mul_(up)


def silu(x: torch.Tensor) -> torch.Tensor:
    return _aligned(_silu_into, x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return _aligned(_gelu_tanh_into, x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact one, with erf."""
    return _aligned(_gelu_into, x)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), a new tensor of x's dtype (computed in float32)."""
    return torch.tanh(x.float() / cap).mul_(cap).to(x.dtype)


def _silu_into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.silu.out(x, out=out)


def _gelu_into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.gelu.out(x, approximate="none", out=out)


def _gelu_tanh_into(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def _aligned(function: Into, x: torch.Tensor) -> torch.Tensor:
    """function(x), elementwise, with no element in a scalar rest. Returns a new contiguous tensor."""
    shape = x.shape
    x = x.reshape(-1, shape[-1])
    rows, width = x.shape
    if width % LANES:
        return _aligned(function, F.pad(x, (0, -width % LANES)))[:, :width].reshape(shape)
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    threads = torch.get_num_threads()
    if rows * width <= SERIAL or threads == 1 or x.device.type != "cpu":
        function(x, out)
        return out.view(shape)
    shared = rows // threads * threads
    if shared * width < threads * GRAIN:
        shared = 0
    if shared:  # every thread gets the same number of whole rows
        function(x[:shared], out[:shared])
    _in_pieces(function, x[shared:], out[shared:])
    return out.view(shape)


def _in_pieces(function: Into, x: torch.Tensor, out: torch.Tensor) -> None:
    """Pieces too small to be divided among threads."""
    width = x.shape[1]
    columns = min(width, SERIAL)
    step = max(1, SERIAL // width)
    for row in range(0, x.shape[0], step):
        for column in range(0, width, columns):
            place = slice(row, row + step), slice(column, column + columns)
            function(x[place], out[place])
