"""y = x @ weight.T + bias whose rows do not depend on each other, and the same without that promise.

Matrix libraries choose another algorithm (other tiles, another division of the sum) when the number of rows changes, so a request's bits
depend on who else is in the batch: "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025. As there, the invariant
product has tiles of one size whatever M is, takes K in ascending order, one BLOCK_K after the other into float32 accumulators, and never
divides a sum among programs. Its sizes follow from N and K alone (`configs`), and the number of rows is not specialised upon, so one
binary serves every M. The other variant is the same kernel with tiles that follow M.

Sums are float32, rounded once to y's dtype. float32 operands are multiplied as they are, never as TF32.

Bits are compared in Triton's interpreter only; on a device neither they nor speed are measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from . import configs
from .launch import INTERPRETED, launch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def tile_of(program, rows, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m, n): which tile of y a program computes. GROUP_M rows of tiles go through the columns together, so that a weight's tile is read
    while it is in the L2 cache. It changes when a tile is computed, never what it is."""
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles_n = tl.cdiv(outputs, BLOCK_N)
    group = program // (GROUP_M * tiles_n)
    within = program % (GROUP_M * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + within % height, within // height


@triton.jit
def rows_of_tile(pointer, tile, count, stride, BLOCK: tl.constexpr):
    """(numbers of a tile's rows, pointers to them); beyond the last row: to the first."""
    i = tile * BLOCK + tl.arange(0, BLOCK)
    return i, pointer + tl.where(i < count, i, 0).to(tl.int64) * stride


@triton.jit
def load_inputs(rows, k, inputs, EVEN_K: tl.constexpr):
    """Inputs k of rows, pointers; one of them [n, 1], the other [1, n]. EVEN_K: all k are below `inputs`; otherwise zeros from there on."""
    if EVEN_K:
        return tl.load(rows + k)
    return tl.load(rows + k, mask=k < inputs, other=0.0)


@triton.jit
def store_tile(
    y_ptr, y, bias_ptr, m, n, rows, outputs, y_stride, HAS_BIAS: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """y, float32 [m, n] or TURNED [n, m], and the bias in y_ptr's dtype, as far as there are such rows and outputs."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)
        y += bias[:, None] if TURNED else bias[None, :]
    if TURNED:
        at = y_ptr + m.to(tl.int64)[None, :] * y_stride + n[:, None]
        keep = (m < rows)[None, :] & (n < outputs)[:, None]
    else:
        at = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
        keep = (m < rows)[:, None] & (n < outputs)[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    y_stride,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """A tile of y a program. x: [rows, inputs], weight: [outputs, inputs], y: [rows, outputs], rows strided, the rest contiguous.

    Rows and outputs beyond the last are computed from the first one's values and not stored. EVEN_K: inputs is a multiple of BLOCK_K.
    WIDEN: multiply in float32 (see `INTERPRETED`)."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, GROUP_M)
    m, x_rows = rows_of_tile(x_ptr, tile_m, rows, x_stride, BLOCK_M)
    n, weight_rows = rows_of_tile(weight_ptr, tile_n, outputs, weight_stride, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_inputs(x_rows[:, None], k[None, :], inputs, EVEN_K)
        weight = load_inputs(weight_rows[None, :], k[:, None], inputs, EVEN_K)
        if WIDEN:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    store_tile(y_ptr, sums, bias_ptr, m, n, rows, outputs, y_stride, HAS_BIAS, False)  # pyright: ignore[reportArgumentType] - a constant


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = True,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, a new contiguous [M, N] of x's dtype.

    x: [M, K], M >= 0, of float32, bfloat16 or float16, rows strided (copied when a row isn't contiguous). weight: [N, K] of x's dtype,
    rows strided. bias: [N], contiguous, of one of these dtypes, added before the sum is rounded. invariant: a row's bits do not depend
    on M and its position; otherwise tiles follow M. config: the kernel's sizes, instead of the stored ones.
    Raises ValueError for other shapes, dtypes, strides, or tensors of several devices."""
    x = contiguous_rows(x)
    check_product(x, weight, bias)
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(f"a product takes float32, bfloat16 or float16, the same for both, not {x.dtype} and {weight.dtype}")
    rows, inputs = x.shape
    outputs = weight.shape[0]
    y = x.new_empty(rows, outputs)
    if y.numel() == 0:
        return y
    tile = sizes_for("matmul", config, invariant=invariant, m=rows, n=outputs, k=inputs, bits=8 * x.itemsize)
    launch(
        matmul_kernel,
        programs(rows, outputs, tile),
        x,
        weight,
        weight if bias is None else bias,
        y,
        rows,
        outputs,
        inputs,
        row_stride(x),
        row_stride(weight),
        outputs,
        HAS_BIAS=bias is not None,
        EVEN_K=inputs % tile["BLOCK_K"] == 0,
        WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
        **tile,
    )
    return y


def sizes_for(kernel: str, given: Mapping[str, int] | None, *, invariant: bool, **shape: int) -> dict[str, int]:
    """The sizes given, or the stored ones of the kernel: of its invariant variant, which never learns of `m`, or the other."""
    if given is not None:
        return dict(given)
    if not invariant:
        return configs.config(kernel, **shape)
    return configs.config(kernel + configs.INVARIANT, **{name: size for name, size in shape.items() if name != "m"})


def programs(rows: int, outputs: int, tile: Mapping[str, int]) -> tuple[int]:
    return (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(outputs, tile["BLOCK_N"]),)


def row_stride(x: torch.Tensor) -> int:
    """x's distance between rows; of a single row, whose stride may be anything, its length: it must not make for another binary."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy when it has rows that aren't contiguous."""
    return x if x.dim() != 2 or x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, packed: bool = False) -> None:
    """Raises ValueError unless x is [M, K], weight [N, K] with contiguous rows (or, packed, a row of anything for each output), bias a
    float [N], all on one device. Dtypes of x and weight are the caller's to check."""
    if x.dim() != 2 or weight.dim() != 2 or (not packed and x.shape[1] != weight.shape[1]):
        raise ValueError(f"a product takes x [M, K] and a weight [N, K], not {list(x.shape)} and {list(weight.shape)}")
    if weight.shape[1] > 1 and weight.stride(1) != 1:
        raise ValueError("the rows of a weight must be contiguous: call .contiguous() on it once, when it is loaded")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype not in DTYPES or not bias.is_contiguous()):
        raise ValueError(f"a bias is float32, bfloat16 or float16 [{weight.shape[0]}], not {bias.dtype} {list(bias.shape)}")
    if {t.device for t in (weight, bias) if t is not None} - {x.device}:
        raise ValueError("x, weight and bias must be on one device")
