"""The C++ row functions against float64, and their bits at every number of rows, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tokenbus.kernels.cpu import elementwise as ops
from tokenbus.kernels.torch_ops import elementwise as torchs

F32, BF16 = torch.float32, torch.bfloat16
WIDTHS = (1, 3, 16, 33, 100, 576, 1543)


def randn(*shape, dtype=F32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def close(found, exact, ulps):
    """float32: within so many units of the larger of value and 1. bfloat16: the rounding of that, which may tip over by a unit."""
    if found.dtype == BF16:
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.01, atol=ulps * 2**-23)
    else:
        torch.testing.assert_close(found.double(), exact, rtol=ulps * 2**-23, atol=ulps * 2**-23)


def exact_norm(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", WIDTHS)
def test_norms(width, dtype, isa):
    x, other, weight = randn(7, width, dtype=dtype), randn(7, width, dtype=dtype, seed=2), randn(width, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), exact_norm(x, weight), 16)
    close(ops.rms_norm_add(x, weight, 1e-5, other), other.double() + exact_norm(x, weight), 16)
    if dtype == F32:
        close(ops.rms_norm(x, weight, 1e-5), torchs.rms_norm(x, weight, 1e-5).double(), 16)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", WIDTHS)
def test_gated_activations(width, dtype, isa):
    gate, up = randn(5, width), randn(5, width, seed=1)
    close(ops.gated("silu", gate, up, dtype), F.silu(gate.double()) * up.double(), 24)
    close(ops.gated("gelu_tanh", gate, up, dtype), F.gelu(gate.double(), approximate="tanh") * up.double(), 24)


def test_activations_at_the_ends_of_float32(isa):
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 300.0, -300.0, float("inf"), float("nan")]])
    ones = torch.ones_like(x)
    silu, gelu = (ops.gated(name, x, ones, F32)[0] for name in ("silu", "gelu_tanh"))
    wanted = torch.tensor([0.0, 0.0, 5e-31, -5e-31, 80.0, 0.0, 300.0, 0.0, float("inf"), float("nan")])
    for found in (silu, gelu):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-33, equal_nan=True)


@pytest.mark.parametrize("cap", [5.0, 30.0, 0.01])
def test_softcap(cap, isa):
    x = torch.cat([randn(3, 1000) * 4, torch.linspace(-1, 1, 3000).view(3, 1000) * cap], dim=1)
    found = ops.softcap(x, cap).double()
    exact = torch.tanh(x.double() / cap) * cap
    assert float(((found - exact) / exact.abs().clamp(min=1e-9)).abs().max()) < 8 * 2**-23


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("dim", "half"), [(64, 32), (24, 12), (80, 20), (10, 3)])
def test_rope(dim, half, dtype, isa):
    x, angles = randn(9, 4, dim, dtype=dtype), randn(9, half, seed=1)
    cos, sin = angles.cos(), angles.sin()
    found = ops.rope(x, cos, sin)
    assert found.dtype == dtype
    assert torch.equal(found, torchs.rope(x, cos, sin))  # products and sums are rounded one by one in both
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_embedding(dtype, isa):
    table, ids = randn(50, 77, dtype=dtype), torch.tensor([0, 49, 3, 3, 17])
    assert torch.equal(ops.embed(table, ids), table[ids])
    scale = float(torch.tensor(77**0.5).to(dtype))
    assert torch.equal(ops.embed(table, ids, scale), table[ids] * torch.tensor(scale).to(dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [33, 576, 1543])
def test_every_number_of_rows_and_threads_gives_the_same_bits(width, dtype, isa, threads):
    wide, weight = randn(130, width), randn(width, seed=1)
    x = wide.to(dtype)
    half = width // 2
    calls = {
        "norm": lambda r: ops.rms_norm(x[r], weight, 1e-5),
        "norm_add": lambda r: ops.rms_norm_add(x[r], weight, 1e-5, x[r]),
        "silu": lambda r: ops.gated("silu", wide[r], wide[r], dtype),
        "gelu": lambda r: ops.gated("gelu_tanh", wide[r], wide[r], dtype),
        "softcap": lambda r: ops.softcap(wide[r], 20.0),
        "rope": lambda r: ops.rope(x[r, None], wide[r, :half], wide[r, :half]),
    }
    for name, call in calls.items():
        threads(1)
        alone = torch.cat([call(slice(i, i + 1)) for i in range(130)])
        for count in (1, 2, 3, 4):
            threads(count)
            for n in (2, 3, 17, 32, 43, 130):
                assert torch.equal(call(slice(130 - n, 130)), alone[-n:]), (name, count, n)


@pytest.mark.parametrize("n", [1, 7, 64, 1000, 49152])
@pytest.mark.parametrize("k", [1, 2, 20])
def test_top_k(n, k, isa, threads):
    if k > n:
        with pytest.raises(ValueError, match=f"k is {k}, for rows of {n}"):
            ops.top_k(randn(1, n), k)
        return
    threads(2)
    x = randn(5, n)
    x[1] = x[1].round()  # many ties
    x[2] = 1.5
    x[3, n // 2] = float("nan")
    x[4] = -torch.inf
    x[4, n - 1] = torch.inf
    values, indices = ops.top_k(x, k)
    order = torch.sort(x.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf), dim=1, descending=True, stable=True)
    assert torch.equal(values, order.values[:, :k])
    assert torch.equal(indices.long(), order.indices[:, :k])
