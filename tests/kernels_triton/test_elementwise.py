"""The row kernels against plain float32 (here float64) torch, and against the torch kernels that a decoder uses on a CPU.

Tolerances. float32: a few units of sums in another order. float16: one rounding to the nearest (2^-11) where there is one, two where the
definition rounds twice. bfloat16: Triton's interpreter cuts off where a GPU rounds, so each rounding costs up to a whole unit (2^-7).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tokenbus.kernels.torch_ops import elementwise as torchs
from tokenbus.kernels.triton import elementwise as ops

from .paged import INTERPRETED, seeded

# numpy, which is the device here, warns of the infinities that the kernels count on
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.usefixtures("where_kernels_run"),
]

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [F32, BF16, F16]
STEP = {F32: 2**-21 if INTERPRETED else 2**-19, BF16: 2**-7, F16: 2**-11}
"""Relative error of one rounding; float32: of everything (a GPU's exp, reciprocal root and quotient err by some units)."""


def randn(*shape, dtype=F32, seed=0):
    return (torch.randn(*shape, generator=seeded(seed)) * 2).to(dtype)


def close(found, exact, roundings=1, lost=0.0):
    """lost: absolute error, where the definition itself takes the difference of numbers near each other."""
    assert found.is_contiguous()
    step = STEP[found.dtype] * roundings
    torch.testing.assert_close(found.double(), exact.double(), rtol=step, atol=max(step / 16, lost))


def exact_norm(x, weight, eps, *, unit_offset=False):
    x = x.double()
    normal = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normal if weight is None else normal * (weight.double() + float(unit_offset))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (33, 3), (5, 64), (2, 100), (3, 1543)])
def test_rms_norm(rows, n, dtype):
    x, weight = randn(rows, n, dtype=dtype), randn(n, dtype=dtype, seed=1)
    found = ops.rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype
    close(found, exact_norm(x, weight, 1e-5), 2)
    close(ops.rms_norm(x, weight, 1e-5, config={"BLOCK": 16}), exact_norm(x, weight, 1e-5), 2)
    close(found, torchs.rms_norm(x, weight, 1e-5), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_other_kinds(dtype):
    x, weight = randn(4, 70, dtype=dtype), randn(70, seed=1)
    close(ops.rms_norm(x, weight, 1e-6, unit_offset=True), exact_norm(x, weight, 1e-6, unit_offset=True))
    close(ops.rms_norm(x, None, 1e-6), exact_norm(x, None, 1e-6))
    close(ops.rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6), 2)  # float32 weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 8192])
def test_norm_of_a_sum_gives_both(block, dtype):
    x, residual, weight = randn(6, 45, dtype=dtype), randn(6, 45, dtype=dtype, seed=2), randn(45, seed=1)
    before = x.clone(), residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5, unit_offset=True, config={"BLOCK": block})
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    if dtype == BF16:
        close(total, x.double() + residual.double())
    else:
        assert torch.equal(total, x + residual)
    close(normed, exact_norm(total, weight, 1e-5, unit_offset=True))  # of the rounded sum
    alone = ops.rms_norm(x, weight, 1e-5, unit_offset=True, residual=residual, config={"BLOCK": block})
    assert torch.equal(alone, normed)


