"""W8A8: y = x @ weight.T + bias, weights and activations in 8 bits, int8 or fp8 (e4m3), with a scale per output and one per row ("token").

int8 products are added as integers, exactly. fp8 products are added in float32; Hopper's tensor cores add them with fewer bits, so their
sums are taken over into float32 registers after each BLOCK_K (at most 128) products, as DeepSeek-V3 does (arXiv 2412.19437, section 3.3.2).
Weights in 8 or 4 bits with activations as they are: `weight_only_matmul`.

`invariant` is what it is in `matmul`: sizes that don't depend on the number of rows, for rows that don't depend on each other.
Bits are compared in Triton's interpreter only; on a device neither they nor speed are measured yet.
"""

# ruff: noqa: SIM108  (a kernel's parameters: pointers and integers that Triton types, constants in capitals)

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from .launch import launch
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

FP8 = torch.float8_e4m3fn
LIMITS = {torch.int8: 127.0, FP8: 448.0}
"""The largest magnitude of each dtype that activations and weights are quantised to."""
SMALLEST = 1e-30
"""A row without a larger magnitude is quantised to zeros."""
MAX_INT8_INPUTS = (2**31 - 1) // (128 * 128)
"""Products of two int8 that an int32 can add."""


@triton.jit
def to_e4m3_grid(x):
    """float32 of magnitude at most 448 to the nearest value that e4m3 has, ties to even; what converts it then has nothing left to round,
    whether hardware, an emulation or the interpreter. Three bits of fraction; below 2^-6 steps of 2^-9."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # 1.5 * 2^14, where float32 has steps of 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, scale_ptr, inputs, x_stride, LIMIT: tl.constexpr, INTEGER: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A row a program. x: [rows, inputs], rows strided; q: the same shape, contiguous; scale: float32 [rows]. To be launched without
    fusion, so that x is scaled before it is rounded."""
    row = tl.program_id(0).to(tl.int64)
    magnitudes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        k = start + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x_ptr + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32))
        magnitudes = tl.maximum(magnitudes, tl.where(size < float("inf"), size, float("inf")))
    peak = tl.max(magnitudes, axis=0)
    some = peak > 1e-30  # pyright: ignore[reportOperatorIssue]
    finite = peak < float("inf")  # pyright: ignore[reportOperatorIssue]
    scale = tl.where(some, tl.div_rn(peak, LIMIT), 0.0)
    tl.store(scale_ptr + row, tl.where(finite, scale, float("nan")))
    inverse = tl.where(some & finite, tl.div_rn(LIMIT, tl.where(some, peak, 1.0)), 0.0)
    for start in range(0, inputs, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0) * inverse
        if INTEGER:
            q = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds to integers, ties to even
        else:
            q = to_e4m3_grid(x)
        tl.store(q_ptr + row * inputs + k, q.to(q_ptr.dtype.element_ty), mask=k < inputs)


