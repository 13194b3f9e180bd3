from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.triton.int4_weight import Int4Weight, int4_from_awq, int4_from_gptq, pack, quantize_int4, unpack
from tokenbus.kernels.triton.quantized_matmul import MAX_INT8_INPUTS, quantize_activations, quantize_weight, w8a8_matmul
from tokenbus.kernels.triton.weight_only_matmul import int4_matmul, int8_weight_matmul

from .paged import INTERPRETED, seeded

pytestmark = pytest.mark.usefixtures("where_kernels_run")

F32, BF16, F16, I8, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
DTYPES = [F32, BF16, F16]
SHAPES = [(1, 1, 1), (3, 5, 7), (17, 70, 160), (66, 64, 128)]
"""(M, N, K)"""


def generator(seed=0):
    return seeded(seed)


def normal(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def tolerance(dtype):
    """One rounding of results of size 1: 2^-24, 2^-11 (float16); the interpreter cuts bfloat16 off, which errs by up to 2^-7. Below that, a
    float32 sum of a hundred products."""
    return {F32: {"rtol": 1e-5, "atol": 1e-5}, BF16: {"rtol": 2**-7, "atol": 1e-5}, F16: {"rtol": 2**-10, "atol": 1e-5}}[dtype]


def w8a8_tolerance(dtype, kept):
    """On a device products of e4m3 are added with fewer bits than float32 has."""
    return tolerance(dtype) | ({"atol": 4e-3} if kept == FP8 and not INTERPRETED else {})


def quantized_reference(x, dtype):
    """The rule of `quantize_activations` in torch on a CPU, whose conversion to e4m3 is its own."""
    x = x.cpu()
    limit = {I8: 127.0, FP8: 448.0}[dtype]
    peak = x.float().abs().amax(dim=1)
    inverse = torch.full_like(peak, limit) / torch.where(peak > 1e-30, peak, 1.0)  # limit / t is limit * (1 / t) in torch
    scaled = x.float() * inverse[:, None]
    q = torch.round(scaled) if dtype == I8 else scaled
    return q.to(dtype), torch.where(peak > 1e-30, peak / limit, 0.0)


class TestQuantizeActivations:
    @pytest.mark.parametrize("to", [I8, FP8])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 1024), (2, 5000)])
    def test_bits(self, shape, dtype, to):
        x = normal(*shape, dtype=dtype)
        q, scales = quantize_activations(x, to)
        wanted, wanted_scales = quantized_reference(x, to)
        assert q.dtype == to
        assert torch.equal(scales.cpu(), wanted_scales)
        assert torch.equal(q.float().cpu(), wanted.float())

    def test_e4m3_rounds_to_the_nearest_everywhere(self):
        """Values of all sizes, ties and what is below the smallest normal; 448 makes the scale 1."""
        grid = torch.arange(127, dtype=torch.uint8).view(FP8).float()  # 0 ... 448
        between = (grid[1:] + grid[:-1]) / 2
        up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        values = torch.cat([grid, between, torch.nextafter(between, up), torch.nextafter(between, down)])
        x = torch.cat([values, -values])[None, :]
        q, scales = quantize_activations(x, FP8)
        assert scales.item() == 1.0
        assert torch.equal(q.float(), x.to(FP8).float())
        ties = q[0, 127 : 127 + 126].view(torch.uint8)
        assert bool((ties % 2 == 0).all())

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_strided_rows_and_other_rows(self, to):
        x = normal(5, 40)
        wide = torch.full((5, 50), torch.nan)
        wide[:, 3:43] = x
        q, scales = quantize_activations(wide[:, 3:43], to)
        for found in (quantize_activations(x, to), quantize_activations(x.T.contiguous().T, to)):
            assert torch.equal(found[0].float(), q.float())
            assert torch.equal(found[1], scales)
        one, one_scale = quantize_activations(x[3:4], to)
        assert torch.equal(one.float(), q[3:4].float())
        assert torch.equal(one_scale, scales[3:4])

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_rows_of_nothing_and_rows_that_are_not_finite(self, to):
        x = normal(5, 20)
        x[0] = 0
        x[1] = 1e-31
        x[2, 7] = torch.nan
        x[3, 7] = -torch.inf
        q, scales = quantize_activations(x, to)
        assert scales[:2].tolist() == [0.0, 0.0]
        assert not q[:2].float().any()
        assert bool(scales[2:4].isnan().all())
        weight, weight_scales = quantize_weight(normal(3, 20, seed=1), to)
        y = w8a8_matmul(q, scales, weight, weight_scales, dtype=F32)
        assert y[:2].tolist() == [[0.0] * 3] * 2
        assert bool(y[2:4].isnan().all())
        assert bool(y[4].isfinite().all())

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_empty(self, to):
        assert [list(t.shape) for t in quantize_activations(torch.zeros(0, 8), to)] == [[0, 8], [0]]
        q, scales = quantize_activations(torch.zeros(3, 0), to)
        assert q.shape == (3, 0)
        assert scales.tolist() == [0.0] * 3

    def test_what_it_refuses(self):
        with pytest.raises(ValueError, match="int8 or float8_e4m3fn"):
            quantize_activations(torch.zeros(1, 2), torch.uint8)
        with pytest.raises(ValueError, match=r"\[M, K\]"):
            quantize_activations(torch.zeros(2))
        with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
            quantize_activations(torch.zeros(1, 2, dtype=torch.float64))
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize_weight(torch.tensor([[1.0, torch.nan]]))

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_a_weight_is_quantised_by_the_same_rule(self, to):
        weight = normal(6, 33)
        weight[2] = 0
        q, scales = quantize_weight(weight, to)
        step = scales / 2 if to == I8 else weight.abs().amax(dim=1) / 16  # half a step; of e4m3, of the largest value
        assert bool(((q.float() * scales[:, None] - weight).abs() <= step[:, None] * (1 + 1e-5)).all())
        assert not q[2].float().any()
        assert scales[2] == 0
        assert quantize_weight(torch.zeros(3, 0), to)[1].tolist() == [0.0] * 3


