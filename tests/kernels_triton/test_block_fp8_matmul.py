"""Block-wise W8A8 against the formula in float64."""

from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.triton.block_fp8_matmul import block_fp8_matmul

from .paged import DEVICE, INTERPRETED

F32, BF16, F16, E4M3 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn
NOISE = {F32: 1e-5 if INTERPRETED else 2e-3, BF16: 2**-8, F16: 2**-11 if INTERPRETED else 2e-3}
"""Of the largest result. Tensor cores add products of e4m3 with fewer bits than float32 has."""


def randn(*shape: int, seed: int) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weight_of(outputs: int, inputs: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    weight = (randn(outputs, inputs, seed=outputs) * 100).to(E4M3)
    scales = torch.rand(-(-outputs // block[0]), inputs // block[1], generator=torch.Generator().manual_seed(outputs + 1))
    return weight, (0.01 * scales + 0.001).to(DEVICE)


def formula(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], bias: torch.Tensor | None):
    """float64: x in e4m3 with a scale for each row and group."""
    groups = x.float().view(x.shape[0], -1, block[1])
    scale = groups.abs().amax(2, keepdim=True) / 448
    seen = ((groups / torch.where(scale > 0, scale, 1)).to(E4M3).double() * scale.double()).flatten(1)
    spread = scales.double().repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)
    return seen @ (weight.double() * spread).T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "block"),
    [(1, 40, 64, (32, 32)), (17, 130, 256, (128, 128)), (3, 96, 192, (1, 64)), (5, 33, 96, (16, 96)), (2, 8, 128, (128, 32))],
)
def test_matches_the_formula(rows, outputs, inputs, block, dtype):
    """The last bit of a float32 x / scale may differ, so that now and then a value is rounded to its other neighbour."""
    weight, scales = weight_of(outputs, inputs, block)
    x = randn(rows, inputs, seed=rows).to(dtype)
    x[0, : block[1]] *= 50  # an outlier stays in its group
    for bias in (None, randn(outputs, seed=2).to(dtype)) if dtype == BF16 else (randn(outputs, seed=2).to(dtype),):
        found = block_fp8_matmul(x, weight, scales, block, bias)
        wanted = formula(x, weight, scales, block, bias)
        assert (found.dtype, found.shape) == (dtype, (rows, outputs))
        assert float((found.double() - wanted).abs().max()) <= 2 * NOISE[dtype] * float(wanted.abs().max())


def test_zeros_and_rows_that_are_not_finite():
    weight, scales = weight_of(40, 64, (32, 32))
    x = randn(4, 64, seed=1)
    x[1], x[2, 3] = 0, torch.nan
    found = block_fp8_matmul(x, weight, scales, (32, 32))
    assert bool((found[1] == 0).all())
    assert bool(found[2].isnan().all())
    assert bool(found[[0, 3]].isfinite().all())
    assert block_fp8_matmul(x[:0], weight, scales, (32, 32)).shape == (0, 40)


def test_a_row_does_not_depend_on_its_batch():
    weight, scales = weight_of(70, 64, (32, 32))
    x = randn(66, 64, seed=1).bfloat16()
    whole = block_fp8_matmul(x, weight, scales, (32, 32))
    for rows in (slice(0, 1), slice(3, 9), slice(65, 66)):
        assert torch.equal(block_fp8_matmul(x[rows], weight, scales, (32, 32)), whole[rows])
    strided = torch.cat([x, x], dim=1)[:5, :64]
    assert torch.equal(block_fp8_matmul(strided, weight, scales, (32, 32)), whole[:5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(40, 64, dtype=torch.int8)}, "a float8_e4m3fn weight, not torch.float32 and torch.int8"),
        ({"block": (32, 48)}, "blocks of 32 x 48 can't divide 64 inputs"),
        ({"block": (32, 16)}, "blocks of 32 x 16 can't divide 64 inputs"),
        ({"scales": torch.ones(1, 2)}, r"scales must be float32 \[2, 2\] beside the weight, not torch.float32 \[1, 2\]"),
        ({"scales": torch.ones(2, 2).double()}, "not torch.float64"),
        ({"bias": torch.ones(3)}, r"a bias is float32, bfloat16 or float16 \[40\]"),
        (
            {"config": {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "GROUP_M": 1}},
            "a BLOCK_K of 64 does not divide a block of 32",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    weight, scales = weight_of(40, 64, (32, 32))
    there = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in change.items()}
    arguments = {"x": torch.ones(2, 64, device=DEVICE), "weight": weight, "scales": scales, "block": (32, 32), **there}
    with pytest.raises(ValueError, match=words):
        block_fp8_matmul(**arguments)