@triton.jit(do_not_specialize=["rows"])
def w8a8_kernel(
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
    INTEGER: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """A tile of y a program. x: [rows, inputs], weight: [outputs, inputs], both int8 (INTEGER) or both e4m3; scales float32."""
    tile_m, tile_n = tile_of(tl.program_id(0), rows, outputs, BLOCK_M, BLOCK_N, GROUP_M)
    m, x_rows = rows_of_tile(x_ptr, tile_m, rows, x_stride, BLOCK_M)
    n, weight_rows = rows_of_tile(weight_ptr, tile_n, outputs, weight_stride, BLOCK_N)
    if INTEGER:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    else:
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = load_inputs(x_rows[:, None], k[None, :], inputs, EVEN_K)
        weight = load_inputs(weight_rows[None, :], k[:, None], inputs, EVEN_K)
        if INTEGER:
            sums = tl.dot(x, weight, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(x, weight, sums, max_num_imprecise_acc=BLOCK_K)
    x_scale = tl.load(x_scale_ptr + m, mask=m < rows, other=0.0)
    weight_scale = tl.load(weight_scale_ptr + n, mask=n < outputs, other=0.0)
    y = sums.to(tl.float32) * x_scale[:, None] * weight_scale[None, :]
    store_tile(y_ptr, y, bias_ptr, m, n, rows, outputs, y_stride, HAS_BIAS, False)  # pyright: ignore[reportArgumentType] - a constant


def quantize_activations(
    x: torch.Tensor, dtype: torch.dtype = torch.int8, *, config: Mapping[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales), x nearly q * scales[:, None]: each row by itself, so that its bits depend on nothing else.

    x: [M, K] of float32, bfloat16 or float16, rows strided (copied when a row isn't contiguous). dtype: int8 or float8_e4m3fn. q: `dtype`
    [M, K], scales: float32 [M], max|x| / 127 or max|x| / 448. A row of magnitudes of at most 1e-30 is zeros with scale 0; one with a
    NaN or an infinity gets the scale NaN, and with it a product of NaNs. Raises ValueError for other shapes and dtypes."""
    if x.dim() != 2 or x.dtype not in DTYPES:
        raise ValueError(f"activations are float32, bfloat16 or float16 [M, K], not {x.dtype} {list(x.shape)}")
    limit = _limit(dtype, x.device)
    x = contiguous_rows(x)
    rows, inputs = x.shape
    q, scales = x.new_empty(rows, inputs, dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    if rows:
        sizes = sizes_for("quantize_activations", config, invariant=False, k=inputs)
        integer = dtype == torch.int8
        launch(
            quantize_kernel,
            (rows,),
            x,
            q,
            scales,
            inputs,
            row_stride(x),
            enable_fp_fusion=False,
            LIMIT=limit,
            INTEGER=integer,
            **sizes,
        )
    return q, scales


def quantize_weight(weight: torch.Tensor, dtype: torch.dtype = torch.int8) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scales) of a weight [N, K], a scale per output, by torch: for weights that are quantised as they are loaded. q: `dtype` [N, K],
    scales: float32 [N]. Raises ValueError for other dtypes than int8 and float8_e4m3fn, and for a weight that isn't finite."""
    limit = _limit(dtype, torch.device("cpu"))
    values = weight.float()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("a weight with NaN or infinity can't be quantised")
    scales = values.abs().amax(dim=1) / limit if weight.shape[1] else values.new_zeros(weight.shape[0])
    scaled = values / torch.where(scales > SMALLEST / limit, scales, torch.inf)[:, None]
    return (torch.round(scaled) if dtype == torch.int8 else scaled.clamp(-limit, limit)).to(dtype), scales


def w8a8_matmul(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    invariant: bool = True,
    config: Mapping[str, int] | None = None,
) -> torch.Tensor:
    """(x * x_scales[:, None]) @ (weight * weight_scales[:, None]).T + bias, a new contiguous [M, N] of `dtype`.

    x: [M, K], weight: [N, K], rows strided, both int8 or both float8_e4m3fn; x_scales: float32 [M], weight_scales: float32 [N]. bias: [N],
    float32, bfloat16 or float16. dtype: one of these. invariant: see the module; int8 sums are exact, and are so without it. config: the
    kernel's sizes, instead of the stored ones; of e4m3 a BLOCK_K of at most 128.
    Raises ValueError for other shapes, dtypes, strides, tensors of several devices, e4m3 on a device that can't multiply it (before
    compute capability 8.9), and int8 with more than 131,071 inputs, whose sum an int32 can't hold."""
    x = contiguous_rows(x)
    check_product(x, weight, bias)
    if x.dtype not in LIMITS or weight.dtype != x.dtype or dtype not in DTYPES:
        raise ValueError(
            f"W8A8 takes int8 or float8_e4m3fn, the same for both, and gives a float dtype, not {x.dtype}, {weight.dtype}, {dtype}"
        )
    _limit(x.dtype, x.device)
    rows, inputs = x.shape
    outputs, integer = weight.shape[0], x.dtype == torch.int8
    if integer and inputs > MAX_INT8_INPUTS:
        raise ValueError(f"int8 products of {inputs} inputs may exceed an int32; there can be {MAX_INT8_INPUTS}")
    check_scales(x_scales, rows, x.device)
    check_scales(weight_scales, outputs, x.device)
    y = x.new_empty(rows, outputs, dtype=dtype)
    if y.numel() == 0:
        return y
    name = "int8_matmul" if integer else "fp8_matmul"
    tile = sizes_for(name, config, invariant=invariant and not integer, m=rows, n=outputs, k=inputs, bits=8)
    launch(
        w8a8_kernel,
        programs(rows, outputs, tile),
        x,
        x_scales,
        weight,
        weight_scales,
        weight_scales if bias is None else bias,
        y,
        rows,
        outputs,
        inputs,
        row_stride(x),
        row_stride(weight),
        outputs,
        HAS_BIAS=bias is not None,
        INTEGER=integer,
        EVEN_K=inputs % tile["BLOCK_K"] == 0,
        **tile,
    )
    return y


def _limit(dtype: torch.dtype, device: torch.device) -> float:
    """The largest magnitude of a dtype. Raises ValueError when it isn't one to quantise to, on that device."""
    if dtype not in LIMITS:
        raise ValueError(f"activations and weights are quantised to int8 or float8_e4m3fn, not {dtype}")
    if dtype == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError(f"{torch.cuda.get_device_name(device)} can't multiply float8_e4m3fn: use int8")
    return LIMITS[dtype]


def check_scales(scales: torch.Tensor, count: int, device: torch.device) -> None:
    """Raises ValueError unless scales are float32 [count], contiguous, on that device."""
    if scales.shape != (count,) or scales.dtype != torch.float32 or not scales.is_contiguous() or scales.device != device:
        raise ValueError(
            f"scales must be float32 [{count}] beside what they scale, not {scales.dtype} {list(scales.shape)} on {scales.device}"
        )
