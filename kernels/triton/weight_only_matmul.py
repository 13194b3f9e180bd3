"""W8A16 and W4A16: y = x @ weight.T + bias, weights in 8 or 4 bits, activations as they are.

W8A16   weights int8 with a scale per output.
W4A16   weights in 4 bits with a scale, and perhaps a zero point, per output and group of inputs (`int4_weight`): checkpoints of AWQ
        (arXiv 2306.00978) and GPTQ (arXiv 2210.17323).

A weight's integer, q or q - zero, is exact in x's dtype and is multiplied as such; scales are applied to float32 sums, of a row for W8A16,
of a group for W4A16. So no weight is rounded on its way into a sum. Weights are the first operand of the tensor core's product and
activations the second: the first may stay in registers, where it was unpacked, and the second may be narrow, as in decoding.

`invariant` is what it is in `matmul`: sizes that don't depend on the number of rows, for rows that don't depend on each other.
Bits are compared in Triton's interpreter only; on a device neither they nor speed are measured yet.
"""

# ruff: noqa: N806  (a kernel's parameters: pointers and integers that Triton types, constants in capitals)

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from .int4_weight import Int4Weight
from .launch import INTERPRETED, launch
from .matmul import (
    DTYPES,
    check_product,
    contiguous_rows,
    load_inputs,
    programs,
    row_stride,
    rows_of_tile,
    sizes_for,
    store_tile,
    tile_of,
)
from .quantized_matmul import check_scales


@triton.jit(do_not_specialize=["rows"])
def int8_weight_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
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
    """A tile of y a program, transposed. x: [rows, inputs], weight: int8 [outputs, inputs], scale: float32 [outputs]."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, GROUP_M)
    m, x_rows = rows_of_tile(x_ptr, tile_m, rows, x_stride, BLOCK_M)
    n, weight_rows = rows_of_tile(weight_ptr, tile_n, outputs, weight_stride, BLOCK_N)
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_inputs(x_rows[None, :], k[:, None], inputs, EVEN_K)
        integers = load_inputs(weight_rows[:, None], k[None, :], inputs, EVEN_K)
        if WIDEN:
            x = x.to(tl.float32)
        sums = tl.dot(integers.to(tl.float32).to(x.dtype), x, sums, input_precision="ieee")
    y = sums * tl.load(scale_ptr + n, mask=n < outputs, other=0.0)[:, None]
    store_tile(y_ptr, y, bias_ptr, m, n, rows, outputs, y_stride, HAS_BIAS, True)  # pyright: ignore[reportArgumentType] - a constant


@triton.jit(do_not_specialize=["rows"])
def int4_weight_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    y_stride,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """A tile of y a program, transposed. x: [rows, inputs]; weight: uint8, scale and zero: [groups, outputs] as in `Int4Weight`."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, GROUP_M)
    m, x_rows = rows_of_tile(x_ptr, tile_m, rows, x_stride, BLOCK_M)
    n, weight_rows = rows_of_tile(weight_ptr, tile_n, outputs, weight_stride, BLOCK_N)
    HALF: tl.constexpr = GROUP_SIZE // 2
    j = tl.arange(0, HALF)
    y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for group in range(tl.cdiv(inputs, GROUP_SIZE)):
        k = group * GROUP_SIZE + j
        x_low = load_inputs(x_rows[None, :], k[:, None], inputs, EVEN_K)
        x_high = load_inputs(x_rows[None, :], k[:, None] + HALF, inputs, EVEN_K)
        if WIDEN:
            x_low = x_low.to(tl.float32)
            x_high = x_high.to(tl.float32)
        packed = tl.load(weight_rows[:, None] + (group * HALF + j)[None, :]).to(tl.int32)
        if HAS_ZEROS:
            zero = tl.load(zero_ptr + group * outputs + n, mask=n < outputs, other=0).to(tl.int32)[:, None]
            low = (packed & 15) - zero
            high = (packed >> 4) - zero
        else:
            low = (packed & 15) - 8
            high = (packed >> 4) - 8
        sums = tl.dot(low.to(tl.float32).to(x_low.dtype), x_low, input_precision="ieee")
        sums = tl.dot(high.to(tl.float32).to(x_high.dtype), x_high, sums, input_precision="ieee")
        y += sums * tl.load(scale_ptr + group * outputs + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    store_tile(y_ptr, y, bias_ptr, m, n, rows, outputs, y_stride, HAS_BIAS, True)  # pyright: ignore[reportArgumentType] - a constant


def int8_weight_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = True,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """x @ (weight * scales[:, None]).T + bias, a new contiguous [M, N] of x's dtype.

    x: [M, K], float32, bfloat16 or float16, rows strided (copied when a row isn't contiguous). weight: int8 [N, K], rows strided. scales:
    float32 [N]. bias: [N], of a float dtype. invariant: see the module. config: the kernel's sizes, instead of the stored ones.
    Raises ValueError for other shapes, dtypes, strides, or tensors of several devices."""
    x = contiguous_rows(x)
    check_product(x, weight, bias)
    if x.dtype not in DTYPES or weight.dtype != torch.int8:
        raise ValueError(f"W8A16 takes float activations and an int8 weight, not {x.dtype} and {weight.dtype}")
    rows, inputs = x.shape
    outputs = weight.shape[0]
    check_scales(scales, outputs, x.device)
    y = x.new_empty(rows, outputs)
    if y.numel() == 0:
        return y
    tile = sizes_for("int8_weight_matmul", config, invariant=invariant, m=rows, n=outputs, k=inputs, bits=8 * x.itemsize)
    launch(
        int8_weight_kernel,
        programs(rows, outputs, tile),
        x,
        weight,
        scales,
        scales if bias is None else bias,
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


def int4_matmul(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    *,
    invariant: bool = True,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """x @ weight.dequantized().T + bias, a new contiguous [M, N] of x's dtype, from the packed weight.

    x: [M, K], float32, bfloat16 or float16, rows strided (copied when a row isn't contiguous, or when the weight has an `order`). bias:
    [N], of a float dtype. invariant: see the module. config: the kernel's sizes, instead of the stored ones; a group is always one step
    of the sum. Raises ValueError for other shapes and dtypes, or tensors of several devices."""
    x = contiguous_rows(x)
    if x.dim() != 2 or x.dtype not in DTYPES or x.shape[1] != weight.in_features:
        raise ValueError(f"W4A16 takes float activations [M, {weight.in_features}], not {x.dtype} {list(x.shape)}")
    check_product(x, weight.data, bias, packed=True)
    if {t.device for t in (weight.scales, weight.zeros, weight.order) if t is not None} - {x.device}:
        raise ValueError("x and all of the weight's tensors must be on one device")
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    rows, inputs = x.shape
    outputs = weight.out_features
    y = x.new_empty(rows, outputs)
    if y.numel() == 0:
        return y
    tile = sizes_for("int4_weight_matmul", config, invariant=invariant, m=rows, n=outputs, k=inputs, bits=8 * x.itemsize)
    launch(
        int4_weight_kernel,
        programs(rows, outputs, tile),
        x,
        weight.data,
        weight.scales,
        weight.data if weight.zeros is None else weight.zeros,
        weight.scales if bias is None else bias,
        y,
        rows,
        outputs,
        inputs,
        row_stride(x),
        row_stride(weight.data),
        outputs,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        EVEN_K=inputs % weight.group_size == 0,
        WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
        GROUP_SIZE=weight.group_size,
        **tile,
    )
    return y
