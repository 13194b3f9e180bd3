from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tokenbus.kernels.torch_ops import linear as module
from tokenbus.kernels.torch_ops.linear import TiledLinear, packed_available, padded_rows, tiled_linear

F32, BF16 = torch.float32, torch.bfloat16
SMOLLM2 = [(576, 576), (576, 192), (576, 1536), (1536, 576)]
ODD = [(64, 40), (33, 7), (1100, 65), (5, 3), (1, 1)]
ROWS = 130


def make(k, n, dtype, *, bias=False, mode=None):
    g = torch.Generator().manual_seed(k * 7 + n)
    weight = (torch.randn(n, k, generator=g) * k**-0.5).to(dtype)
    b = torch.randn(n, generator=g).to(dtype) if bias else None
    x = torch.randn(ROWS, k, generator=g).to(dtype)
    return TiledLinear(weight, b, mode), weight, b, x


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("k", "n"), SMOLLM2 + ODD)
def test_every_number_of_rows_gives_the_same_bits(k, n, dtype, threads):
    layer, _, _, x = make(k, n, dtype, bias=n % 2 == 1)
    threads(1)
    whole = layer(x)
    for count in (1, 2):
        threads(count)
        for rows in range(1, ROWS + 1):
            assert torch.equal(layer(x[:rows]), whole[:rows]), (count, rows)
    for count in (3, 4):
        threads(count)
        for rows in (1, 2, 7, 32, 61, ROWS):
            assert torch.equal(layer(x[:rows]), whole[:rows]), (count, rows)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("k", "n"), [(576, 192), (1536, 576), (64, 40), (33, 7)])
def test_every_position_gives_the_same_bits(k, n, dtype, threads):
    layer, _, _, x = make(k, n, dtype)
    threads(2)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(ROWS)])
    assert torch.equal(layer(x), alone)
    for shift in range(1, ROWS, 3):
        assert torch.equal(layer(x.roll(shift, 0)), alone.roll(shift, 0)), shift
    one = x[:1].expand(ROWS, -1)
    assert torch.equal(layer(one), alone[:1].expand(ROWS, -1))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_head_gives_the_same_bits(dtype, threads):
    layer, weight, _, x = make(576, 49152, dtype)
    threads(1)
    whole = layer(x)
    threads(2)
    for rows in (1, 2, 31, 64, 129):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
    many = x.repeat(3, 1)
    assert torch.equal(layer(many), whole.repeat(3, 1))
    torch.testing.assert_close(whole[:4].double(), x[:4].double() @ weight.double().T, **tolerance(dtype))


def tolerance(dtype):
    """bfloat16 rounds the result once (2^-9 of it); float32 sums a few thousand products of size 1."""
    return {"rtol": 2**-8, "atol": 1e-4} if dtype == BF16 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("mode", [None, "tile"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_is_a_linear_layer(dtype, mode):
    for k, n in SMOLLM2 + ODD:
        layer, weight, bias, x = make(k, n, dtype, bias=True, mode=mode)
        wanted = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(layer(x).double(), wanted, **tolerance(dtype))
        assert layer(x).dtype == dtype
        assert layer(x[:0]).shape == (0, n)
        assert layer.nbytes == (k * n + n) * dtype.itemsize


def test_packed_is_what_runs_here_and_tile_is_the_fallback():
    assert TiledLinear(torch.zeros(3, 4)).mode == "packed"
    assert TiledLinear(torch.zeros(3, 4, dtype=torch.float64)).mode == "tile"
    assert not packed_available(torch.float64)
    with pytest.raises(ValueError, match="no packed linear layer"):
        TiledLinear(torch.zeros(3, 4, dtype=torch.float64), mode="packed")
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        TiledLinear(torch.zeros(3, 4), torch.zeros(4))


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_tiles_do_not_depend_on_the_number_of_rows(dtype, threads):
    threads(2)
    _, weight, bias, x = make(100, 24, F32, bias=True)
    x, weight, bias = (t.to(dtype) for t in (x, weight, bias))
    whole = tiled_linear(x, weight, bias)
    for rows in (1, 2, 5, 31, 32, 33, 97, 128):
        assert torch.equal(tiled_linear(x[:rows], weight, bias), whole[:rows])


def test_strided_rows_and_fused_weights():
    a, b = make(64, 40, F32, bias=True), make(64, 24, F32, bias=True)
    fused = TiledLinear.fuse([a[1], b[1]], [a[2], b[2]])
    wide = torch.cat([a[3], a[3]], dim=1)
    found = fused(wide[:, 64:])
    assert torch.equal(found[:, :40], a[0](a[3]))
    assert torch.equal(found[:, 40:], b[0](a[3]))
    with pytest.raises(ValueError, match="2 weights, but 1 biases"):
        TiledLinear.fuse([a[1], b[1]], [a[2], None])


def test_inputs_beyond_which_threads_would_share_a_sum(threads):
    layer, weight, bias, x = make(module.SPLIT_K, 8, F32, bias=True)
    threads(1)
    whole = layer(x[:9])
    for count in (2, 4):
        threads(count)
        assert torch.equal(layer(x[:9]), whole)
        assert torch.equal(layer(x[:1]), whole[:1])
    assert whole.shape == (9, 8)
    torch.testing.assert_close(whole.double(), F.linear(x[:9].double(), weight.double(), bias.double()), rtol=1e-4, atol=1e-4)


def test_few_different_numbers_of_rows_are_compiled():
    assert [padded_rows(n) for n in (1, 2, 3, 16, 17, 64, 65, 256, 257, 2048)] == [2, 2, 3, 16, 20, 64, 80, 256, 320, 2048]
    assert len({padded_rows(n) for n in range(1, 2049)}) == 67
    assert all(0 <= padded_rows(n) - n < max(4, n // 4) for n in range(2, 2049))
