from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import pytest
import torch

from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (3, 2), (5, 33), (32, 31), (33, 7), (40, 64), (65, 1100), (100, 577), (192, 576)]
"""(outputs, inputs): below, at and beyond tiles of 32 outputs, pairs, unrolling by 4, and sums of 128 (bf16: 1024) inputs."""
LONG = (70, 2500)
"""Inputs are taken in several blocks when there are many rows."""
ROWS = 130


def make(n, k, dtype, *, bias=True, rows=ROWS):
    g = torch.Generator().manual_seed(n * 7 + k)
    weight = (torch.randn(n, k, generator=g) * k**-0.5).to(dtype)
    b = torch.randn(n, generator=g).to(dtype) if bias else None
    return CpuLinear(weight, b), weight, b, torch.randn(rows, k, generator=g).to(dtype)


def exact(x, weight, b=None):
    return x.double() @ weight.double().T + (0 if b is None else b.double())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), [*SHAPES, LONG])
@pytest.mark.parametrize("bias", [False, True])
def test_values(n, k, dtype, bias, isa):
    """Products of bf16 values are exact in float32, so both dtypes are bounded by float32 sums: k roundings of values around 1."""
    rows = 250 if (n, k) == LONG else 37
    layer, weight, b, x = make(n, k, dtype, bias=bias, rows=rows)
    want = exact(x, weight, b)
    torch.testing.assert_close(layer(x, F32).double(), want, rtol=0, atol=2e-6 + 6e-8 * k**0.5 * 8)
    out = layer(x)
    assert out.dtype == dtype
    assert torch.equal(out, layer(x, F32).to(dtype))
    assert torch.equal(layer(x, BF16), layer(x, F32).to(BF16))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), [(33, 7), (100, 577), (192, 576)])
def test_every_number_of_rows_gives_the_same_bits(n, k, dtype, isa, threads):
    layer, _, _, x = make(n, k, dtype)
    threads(1)
    whole = layer(x, F32)
    for count in (1, 2, 3, 4):
        threads(count)
        for rows in range(1, ROWS + 1, 1 if count == 2 else 13):
            assert torch.equal(layer(x[:rows], F32), whole[:rows]), (count, rows)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_blocks_of_rows_and_inputs_change_no_bit(dtype, isa, threads):
    layer, _, _, x = make(*LONG, dtype, rows=600)
    threads(2)
    alone = torch.cat([layer(x[i : i + 3], F32) for i in range(0, 600, 3)])
    for rows in (12, 13, 60, 200, 513, 600):
        assert torch.equal(layer(x[:rows], F32), alone[:rows]), rows


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), [(33, 7), (100, 577)])
def test_every_position_gives_the_same_bits(n, k, dtype, isa, threads):
    layer, _, _, x = make(n, k, dtype)
    threads(2)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(ROWS)])
    assert torch.equal(layer(x), alone)
    for shift in range(1, ROWS, 7):
        assert torch.equal(layer(x.roll(shift, 0)), alone.roll(shift, 0)), shift
    assert torch.equal(layer(x[:1].expand(ROWS, -1)), alone[:1].expand(ROWS, -1))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_strides(dtype, isa):
    layer, weight, b, x = make(33, 15, dtype)
    wide = torch.full((ROWS, 40), torch.nan, dtype=dtype)
    wide[:, 3:18] = x
    assert torch.equal(layer(wide[:, 3:18]), layer(x))
    assert torch.equal(layer(x.T.contiguous().T), layer(x))
    columns = torch.full((33, 40), torch.nan, dtype=dtype)
    columns[:, 7:22] = weight
    assert torch.equal(CpuLinear(columns[:, 7:22], b)(x), layer(x))
    assert torch.equal(CpuLinear(weight.T.contiguous().T, b)(x), layer(x))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("n", [5, 64, 77])