def test_norm_of_parts_of_a_projection():
    """Q's heads as the decoder cuts them out, a column-major matrix, four dimensions."""
    qkv, weight = randn(7, 5 * 16), randn(16, seed=1)
    q = qkv.view(7, 5, 16)[:, :3]
    close(ops.rms_norm(q, weight, 1e-5), exact_norm(q, weight, 1e-5))
    turned = randn(16, 9).T
    close(ops.rms_norm(turned, weight, 1e-5), exact_norm(turned, weight, 1e-5))
    deep = randn(2, 3, 4, 16)[:, 1:, ::2]
    close(ops.rms_norm(deep, weight, 1e-5), exact_norm(deep, weight, 1e-5))
    normed, total = ops.add_rms_norm(q, turned.T[:7, :3, None].expand(7, 3, 16), weight, 1e-5)
    assert torch.equal(total, q + turned.T[:7, :3, None])
    close(normed, exact_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("config", [None, {"BLOCK": 16}])
def test_norm_add_and_norm_in_one(dtype, unit_offset, config):
    x, residual = randn(5, 2, 45, dtype=dtype)[:, 1], randn(5, 45, dtype=dtype, seed=2)
    inner_weight, weight = randn(45, dtype=dtype, seed=1), randn(45, seed=3)
    found, total = ops.norm_add_rms_norm(x, residual, inner_weight, weight, 1e-5, unit_offset=unit_offset, config=config)
    inner = ops.rms_norm(x, inner_weight, 1e-5, unit_offset=unit_offset)
    wanted = ops.add_rms_norm(inner, residual, weight, 1e-5, unit_offset=unit_offset)
    step = STEP[dtype]
    torch.testing.assert_close(total.float(), wanted[1].float(), rtol=step, atol=step)
    close(found, exact_norm(total, weight, 1e-5, unit_offset=unit_offset), 2)
    one, one_total = ops.norm_add_rms_norm(
        x[3:4], residual[3:4], inner_weight, weight, 1e-5, unit_offset=unit_offset, config=config
    )
    assert torch.equal(one, found[3:4])
    assert torch.equal(one_total, total[3:4])


@pytest.mark.parametrize("n", [24, 300])
def test_a_row_does_not_depend_on_the_others(n):
    x, weight = randn(70, n), randn(n, seed=1)
    whole = ops.rms_norm(x, weight, 1e-5, config={"BLOCK": 128})
    for some in (slice(0, 1), slice(3, 5), slice(69, 70), slice(1, 69)):
        assert torch.equal(ops.rms_norm(x[some], weight, 1e-5, config={"BLOCK": 128}), whole[some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (24, 12), (20, 5), (2, 1)])
def test_rope_turns_q_and_k_in_place(dim, half, dtype):
    tokens, heads, kv_heads = 5, 9, 2  # nine heads: two groups
    qkv = randn(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    before = qkv.clone()
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    angles = randn(11, half, seed=1)
    table = torch.stack([angles.cos(), angles.sin()])
    positions = torch.tensor([3, 10, 0, 3, 7])
    ops.rope_(q, k, positions, table[0], table[1])
    rows = [part[positions] for part in table]
    for found, was in zip((q, k), before.split([heads, kv_heads, kv_heads], dim=1), strict=False):
        wanted = torchs.rope(was, *rows)
        if dtype == BF16 or not INTERPRETED:  # a GPU fuses products and sums
            step = {F32: 2**-20, F16: 2**-10, BF16: 2**-7}[dtype]
            torch.testing.assert_close(found.float(), wanted.float(), rtol=step, atol=step / 32 if INTERPRETED else step)
        else:
            assert torch.equal(found, wanted)  # products and sums are rounded one by one in both
    assert torch.equal(v, before[:, heads + kv_heads :])
    assert torch.equal(q[..., 2 * half :], before[:, :heads, 2 * half :])


@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (10, 3)])
def test_rope_of_neighbours(dim, half, positions):
    q, k, angles = randn(4, 3, dim), randn(4, 1, dim, seed=1), randn(6, half, seed=2)
    at = torch.tensor([5, 0, 1, 2], dtype=positions)

    def turned(x):
        pairs = torch.view_as_complex(x[..., : 2 * half].reshape(4, -1, half, 2).contiguous())
        turns = torch.polar(torch.ones(4, 1, half), angles[at.long()][:, None])
        return torch.cat([torch.view_as_real(pairs * turns).flatten(2), x[..., 2 * half :]], dim=-1)

    wanted = turned(q), turned(k)
    ops.rope_(q, k, at, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close((q, k), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "half", "unit_offset", "interleaved"),
    [(16, 8, False, False), (24, 12, True, True), (22, 4, False, False), (22, 4, False, True)],
)
def test_heads_are_normalised_before_they_are_turned(dim, half, unit_offset, interleaved, dtype):
    q, k, angles = randn(4, 9, dim, dtype=dtype), randn(4, 2, dim, dtype=dtype, seed=1), randn(6, half, seed=2)
    weights = randn(dim, dtype=dtype, seed=3), randn(dim, dtype=dtype, seed=4)
    at, cos, sin = torch.tensor([5, 0, 1, 2]), angles.cos(), angles.sin()
    wanted = [ops.rms_norm(x, w, 1e-5, unit_offset=unit_offset) for x, w in zip((q, k), weights, strict=True)]
    ops.rope_(*wanted, at, cos, sin, interleaved=interleaved)
    alone = q[2:3].clone(), k[2:3].clone()
    norm = {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-5, "unit_offset": unit_offset}
    ops.rope_(q, k, at, cos, sin, interleaved=interleaved, **norm)
    step = {F32: 1e-5, F16: 2**-9, BF16: 2**-5}[dtype]
    for found, expected in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=step, atol=step)
    ops.rope_(*alone, at[2:3], cos, sin, interleaved=interleaved, **norm)
    assert torch.equal(alone[0], q[2:3])
    assert torch.equal(alone[1], k[2:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype):
    x = torch.cat([randn(3, 2, 70) * 20, randn(3, 2, 30) * 1e-3], dim=-1).to(dtype)[:, 1]
    found = ops.softcap(x, 30.0, config={"BLOCK": 64})
    assert found.dtype == F32
    torch.testing.assert_close(found.double(), 30 * torch.tanh(x.double() / 30), rtol=2e-6 if INTERPRETED else 1e-5, atol=0)
    close(ops.softcap(x, 30.0, dtype=dtype), found)
    ends = torch.tensor([[0.0, float("inf"), -float("inf"), 1e30, float("nan")]])
    torch.testing.assert_close(ops.softcap(ends, 5.0), torch.tensor([[0.0, 5.0, -5.0, 5.0, float("nan")]]), equal_nan=True)
    assert ops.softcap(x[:0], 5.0).shape == (0, 100)


EXACT = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("n", [1, 37, 130])
def test_gated_activations(n, name, dtype):
    both = randn(4, 2 * n, dtype=dtype)
    gate, up = both.chunk(2, dim=-1)
    found = ops.gated(name, gate, up, config={"BLOCK": 64})
    assert found.dtype == dtype
    close(found, EXACT[name](gate.double()) * up.double(), 2, 1e-6 if name == "gelu" else 0.0)  # 1 + erf
    whole = ops.gated(name, gate[1:2], up[1:2], config={"BLOCK": 64})
    assert torch.equal(whole, found[1:2])


def test_gated_activations_have_the_torch_kernels_names():
    gate, up = randn(3, 2, 40)[:, 1], randn(3, 40, seed=1)
    close(ops.silu_mul(gate, up), torchs.silu_mul(gate, up))
    close(ops.gelu_tanh_mul(gate, up), torchs.gelu_tanh_mul(gate, up), lost=1e-6)  # torch's 1 + tanh


def test_activations_at_the_ends_of_float32():
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 300.0, -300.0, 1e20, -1e20, float("inf"), float("nan")]])
    wanted = torch.tensor([[0.0, 0.0, 5e-31, -5e-31, 80.0, 0.0, 300.0, 0.0, 1e20, 0.0, float("inf"), float("nan")]])
    for name in EXACT:
        found = ops.gated(name, x, torch.ones_like(x))
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=2e-33, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_embedding(ids, dtype):
    table = randn(50, 2 * 35, dtype=dtype)[:, 35:]
    chosen = torch.tensor([49, 0, 7, 7, 3], dtype=ids)
    assert torch.equal(ops.embed(table, chosen, config={"BLOCK": 16}), table[chosen.long()])
    close(ops.embed(table, chosen, 35**0.5), table[chosen.long()].double() * 35**0.5)
    assert torch.equal(ops.embed(table, chosen.repeat(2)[::2]), table[chosen.repeat(2)[::2].long()])