class TestW8A8:
    @pytest.mark.parametrize("to", [I8, FP8])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_product_of_what_the_integers_stand_for(self, shape, dtype, to):
        m, n, k = shape
        x, weight, bias = normal(m, k), normal(n, k, seed=1) * k**-0.5, normal(n, seed=2, dtype=dtype)
        (xq, xs), (wq, ws) = quantize_activations(x, to), quantize_weight(weight, to)
        wanted = (xq.double() * xs[:, None]) @ (wq.double() * ws[:, None]).T
        for b, invariant in ((bias, True), (bias, False), *([(None, True)] if dtype == F32 else [])):
            y = w8a8_matmul(xq, xs, wq, ws, b, dtype=dtype, invariant=invariant)
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), wanted if b is None else wanted + b.double(), **w8a8_tolerance(dtype, to))
        if dtype == F32:  # y has no bias
            # and not far from the product of the floats: a step of int8 is 1/127 of the largest value, one of e4m3 up to 1/8 of the value
            wanted = x.double() @ weight.double().T
            assert (y.double() - wanted).norm() / wanted.norm() < (0.03 if to == I8 else 0.1)

    def test_int8_sums_are_exact(self):
        xq = torch.randint(-128, 128, (3, 700), generator=generator(), dtype=I8)
        wq = torch.randint(-128, 128, (5, 700), generator=generator(1), dtype=I8)
        one = torch.ones(5)
        wanted = (xq.double() @ wq.double().T).float()
        assert torch.equal(w8a8_matmul(xq, one[:3], wq, one, dtype=F32), wanted)
        large = torch.full((1, 4096), -128, dtype=I8)
        assert w8a8_matmul(large, one[:1], large, one[:1], dtype=F32).item() == 4096 * 128 * 128

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_strided_rows_and_empty(self, to):
        xq, wq = (normal(r, 24, seed=r).to(to) for r in (6, 9))
        xs, ws = normal(6).abs(), normal(9).abs()
        wanted = w8a8_matmul(xq, xs, wq, ws, dtype=F32)
        x_wide, w_wide = torch.zeros(6, 40).to(to), torch.zeros(9, 40).to(to)
        x_wide[:, 7:31], w_wide[:, 5:29] = xq, wq
        assert torch.equal(w8a8_matmul(x_wide[:, 7:31], xs, w_wide[:, 5:29], ws, dtype=F32), wanted)
        assert w8a8_matmul(xq[:0], xs[:0], wq, ws, dtype=F32).shape == (0, 9)
        assert not w8a8_matmul(xq[:, :0], xs, wq[:, :0], ws, dtype=F32).any()

    @pytest.mark.parametrize("to", [I8, FP8])
    def test_a_row_is_the_same_bits_whatever_is_beside_it(self, to):
        x, weight = normal(130, 200), normal(40, 200, seed=1)
        (xq, xs), (wq, ws) = quantize_activations(x, to), quantize_weight(weight, to)
        whole = w8a8_matmul(xq, xs, wq, ws, dtype=F32)
        for rows in (1, 2, 16, 17, 64, 65):
            assert torch.equal(w8a8_matmul(xq[:rows], xs[:rows], wq, ws, dtype=F32), whole[:rows]), rows
        for i in (1, 63, 64, 129):
            assert torch.equal(w8a8_matmul(xq[i : i + 1], xs[i : i + 1], wq, ws, dtype=F32), whole[i : i + 1]), i

    def test_what_it_refuses(self):
        q, s = torch.zeros(4, 8, dtype=I8), torch.ones(4)
        for args, message in [
            ((q, s, q.to(FP8), s), "same for both"),
            ((q.int(), s, q.int(), s), "int8 or float8_e4m3fn"),
            ((q, s[:3], q, s), r"float32 \[4\]"),
            ((q, s, q, s.double()), r"float32 \[4\]"),
            ((q, s, q[:, :7].contiguous(), s), r"\[N, K\]"),
        ]:
            with pytest.raises(ValueError, match=message):
                w8a8_matmul(*args, dtype=F32)
        with pytest.raises(ValueError, match="gives a float dtype"):
            w8a8_matmul(q, s, q, s, dtype=I8)
        wide = torch.zeros(1, MAX_INT8_INPUTS + 1, dtype=I8)
        with pytest.raises(ValueError, match="exceed an int32"):
            w8a8_matmul(wide, s[:1], wide, s[:1], dtype=F32)