def test_outputs_stay_within_their_rows(dtype, out_dtype, n, isa, library):
    """A row's gap, up to ldy, is left alone; TB_ADD adds in float32; parts on the calling thread give what tb_linear gives."""
    layer, _, _, x = make(n, 19, dtype)
    rows, ldy = 7, n + 3
    call = (layer.handle, x.data_ptr(), x.stride(0))
    code = lib.DTYPES["float32" if out_dtype == F32 else "bfloat16"]
    plain = layer(x[:rows], F32)
    y = torch.full((rows + 1, ldy), 7.0, dtype=out_dtype)
    library.c.tb_linear(*call, y.data_ptr(), ldy, rows, code, 0)
    assert torch.equal(y[:rows, :n], plain.to(out_dtype))
    assert (y[:rows, n:] == 7).all()
    assert (y[rows] == 7).all()
    again = torch.full_like(y, 7.0)
    tiles = -(-n // lib.TILE_N)
    for begin in range(tiles):
        library.c.tb_linear_part(*call, again.data_ptr(), ldy, rows, code, 0, begin, begin + 1)
    assert torch.equal(again, y)
    library.c.tb_linear(*call, again.data_ptr(), ldy, rows, code, 1)
    assert torch.equal(again[:rows, :n], (y[:rows, :n].float() + plain).to(out_dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_fused_layers(dtype, isa, threads):
    parts = [make(n, 45, dtype, bias=n != 20) for n in (33, 20, 7)]
    x = parts[0][3]
    threads(3)
    fused = CpuLinear.fuse([p[1] for p in parts], [p[2] for p in parts])
    assert fused.out_features == 60
    assert torch.equal(fused(x), torch.cat([p[0](x) for p in parts], 1))
    plain = CpuLinear.fuse([p[1] for p in parts])
    assert torch.equal(plain(x), torch.cat([CpuLinear(p[1])(x) for p in parts], 1))
    assert plain.nbytes == 60 * 45 * dtype.itemsize
    assert fused.nbytes == plain.nbytes + 60 * dtype.itemsize


def test_rounding_to_bfloat16(isa):
    """To nearest even, infinities and NaN as torch's."""
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, -3.4e38, torch.inf, torch.nan, 0.0, 1e-40])
    layer = CpuLinear(torch.ones(1, 1))
    got = layer(values[:, None], BF16)[:, 0]
    torch.testing.assert_close(got, values.to(BF16), rtol=0, atol=0, equal_nan=True)


def test_paths_differ_where_they_should(library):
    """use_isa takes effect: pairs summed at once (avx512bf16) don't give the bits of one product after the other."""
    if "avx512bf16" not in lib.available_isas():
        pytest.skip("one kernel set only")
    layer, _, _, x = make(192, 576, BF16)
    results = []
    for name in ("avx512", "avx512bf16"):
        lib.use_isa(name)
        results.append(layer(x, F32))
    assert not torch.equal(*results)


def test_bad_arguments(library):
    with pytest.raises(ValueError, match="needs a weight"):
        CpuLinear(torch.ones(3))
    with pytest.raises(ValueError, match="needs a weight"):
        CpuLinear(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        CpuLinear(torch.ones(3, 2, dtype=torch.float16))
    with pytest.raises(ValueError, match="one dtype"):
        CpuLinear(torch.ones(3, 2), torch.ones(3, dtype=BF16))
    with pytest.raises(ValueError, match="2 weights, but 1 biases"):
        CpuLinear.fuse([torch.ones(3, 2)] * 2, [None])
    layer = CpuLinear(torch.ones(3, 2))
    for x in (torch.ones(4, 3), torch.ones(2), torch.ones(4, 2, dtype=BF16)):
        with pytest.raises(ValueError, match="this layer takes"):
            layer(x)
    assert layer(torch.ones(0, 2)).shape == (0, 3)


def test_no_memory_is_an_error(library):
    with pytest.raises(MemoryError):
        lib.pack("float32", [(0, 2**31, 1)], 1)
    source = (ctypes.c_float * 4)()
    with pytest.raises(MemoryError):
        lib.pack("float32", [(ctypes.addressof(source), 2**31 - 64, 0)], 2**31 - 64)


def test_memory_goes_back(library):
    """Layers that are gone leave nothing: mappings are unmapped with their last piece."""
    weight = torch.ones(4096, 4096)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    before = resident()
    layers = [CpuLinear(weight) for _ in range(2)]
    assert resident() - before >= 2 * weight.nbytes
    del layers
    gc.collect()
    assert resident() - before < weight.nbytes
