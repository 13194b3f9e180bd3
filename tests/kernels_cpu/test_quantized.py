from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from tokenbus.kernels.cpu import lib, probe
from tokenbus.kernels.cpu.linear import CpuLinear
from tokenbus.kernels.cpu.quantized import GgufMatrix, QuantLinear, supported_gguf_types

from .gguf_blocks import HALVES, TYPES, activations, block_size, from_bytes, matrix

F32, BF16 = torch.float32, torch.bfloat16
KINDS = ("int8", *TYPES)
INT8_SHAPES = [(1, 1), (3, 2), (5, 33), (32, 31), (33, 7), (64, 130), (65, 1100), (100, 577)]
ROWS = 130


def normal(rows, k, seed=0, dtype=F32):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer_of(kind, n, k, *, bias=None, dtype=F32, seed=0):
    """The layer and the float32 weights that it holds."""
    biases = [] if bias is None else [bias]
    if kind == "int8":
        layer = QuantLinear.int8([normal(n, k, seed + 1) * k**-0.5], biases, dtype)
        return layer, layer.rows(torch.arange(n)).float()
    made = matrix(kind, n, k, seed)
    return QuantLinear.gguf([made.packed], biases, dtype), made.weight


def test_supported_types():
    assert supported_gguf_types() == set(TYPES)


def int8_weights(w):
    """float64 values of w [N, K] as int8 with a scale a row, by the rule for activations."""
    return activations(w, w.shape[1])


@pytest.mark.parametrize("source", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), INT8_SHAPES)
def test_int8_values(n, k, source, isa):
    w, b, x = normal(n, k, 1, source), normal(1, n, 2, source)[0], normal(37, k, 3)
    layer = QuantLinear.int8([w], [b], F32)
    assert (layer.in_features, layer.out_features, layer.dtype) == (k, n, F32)
    held = int8_weights(w.float())
    torch.testing.assert_close(layer.rows(torch.arange(n)).double(), held, rtol=1.3e-7, atol=0)
    x64 = activations(x, k)
    bound = x64.abs() @ held.abs().T + b.abs()
    assert bool(((layer(x).double() - x64 @ held.T - b.double()).abs() <= 4e-7 * bound).all())


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("n", "k"), [*INT8_SHAPES, (70, 4096)])
def test_stored_int8_values(n, k, dtype, isa):
    """All of int8, -128 included; sums are those of the integers, exactly, times both scales."""
    generator = torch.Generator().manual_seed(n)
    parts = [torch.randint(-128, 128, (rows, k), generator=generator, dtype=torch.int8) for rows in (n, 5)]
    parts[0][0] = -128
    scales = [torch.rand(len(q), generator=generator) + 0.01 for q in parts]
    bias, x = normal(1, n, 2)[0], normal(37, k, 3, dtype)
    layer = QuantLinear.stored_int8(parts, scales, [bias, None], dtype)
    assert (layer.in_features, layer.out_features, layer.dtype) == (k, n + 5, dtype)
    held = torch.cat([q.double() * s.double()[:, None] for q, s in zip(parts, scales, strict=True)])
    rows = layer.rows(torch.arange(n + 5))
    torch.testing.assert_close(rows.double(), held, rtol=6e-8 if dtype == F32 else 2**-8, atol=0)
    x64, b = activations(x.float(), k), torch.cat([bias, torch.zeros(5)])
    bound = x64.abs() @ held.abs().T + b.abs()
    found = layer(x, F32).double()
    assert bool(((found - x64 @ held.T - b.double()).abs() <= 4e-7 * bound).all())
    assert torch.equal(layer(x[3:4], F32), layer(x, F32)[3:4])


@pytest.mark.parametrize(
    ("weight", "scales", "words"),
    [
        (torch.ones(4, 8), torch.ones(4), "weights are int8"),
        (
            torch.ones(4, 8, dtype=torch.int8),
            torch.ones(3),
            r"float32 \[N\] scales, not torch.int8 \[4, 8\], torch.float32 \[3\]",
        ),
        (torch.ones(4, 8, dtype=torch.int8), torch.ones(4).double(), "torch.float64"),
    ],
)
def test_stored_int8_of_other_tensors(weight, scales, words, library):
    with pytest.raises(ValueError, match=words):
        QuantLinear.stored_int8([weight], [scales])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("n", "blocks"), [(1, 1), (33, 3), (70, 2), (32, 5)])