class TestInt8Weight:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_is_the_product_of_what_the_integers_stand_for(self, shape, dtype):
        m, n, k = shape
        x, bias = normal(m, k, dtype=dtype), normal(n, seed=2, dtype=dtype)
        wq, ws = quantize_weight(normal(n, k, seed=1) * k**-0.5)
        wq[0, 0] = -128
        wanted = x.double() @ (wq.double() * ws[:, None]).T
        for b, invariant in ((None, True), (bias, True), (bias, False)):
            y = int8_weight_matmul(x, wq, ws, b, invariant=invariant)
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), wanted if b is None else wanted + b.double(), **tolerance(dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_is_the_same_bits_whatever_is_beside_it(self, dtype):
        x = normal(130, 200, dtype=dtype)
        wq, ws = quantize_weight(normal(40, 200, seed=1))
        whole = int8_weight_matmul(x, wq, ws)
        for rows in (1, 2, 16, 17, 64, 65):
            assert torch.equal(int8_weight_matmul(x[:rows], wq, ws), whole[:rows]), rows
        for i in (1, 63, 64, 129):
            assert torch.equal(int8_weight_matmul(x[i : i + 1], wq, ws), whole[i : i + 1]), i

    def test_strided_rows_empty_and_what_it_refuses(self):
        x = normal(6, 24)
        wq, ws = quantize_weight(normal(9, 24, seed=1))
        wanted = int8_weight_matmul(x, wq, ws)
        wide = torch.zeros(9, 40, dtype=I8)
        wide[:, 5:29] = wq
        assert torch.equal(int8_weight_matmul(torch.cat([x, x], dim=1)[:, 24:], wide[:, 5:29], ws), wanted)
        assert int8_weight_matmul(x[:0], wq, ws).shape == (0, 9)
        assert not int8_weight_matmul(x[:, :0], wq[:, :0], ws).any()
        with pytest.raises(ValueError, match="int8 weight"):
            int8_weight_matmul(x, wq.int(), ws)
        with pytest.raises(ValueError, match=r"float32 \[9\]"):
            int8_weight_matmul(x, wq, ws[:8])


def int4(n, k, group_size, *, zeros, seed=0):
    """A weight of random integers, zeros and scales, and what it stands for in float64 (worked out from the integers, not the layout)."""
    g, groups = generator(seed), -(-k // group_size)
    q = torch.randint(0, 16, (n, k), generator=g, dtype=torch.uint8)
    z = torch.randint(0, 16, (groups, n), generator=g, dtype=torch.uint8) if zeros else None
    s = (torch.rand(groups, n, generator=g) + 0.5) * k**-0.5 / 8
    group_of = torch.arange(k) // group_size
    means = (q.double() - (8 if z is None else z[group_of].T.double())) * s[group_of].T.double()
    return Int4Weight(pack(q, group_size), s, z, group_size, k), means


class TestInt4:
    @pytest.mark.parametrize("zeros", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("m", "n", "k", "group_size"), [(1, 1, 32, 32), (3, 5, 7, 32), (17, 70, 192, 64), (5, 33, 300, 128)]
    )
    def test_is_the_product_of_what_the_integers_stand_for(self, m, n, k, group_size, dtype, zeros):
        x, bias = normal(m, k, dtype=dtype), normal(n, seed=2, dtype=dtype)
        weight, means = int4(n, k, group_size, zeros=zeros)
        torch.testing.assert_close(weight.dequantized().double(), means, rtol=1e-6, atol=0)
        for b, invariant in ((None, True), (bias, True), (bias, False)):
            y = int4_matmul(x, weight, b, invariant=invariant)
            wanted = x.double() @ means.T
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), wanted if b is None else wanted + b.double(), **tolerance(dtype))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_row_is_the_same_bits_whatever_is_beside_it(self, dtype):
        x = normal(130, 160, dtype=dtype)
        weight, _ = int4(40, 160, 64, zeros=True)
        whole = int4_matmul(x, weight)
        for rows in (1, 2, 16, 17, 64, 65):
            assert torch.equal(int4_matmul(x[:rows], weight), whole[:rows]), rows
        for i in (1, 63, 64, 129):
            assert torch.equal(int4_matmul(x[i : i + 1], weight), whole[i : i + 1]), i

    def test_strided_rows_half_scales_and_empty(self):
        x = normal(6, 64)
        weight, _ = int4(9, 64, 32, zeros=True)
        wanted = int4_matmul(x, weight)
        wide = torch.full((9, 50), 255, dtype=torch.uint8)
        wide[:, 5:37] = weight.data
        strided = Int4Weight(wide[:, 5:37], weight.scales, weight.zeros, 32, 64)
        assert torch.equal(int4_matmul(torch.cat([x, x], dim=1)[:, 64:], strided), wanted)
        half = Int4Weight(weight.data, weight.scales.half(), weight.zeros, 32, 64)
        torch.testing.assert_close(int4_matmul(x, half), x @ half.dequantized().T, rtol=1e-5, atol=1e-5)
        assert int4_matmul(x[:0], weight).shape == (0, 9)

    @pytest.mark.parametrize("group_size", [32, 64, 128])
    def test_the_layout_keeps_every_integer(self, group_size):
        q = torch.randint(0, 16, (3, 150), generator=generator(), dtype=torch.uint8)
        data = pack(q, group_size)
        assert data.shape == (3, -(-150 // group_size) * group_size // 2)
        assert torch.equal(unpack(data, 150, group_size), q)
        half = group_size // 2  # byte 0 has the first input of each half of the first group
        assert data[1, 0] == q[1, 0] + 16 * q[1, half]

    @pytest.mark.parametrize("group_size", [32, 128])
    def test_rounding_to_the_nearest(self, group_size):
        weight = normal(7, 200)
        weight[3] = 0
        found = quantize_int4(weight, group_size)
        peaks = torch.nn.functional.pad(weight, (0, -200 % group_size)).view(7, -1, group_size).abs().amax(dim=2)
        steps = (peaks / 7).repeat_interleave(group_size, dim=1)[:, :200]
        assert bool(((found.dequantized() - weight).abs() <= steps / 2 * (1 + 1e-5)).all())
        assert not found.dequantized()[3].any()
        assert found.nbytes == found.data.nbytes + found.scales.nbytes

    def test_what_it_refuses(self):
        weight, _ = int4(4, 64, 32, zeros=False)
        with pytest.raises(ValueError, match=r"\[M, 64\]"):
            int4_matmul(normal(2, 63), weight)
        for change, message in [
            ({"group_size": 16}, "32, 64 or 128"),
            ({"in_features": 65}, r"uint8 \[N, 48\]"),
            ({"scales": weight.scales[:1]}, "scales must be"),
            ({"scales": weight.scales.double()}, "scales must be float32"),
            ({"zeros": weight.scales}, "zeros must be uint8"),
            ({"data": weight.data.T.contiguous().T}, "rows of data"),
            ({"order": torch.arange(3)}, "order must be"),
        ]:
            parts = {name: getattr(weight, name) for name in ("data", "scales", "zeros", "group_size", "in_features", "order")}
            with pytest.raises(ValueError, match=message):
                Int4Weight(**parts | change)


def words(values, order=range(8)):
    """int [A, B] -> int32 [A, B / 8]: value 8c + order[i] of a row in bits 4i ... 4i + 3 of word c."""
    a, b = values.shape
    packed = torch.zeros(a, b // 8, dtype=torch.int64)
    for i, column in enumerate(order):
        packed |= values.long()[:, column::8] << (4 * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight outputs AWQ packs first, second ..."""


class TestCheckpoints:
    """Tensors packed here, value by value, as the two formats say, and read back."""

    def parts(self, n, k, group_size, seed=0):
        g, size = generator(seed), k if group_size == -1 else group_size
        groups = -(-k // size)
        q = torch.randint(0, 16, (k, n), generator=g)
        z = torch.randint(0, 16, (groups, n), generator=g)
        s = (torch.rand(groups, n, generator=g) + 0.5).half()
        return q, z, s, size

    def means(self, q, z, s, group_of):
        return ((q - (8 if z is None else z[group_of])).double() * s[group_of].double()).T

    @pytest.mark.parametrize(
        ("k", "group_size", "ours"),
        [(256, 128, 128), (128, 64, 64), (96, 32, 32), (512, 256, 128), (96, -1, 128), (320, -1, 128)],
    )
    @pytest.mark.parametrize("zeros", [True, False])
    def test_awq(self, k, group_size, ours, zeros):
        q, z, s, size = self.parts(24, k, group_size)
        weight = int4_from_awq(words(q, AWQ_ORDER), words(z, AWQ_ORDER) if zeros else None, s, group_size)
        assert weight.group_size == ours
        wanted = self.means(q, z if zeros else None, s, torch.arange(k) // size)
        assert torch.equal(weight.dequantized().double(), wanted)
        x = normal(3, k)
        torch.testing.assert_close(int4_matmul(x, weight).double(), x.double() @ wanted.T, rtol=1e-5, atol=1e-3)

    @pytest.mark.parametrize(("k", "group_size"), [(256, 128), (96, 32), (512, 256), (320, 128), (96, -1)])
    @pytest.mark.parametrize("v2", [True, False])
    def test_gptq(self, k, group_size, v2):
        q, z, s, size = self.parts(24, k, group_size)
        z[0, :4] = torch.tensor([0, 5, 0, 0])  # one less than 0 is a borrow from the word's next
        stored = words(z) if v2 else words(z) - 0x11111111
        weight = int4_from_gptq(
            words(q.T).T.contiguous(), stored, s, group_size, torch.arange(k) // size, zeros_less_one=not v2
        )
        assert weight.order is None
        wanted = self.means(q, z, s, torch.arange(k) // size)
        assert torch.equal(weight.dequantized().double(), wanted)
        x = normal(3, k)
        torch.testing.assert_close(int4_matmul(x, weight).double(), x.double() @ wanted.T, rtol=1e-5, atol=1e-3)

    def test_gptq_sorted_by_activation(self):
        q, z, s, size = self.parts(16, 256, 64)
        g_idx = (torch.arange(256) // size)[torch.randperm(256, generator=generator(3))]
        weight = int4_from_gptq(words(q.T).T.contiguous(), words(z), s, 64, g_idx.int(), zeros_less_one=False)
        assert weight.order is not None
        wanted = self.means(q, z, s, g_idx)
        assert torch.equal(weight.dequantized().double(), wanted)
        x = normal(5, 256)
        torch.testing.assert_close(int4_matmul(x, weight).double(), x.double() @ wanted.T, rtol=1e-5, atol=1e-3)

    def test_gptq_without_zeros(self):
        q, _, s, size = self.parts(8, 64, 32)
        weight = int4_from_gptq(words(q.T).T.contiguous(), None, s, 32)
        assert torch.equal(weight.dequantized().double(), self.means(q, None, s, torch.arange(64) // size))

    def test_what_they_refuse(self):
        q, z, s, _ = self.parts(16, 64, 32)
        awq, gptq, zeros = words(q, AWQ_ORDER), words(q.T).T.contiguous(), words(z)
        for make, args, message in [
            (int4_from_awq, (awq, zeros, s, 48), "multiple of 32"),
            (int4_from_awq, (awq, zeros, s[:1], 32), "scales"),
            (int4_from_awq, (awq, zeros[:1], s, 32), "qzeros"),
            (int4_from_awq, (awq.long(), zeros, s, 32), "int32"),
            (int4_from_awq, (awq, zeros, s.int(), 32), "floating-point"),
            (int4_from_gptq, (gptq, zeros, s, 64), "scales"),
            (int4_from_gptq, (gptq, zeros, s, 32, torch.zeros(64)), "does not divide"),
            (int4_from_gptq, (gptq, zeros, s, 32, torch.zeros(63)), r"g_idx must be \[64\]"),
        ]:
            with pytest.raises(ValueError, match=message):
                make(*args)
