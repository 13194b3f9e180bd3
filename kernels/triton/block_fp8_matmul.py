"""W8A8 in blocks: y = x @ weight.T + bias, both e4m3, weights with a scale for each block of outputs x inputs (128 x 128, mostly),
activations with one for each row and group of as many inputs. DeepSeek-V3's scheme (arXiv 2412.19437, section 3.3.2): the products of a
group are added in the tensor cores, scaled, and added to the others in float32.

`invariant` is what it is in `matmul`. Bits are compared in Triton's interpreter only; on a device neither they nor speed are measured yet.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from .launch import launch
from .matmul import DTYPES, check_product, contiguous_rows, programs, row_stride, sizes_for, tile_of
from .quantized_matmul import FP8, quantize_activations

SMALLEST_GROUP = 32
"""Inputs that one instruction multiplies."""


@triton.jit(do_not_specialize=["rows"])
def block_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    y_stride,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """A tile of y a program. x: [rows, inputs], weight: [outputs, inputs], e4m3; scales float32 [rows, groups] and [blocks of outputs,
    groups], contiguous. BLOCK_K divides BLOCK_COLUMNS, which divides inputs."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, GROUP_M)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x_ptr + tl.where(m < rows, m, 0).to(tl.int64) * x_stride
    weight_rows = weight_ptr + tl.where(n < outputs, n, 0).to(tl.int64) * weight_stride
    groups = inputs // BLOCK_COLUMNS
    x_scales = x_scale_ptr + m.to(tl.int64) * groups
    weight_scales = weight_scale_ptr + (n // BLOCK_ROWS).to(tl.int64) * groups
    y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows[:, None] + k[None, :])
        weight = tl.load(weight_rows[None, :] + k[:, None])
        group = start // BLOCK_COLUMNS
        x_scale = tl.load(x_scales + group, mask=m < rows, other=0.0)
        weight_scale = tl.load(weight_scales + group, mask=n < outputs, other=0.0)
        y += tl.dot(x, weight, max_num_imprecise_acc=BLOCK_K) * x_scale[:, None] * weight_scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    at = y_ptr + m.to(tl.int64)[:, None] * y_stride + n[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < outputs)[None, :])


def block_fp8_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = True,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """x, quantised, @ (weight * its scales).T + bias, a new contiguous [M, N] of x's dtype.

    x: [M, K], float32, bfloat16 or float16, rows strided (copied when a row isn't contiguous). weight: float8_e4m3fn [N, K], rows strided.
    block: outputs and inputs that share a scale; its inputs a multiple of 32 that divides K. scales: float32 [ceil(N / block[0]),
    K / block[1]], contiguous. bias: [N], of a float dtype. invariant: see the module. config: the kernel's sizes, instead of those stored
    for `fp8_matmul`; BLOCK_K divides block[1].
    Raises ValueError for other shapes, dtypes, strides, tensors of several devices, and a device that can't multiply e4m3."""
    x = contiguous_rows(x)
    check_product(x, weight, bias)
    if x.dtype not in DTYPES or weight.dtype != FP8:
        raise ValueError(
            f"block-wise W8A8 takes float activations and a float8_e4m3fn weight, not {x.dtype} and {weight.dtype}"
        )
    rows, inputs = x.shape
    outputs, (high, wide) = weight.shape[0], block
    if high < 1 or wide < 1 or wide % SMALLEST_GROUP or inputs % wide:
        raise ValueError(
            f"blocks of {high} x {wide} can't divide {inputs} inputs: a multiple of {SMALLEST_GROUP} that divides them can"
        )
    shape = (-(-outputs // high), inputs // wide)
    if scales.shape != shape or scales.dtype != torch.float32 or not scales.is_contiguous() or scales.device != x.device:
        raise ValueError(f"scales must be float32 {list(shape)} beside the weight, not {scales.dtype} {list(scales.shape)}")
    y = x.new_empty(rows, outputs)
    if y.numel() == 0:
        return y
    values, x_scales = quantize_activations(x.reshape(-1, wide), FP8)
    tile = sizes_for("fp8_matmul", config, invariant=invariant, m=rows, n=outputs, k=inputs, bits=8)
    if config is None:
        tile["BLOCK_K"] = min(tile["BLOCK_K"], wide & -wide)
    if wide % tile["BLOCK_K"]:
        raise ValueError(f"a BLOCK_K of {tile['BLOCK_K']} does not divide a block of {wide} inputs")
    launch(
        block_fp8_kernel,
        programs(rows, outputs, tile),
        values,
        x_scales,
        weight,
        scales,
        scales if bias is None else bias,
        y,
        rows,
        outputs,
        inputs,
        inputs,
        row_stride(weight),
        outputs,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=high,
        BLOCK_COLUMNS=wide,
        **tile,
    )
    return y