def test_gguf_values(name, n, blocks, isa):
    k = block_size(name) * blocks
    made, b, x = matrix(name, n, k, n), normal(1, n, 2)[0], normal(29, k, 3)
    layer = QuantLinear.gguf([made.packed], [b])
    assert torch.equal(layer.rows(torch.arange(n)), made.weight)
    x64, held = activations(x, 32), made.weight.double()
    largest = held.abs().unflatten(1, (-1, 32)).amax(-1)  # minima and scaled integers may cancel: their size counts
    bound = 4 * x64.abs().unflatten(1, (-1, 32)).sum(-1) @ largest.T + b.abs()
    assert bool(((layer(x).double() - x64 @ held.T - b.double()).abs() <= 3e-7 * bound).all())


@pytest.mark.parametrize("name", sorted(set(TYPES) - {"Q4_K", "Q5_K", "Q6_K"}))
def test_what_gguf_quantises(name, isa):
    """Blocks as files have them, and matrices whose product is known: the error is that of int8 activations alone."""
    w = normal(48, 192, 1).numpy()
    made = from_bytes(name, quantize(w, GGMLQuantizationType[name]), 192)
    assert torch.equal(QuantLinear.gguf([made.packed]).rows(torch.arange(48)), made.weight)
    found = QuantLinear.gguf([made.packed])(torch.eye(192))
    torch.testing.assert_close(found.T, made.weight, rtol=1e-6, atol=1e-6)


def whole_numbers(k, rows=40):
    """x whose blocks have the scale 1: integers up to 127, few of them large."""
    x = torch.randint(-3, 4, (rows, k), generator=torch.Generator().manual_seed(k)).float()
    x[:, ::32] = 127
    x[::2, ::32] = -127
    return x


@pytest.mark.parametrize("name", TYPES)
def test_integer_sums_are_exact(name, isa):
    """With scales of 1 all sums on the way are integers below 2^24, where float32 doesn't round either."""
    made = matrix(name, 45, 512, halves=(1.0, -1.0))
    x = whole_numbers(512)
    largest = {"Q4_K": 63 * 15 + 63, "Q5_K": 63 * 31 + 63, "Q6_K": 128 * 32}.get(name, 128)
    assert float(x.abs().sum(1).amax()) * largest < 2**24
    assert torch.equal(QuantLinear.gguf([made.packed])(x).double(), x.double() @ made.weight.double().T)