def test_an_id_beyond_the_vocabulary_gives_nan_and_harms_no_other_row():
    table = randn(5, 6)
    found = ops.embed(table, torch.tensor([2, 5, -1, 4]))
    assert found[1:3].isnan().all()
    assert torch.equal(found[[0, 3]], table[[2, 4]])


def test_nothing_is_no_error():
    for shape in ((0, 8), (3, 0), (0, 2, 8)):
        x, weight = torch.empty(shape), torch.ones(shape[-1])
        assert ops.rms_norm(x, weight, 1e-5).shape == shape
        assert [y.shape for y in ops.add_rms_norm(x, x, weight, 1e-5)] == [shape, shape]
        assert ops.gated("silu", x, x).shape == shape
    ops.rope_(torch.empty(0, 2, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64), torch.ones(3, 4), torch.ones(3, 4))
    assert ops.embed(randn(4, 6), torch.empty(0, dtype=torch.int64)).shape == (0, 6)


def test_wrong_arguments_are_refused():
    x, weight = randn(2, 8), randn(8)
    q, k, cos = randn(2, 3, 8), randn(2, 1, 8), randn(5, 4)
    at = torch.tensor([0, 1])
    calls = {
        "residual is": lambda: ops.add_rms_norm(x, randn(2, 7), weight, 1e-5),
        "weight is": lambda: ops.rms_norm(x, randn(7), 1e-5),
        "x is torch.int64": lambda: ops.rms_norm(torch.ones(2, 8, dtype=torch.int64), weight, 1e-5),
        "residual is torch.float16": lambda: ops.add_rms_norm(x, x.half(), weight, 1e-5),
        "no size 'SIZE'": lambda: ops.rms_norm(x, weight, 1e-5, config={"SIZE": 1}),
        "no dimension": lambda: ops.rms_norm(torch.tensor(1.0), weight, 1e-5),
        "kv_heads": lambda: ops.rope_(q, randn(3, 1, 8), at, cos, cos),
        "expected float32": lambda: ops.rope_(q, k, at, cos, cos.half()),
        "half of a head": lambda: ops.rope_(q, k, at, randn(5, 5), randn(5, 5)),
        "contiguous": lambda: ops.rope_(randn(2, 8, 3).transpose(1, 2), k, at, cos, cos),
        "positions is": lambda: ops.rope_(q, k, at.float(), cos, cos),
        "go together": lambda: ops.rope_(q, k, at, cos, cos, q_weight=weight),
        "k_weight is": lambda: ops.rope_(q, k, at, cos, cos, q_weight=weight, k_weight=randn(7)),
        "inner_weight is": lambda: ops.norm_add_rms_norm(x, x, randn(7), weight, 1e-5),
        "a cap above 0": lambda: ops.softcap(x, 0.0),
        "up \\[2, 7\\]": lambda: ops.gated("silu", x, randn(2, 7)),
        "unknown activation 'relu'": lambda: ops.gated("relu", x, x),
        "rows in one piece": lambda: ops.embed(randn(8, 4).T, at),
        "ids is": lambda: ops.embed(x, torch.tensor([[0, 1]])),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
