from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tokenbus.kernels.triton import matmul as module
from tokenbus.kernels.triton.matmul import matmul

from .paged import INTERPRETED, seeded

pytestmark = pytest.mark.usefixtures("where_kernels_run")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 33, 100), (64, 64, 64), (70, 130, 96)]
"""(M, N, K)"""


def make(m, n, k, dtype, *, seed=0):
    g = seeded(seed + 7 * k + n)
    x = torch.randn(m, k, generator=g).to(dtype)
    weight = (torch.randn(n, k, generator=g) * max(k, 1) ** -0.5).to(dtype)
    return x, weight, torch.randn(n, generator=g).to(dtype)


def tolerance(dtype):
    """One rounding of results of size 1: 2^-24, 2^-11 (float16); the interpreter cuts bfloat16 off, which errs by up to 2^-7. Below that, a
    float32 sum of a hundred products; tensor cores cut off what IEEE rounds."""
    return {"rtol": {F32: 1e-5, BF16: 2**-7, F16: 2**-10}[dtype], "atol": 2e-6 if INTERPRETED else 1e-5}


def reference(x, weight, bias=None):
    y = x.float() @ weight.float().T
    return y if bias is None else y + bias.float()


@pytest.mark.skipif(not module.INTERPRETED, reason="on a GPU")
def test_these_tests_run_in_the_interpreter():
    """Triton decides when it is imported, its own functions included."""
    assert module.INTERPRETED
    assert not isinstance(tl.cdiv, triton.JITFunction)


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_a_product(shape, dtype, invariant):
    x, weight, bias = make(*shape, dtype)
    for b in (None, bias, bias.float()):
        y = matmul(x, weight, b, invariant=invariant)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), reference(x, weight, b), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(dtype):
    x, weight, _ = make(10, 40, 24, dtype)
    wanted = matmul(x, weight)
    wide = torch.full((10, 61), torch.nan, dtype=dtype)
    wide[:, 5:29] = x
    assert torch.equal(matmul(wide[:, 5:29], weight), wanted)
    tall = torch.full((40, 50), torch.nan, dtype=dtype)
    tall[:, 11:35] = weight
    assert torch.equal(matmul(x, tall[:, 11:35]), wanted)
    assert torch.equal(matmul(x.T.contiguous().T, weight), wanted)
    every_other = torch.stack([x, torch.full_like(x, torch.nan)], dim=1).reshape(20, 24)[::2]
    assert torch.equal(matmul(every_other, weight), wanted)
    assert torch.equal(matmul(x[:1].expand(10, -1), weight), wanted[:1].expand(10, -1))


def test_nothing_beyond_the_result_is_written():
    x, weight, _ = make(3, 5, 7, F32)
    room = torch.full((64, 64), 7.0)
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "GROUP_M": 1}
    y = matmul(x, weight, config=tile)
    assert y.is_contiguous()
    module.launch(
        module.matmul_kernel,
        (1,),
        x,
        weight,
        weight,
        room[8:],
        3,
        5,
        7,
        7,
        7,
        64,
        HAS_BIAS=False,
        EVEN_K=False,
        WIDEN=False,
        **tile,
    )
    assert torch.equal(room[8:11, :5], y)
    room[8:11, :5] = 7.0
    assert bool((room == 7.0).all())


@pytest.mark.parametrize("invariant", [True, False])
def test_empty(invariant):
    x, weight, bias = make(3, 5, 7, F32)
    assert matmul(x[:0], weight, bias, invariant=invariant).shape == (0, 5)
    assert matmul(x, weight[:0], bias[:0], invariant=invariant).shape == (3, 0)
    assert torch.equal(matmul(x[:, :0], weight[:, :0], bias, invariant=invariant), bias.expand(3, -1))
    assert torch.equal(matmul(x[:, :0], weight[:, :0], invariant=invariant), torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_whatever_is_beside_it(dtype):
    x, weight, bias = make(150, 70, 200, dtype)
    whole = matmul(x, weight, bias)
    for rows in (1, 2, 16, 17, 65, 149):
        assert torch.equal(matmul(x[:rows], weight, bias), whole[:rows]), rows
    for i in (0, 63, 64, 149):
        assert torch.equal(matmul(x[i : i + 1], weight, bias), whole[i : i + 1]), i
    for shift in (1, 16, 77):
        assert torch.equal(matmul(x.roll(shift, 0), weight, bias), whole.roll(shift, 0)), shift
    loud = x.clone()
    loud[1:] *= 100
    assert torch.equal(matmul(loud, weight, bias)[:1], whole[:1])


def test_another_order_of_the_sum_is_noticed():
    """What the test above is for: tiles of another depth add up in another order."""
    x, weight, _ = make(8, 70, 200, F32)
    tile = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8}
    assert torch.equal(matmul(x, weight, config=tile), matmul(x, weight))
    assert not torch.equal(matmul(x, weight, config=tile | {"BLOCK_K": 16}), matmul(x, weight))


def test_the_order_of_tiles_changes_nothing():
    x, weight, bias = make(70, 50, 40, F32)
    tile = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16}
    first, *others = (matmul(x, weight, bias, config=tile | {"GROUP_M": g}) for g in (1, 2, 3, 8))
    torch.testing.assert_close(first, reference(x, weight, bias), **tolerance(F32))
    assert all(torch.equal(first, other) for other in others)


def test_float32_is_multiplied_in_full():
    """As TF32, 1 + 2^-12 would be 1. (The interpreter knows no TF32: test_compile_matmul looks at the instructions.)"""
    x, weight = torch.full((1, 16), 1 + 2.0**-12), torch.ones(1, 16)
    assert matmul(x, weight).item() == 16 + 16 * 2.0**-12


def test_what_it_refuses():
    x, weight, bias = make(4, 6, 8, F32)
    for args, message in [
        ((x, weight[:, :7].contiguous()), r"\[M, K\]"),
        ((x[0], weight), r"\[M, K\]"),
        ((x.double(), weight.double()), "float32, bfloat16 or float16"),
        ((x, weight.half()), "same for both"),
        ((x, weight.T.contiguous().T), "contiguous"),
        ((x, weight, bias[:5]), "bias"),
        ((x, weight, bias.double()), "bias"),
        ((x, weight.to("meta")), "one device"),
    ]:
        with pytest.raises(ValueError, match=message):
            matmul(*args)