@pytest.mark.parametrize("name", ["Q8_0", "int8"])
def test_largest_products(name, isa):
    """255 * 127 and -128 * 127 everywhere: nothing saturates."""
    k = 1024
    x = torch.full((3, k), 127.0)
    x[1] = -127
    x[2, 1::2] = -127
    low, high = (-127, 127) if name == "int8" else (-128, 127)
    w = torch.full((5, k), float(low))
    w[1] = high
    w[2, ::2] = high
    w[3, 1::2] = high
    w[4, ::3] = high
    if name == "int8":
        layer = QuantLinear.int8([w])
    else:
        blocks = np.zeros((5, k // 32, 34), np.uint8)
        blocks[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blocks[..., 2:] = w.numpy().astype(np.int8).view(np.uint8).reshape(5, k // 32, 32)
        layer = QuantLinear.gguf([GgufMatrix(blocks.reshape(5, -1), "Q8_0", k)])
    assert torch.equal(layer(x).double(), x.double() @ w.double().T)


def test_int8_sums_longer_than_an_integer_holds(isa):
    """131,072 products of 127 * 127 (2.1e9) and more: sums become floats every 65,536."""
    k = 200_003
    x, w = torch.full((3, k), 127.0), torch.full((2, k), 127.0)
    w[1, ::2] = -127
    x[1, 5:] = 0
    found = QuantLinear.int8([w])(x).double()
    torch.testing.assert_close(found, x.double() @ w.double().T, rtol=1e-6, atol=0)
    assert torch.equal(found[1], x[1].double() @ w.double().T)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_activations_and_outputs(kind, isa):
    layer, _ = layer_of(kind, 37, 256, bias=normal(1, 37, 5)[0])
    narrow, _ = layer_of(kind, 37, 256, bias=normal(1, 37, 5)[0], dtype=BF16)
    x = normal(9, 256, 4, BF16)
    assert torch.equal(narrow(x, F32), layer(x.float()))
    assert narrow(x).dtype == BF16
    assert torch.equal(narrow(x), layer(x.float()).to(BF16))
    ids = torch.tensor([36, 0, 5, 5])
    assert torch.equal(narrow.rows(ids), layer.rows(ids).to(BF16))


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_rows_gives_the_same_bits(kind, isa, threads):
    layer, _ = layer_of(kind, 70, 256, bias=normal(1, 70, 5)[0])
    x = normal(ROWS, 256)
    threads(1)
    whole = layer(x)
    for count in (1, 2, 3, 4):
        threads(count)
        for rows in (*range(1, 28), 33, 64, 127, ROWS) if count == 2 else (1, 3, 4, 13, 50, ROWS):
            assert torch.equal(layer(x[:rows]), whole[:rows]), (count, rows)
    for shift in (1, 5, 12, 77):
        assert torch.equal(layer(x.roll(shift, 0)), whole.roll(shift, 0)), shift
    assert torch.equal(layer(x[:1].expand(ROWS, -1)), whole[:1].expand(ROWS, -1))
    assert layer(x[:0]).shape == (0, 70)


@pytest.mark.parametrize("kind", ["int8", "Q8_0", "Q4_K"])
def test_blocks_of_rows_change_no_bit(kind, isa, threads):
    """Rows that no longer fit the cache at once are cut."""
    layer, _ = layer_of(kind, 33, 4096)
    x = normal(100, 4096)
    threads(2)
    alone = torch.cat([layer(x[i : i + 3]) for i in range(0, 100, 3)])
    assert torch.equal(layer(x), alone)


@pytest.mark.parametrize("kind", ["int8", "Q4_1", "Q6_K"])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize("n", [5, 64, 77])
def test_outputs_stay_within_their_rows(kind, out_dtype, n, isa, library):
    """A row's gap, up to ldy, is left alone; TB_ADD adds in float32; parts on the calling thread give what tb_linear gives."""
    layer, _ = layer_of(kind, n, 256)
    wide = torch.full((7, 300), torch.nan)
    wide[:, 9:265] = normal(7, 256)
    x, rows, ldy = wide[:, 9:265], 7, n + 3
    plain = layer(x.contiguous())
    assert torch.equal(layer(x), plain)
    call = (layer.handle, x.data_ptr(), x.stride(0))
    code = lib.DTYPES["float32" if out_dtype == F32 else "bfloat16"]
    y = torch.full((rows + 1, ldy), 7.0, dtype=out_dtype)
    library.c.tb_linear(*call, y.data_ptr(), ldy, rows, code, 0)
    assert torch.equal(y[:rows, :n], plain.to(out_dtype))
    assert (y[:rows, n:] == 7).all()
    assert (y[rows] == 7).all()
    again = torch.full_like(y, 7.0)
    for begin in range(-(-n // lib.TILE_N)):
        library.c.tb_linear_part(*call, again.data_ptr(), ldy, rows, code, 0, begin, begin + 1)
    assert torch.equal(again, y)
    library.c.tb_linear(*call, again.data_ptr(), ldy, rows, code, 1)
    assert torch.equal(again[:rows, :n], (y[:rows, :n].float() + plain).to(out_dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_numbers(kind, isa, threads):
    """Such a row is NaN throughout; the others are as without it. Zeros, and what is too small, give the bias."""
    threads(2)
    bias = normal(1, 40, 5)[0]
    layer, weight = layer_of(kind, 40, 512, bias=bias)
    x = normal(20, 512)
    clean = layer(x)
    bad = x.clone()
    bad[3, 100] = torch.nan
    bad[7, 511] = torch.inf
    bad[12, 0] = -torch.inf
    bad[13] = torch.nan
    bad[5] = 0
    bad[6] = 1e-30
    bad[8] = -1e-40
    found = layer(bad)
    assert found[[3, 7, 12, 13]].isnan().all()
    assert torch.equal(found[[5, 6, 8]], bias.expand(3, -1))
    kept = [i for i in range(20) if i not in (3, 5, 6, 7, 8, 12, 13)]
    assert torch.equal(found[kept], clean[kept])
    huge = layer(x * 2.0**100)
    torch.testing.assert_close((huge - bias) * 2.0**-100, clean - bias, rtol=1e-5, atol=1e-5 * float(weight.abs().max()))


@pytest.mark.parametrize("name", TYPES)
def test_scales_of_zero_and_at_the_ends_of_fp16(name, isa):
    """Zeros, subnormals, the largest; -0 and subnormal weights in float32 too."""
    made = matrix(name, 40, 512, halves=(0.0, -0.0, 6e-8, -5e-7, 6.1e-5, 65504.0, -65504.0))
    layer = QuantLinear.gguf([made.packed])
    assert torch.equal(layer.rows(torch.arange(40)), made.weight)
    x = normal(5, 512)
    x64 = activations(x, 32)
    largest = made.weight.double().abs().unflatten(1, (-1, 32)).amax(-1)
    bound = 4 * x64.abs().unflatten(1, (-1, 32)).sum(-1) @ largest.T
    assert bool(((layer(x).double() - x64 @ made.weight.double().T).abs() <= 3e-7 * bound).all())
    zero = matrix(name, 40, 512, halves=(0.0,))
    assert not QuantLinear.gguf([zero.packed])(x).any()


@pytest.mark.parametrize("name", TYPES)
def test_scales_that_are_no_numbers_stay_with_their_outputs(name, isa):
    made = matrix(name, 40, 512)
    data = np.array(made.packed.data)
    broken = data.copy()
    at = HALVES[name][0]
    broken[7, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    x = normal(5, 512)
    clean, found = (QuantLinear.gguf([GgufMatrix(d, name, 512)])(x) for d in (data, broken))
    assert found[:, 7].isnan().all()
    others = [j for j in range(40) if j != 7]
    assert torch.equal(found[:, others], clean[:, others])


@pytest.mark.parametrize("sizes", [(64, 32, 32), (40, 33, 7), (1, 1, 96)])
def test_types_that_differ_within_a_layer(sizes, isa, threads):
    threads(3)
    made = [matrix(t, n, 512, n) for t, n in zip(("Q4_K", "Q6_K", "Q4_K"), sizes, strict=True)]
    biases = [normal(1, sizes[0], 1)[0], None, normal(1, sizes[2], 2)[0]]
    x = normal(41, 512)
    fused = QuantLinear.gguf([m.packed for m in made], biases)
    parts = [QuantLinear.gguf([m.packed], [b]) for m, b in zip(made, biases, strict=True)]
    want = torch.cat([part(x) for part in parts], 1)
    assert torch.equal(fused(x), want)
    for rows in (1, 2, 13):
        assert torch.equal(fused(x[:rows]), want[:rows])
    assert torch.equal(fused.rows(torch.arange(sum(sizes))), torch.cat([m.weight for m in made]))
    assert fused.aligned == (sizes == (64, 32, 32))
    assert fused.out_features == sum(sizes)


def test_one_type_in_several_matrices_is_not_padded(isa):
    made = [matrix("Q4_1", n, 96, n) for n in (33, 20, 7)]
    x = normal(5, 96)
    fused = QuantLinear.gguf([m.packed for m in made])
    assert fused.aligned
    assert fused.nbytes == 2 * 32 * 96 * 20 // 32
    assert torch.equal(fused(x), torch.cat([QuantLinear.gguf([m.packed])(x) for m in made], 1))
    weights = [normal(n, 45, n) for n in (33, 20, 7)]
    fused = QuantLinear.int8(weights, [None, normal(1, 20, 1)[0], None])
    x = normal(5, 45)
    parts = [QuantLinear.int8([w], [normal(1, 20, 1)[0]] if len(w) == 20 else []) for w in weights]
    assert torch.equal(fused(x), torch.cat([part(x) for part in parts], 1))


@pytest.mark.parametrize("name", TYPES)
def test_bytes_are_those_of_the_file(name, library):
    """Q4_K and Q5_K keep their 6-bit scales in 8 bits: 128 bytes more on 4608 and 5632."""
    made = matrix(name, 64, 512)
    extra = {"Q4_K": 4736 / 4608, "Q5_K": 5760 / 5632}.get(name, 1)
    assert QuantLinear.gguf([made.packed]).nbytes == 64 * lib.gguf_row_bytes(name, 512) * extra
    assert made.packed.data.shape == (64, lib.gguf_row_bytes(name, 512))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("k", [1, 7, 64])
def test_rows_of_plain_weights(dtype, k, library):
    w = normal(77, k, 1, dtype)
    ids = torch.tensor([76, 0, 31, 32, 33, 0])
    assert torch.equal(CpuLinear(w).rows(ids), w[ids])
    assert CpuLinear(w).rows(ids[:0]).shape == (0, k)


def test_sources_are_read_in_place(library):
    """Read-only arrays, rows apart from each other, and other strides."""
    made = matrix("Q4_0", 33, 64)
    x, want = normal(3, 64), QuantLinear.gguf([made.packed])(normal(3, 64))
    wide = np.zeros((33, 50), np.uint8)
    wide[:, 5:41] = made.packed.data
    wide.flags.writeable = False
    for data in (wide[:, 5:41], np.asfortranarray(made.packed.data), torch.tensor(made.packed.data)):
        assert torch.equal(QuantLinear.gguf([GgufMatrix(data, "Q4_0", 64)])(x), want)
    w = normal(20, 30, 2)
    assert torch.equal(QuantLinear.int8([w.T.contiguous().T])(w), QuantLinear.int8([w])(w))


def test_bad_arguments(library):
    good = matrix("Q4_K", 3, 256).packed
    with pytest.raises(ValueError, match="IQ4_XS is none of the types"):
        QuantLinear.gguf([GgufMatrix(good.data, "IQ4_XS", 256)])
    with pytest.raises(ValueError, match="Q4_K of 288 inputs takes"):
        QuantLinear.gguf([GgufMatrix(good.data, "Q4_K", 288)])
    with pytest.raises(ValueError, match=r"takes uint8 \[N, 144\]"):
        QuantLinear.gguf([GgufMatrix(np.zeros((3, 143), np.uint8), "Q4_K", 256)])
    with pytest.raises(ValueError, match="not 256 and 512"):
        QuantLinear.gguf([good, matrix("Q4_K", 3, 512).packed])
    with pytest.raises(ValueError, match="1 weights, but 2 biases"):
        QuantLinear.gguf([good], [None, None])
    with pytest.raises(ValueError, match="a bias of 3 outputs"):
        QuantLinear.gguf([good], [torch.ones(4)])
    with pytest.raises(ValueError, match="activations are"):
        QuantLinear.gguf([good], dtype=torch.float16)
    with pytest.raises(ValueError, match="needs a weight"):
        QuantLinear.int8([torch.ones(3)])
    with pytest.raises(ValueError, match="this layer takes"):
        QuantLinear.gguf([good])(torch.ones(2, 256, dtype=BF16))
    assert lib.gguf_row_bytes("Q4_K", 288) == 0


def test_the_probe_finds_rows_that_depend_on_their_batch(library, monkeypatch):
    assert probe.numerics_probe(BF16) == (True, "")
    monkeypatch.setattr(QuantLinear, "__call__", lambda self, x: torch.zeros(len(x), 1) + len(x))
    ok, reason = probe.numerics_probe(F32)
    assert not ok
    assert "quantised linear layer" in reason
