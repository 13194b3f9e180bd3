from __future__ import annotations

import pytest
import torch

from tokenbus.core.plugin import NoSettings
from tokenbus.core.worker.attention import KVLayout
from tokenbus.kernels.reference import reference_attention
from tokenbus.kernels.torch_ops.attention import quantize
from tokenbus.kernels.triton.attention import values_and_scales
from tokenbus.kernels.triton.kv_write import write_kv as triton_write_kv
from tokenbus.plugins.attention import TorchAttention as TorchAttentionPlugin

from .conftest import Case

F32, BF16 = torch.float32, torch.bfloat16
TOLERANCE = {F32: 5e-6, BF16: 2**-8}
"""Float32: scores of up to about 8 are rounded to 5e-7, and weigh values of up to about 4. bfloat16: half a unit of its 8 bits."""


@pytest.mark.parametrize("stored", ["", "int8", "fp8"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "softcap"),
    [
        (9, 3, 64, 16, None, None),
        (4, 1, 256, 16, 40, 5.0),
        (2, 2, 16, 16, 200, None),
        (6, 2, 80, 8, None, 30.0),
        (3, 3, 40, 32, 130, None),
        (5, 1, 72, 12, 1, None),
        (1, 1, 128, 256, 17, None),
    ],
)
def test_matches_the_reference(heads, kv_heads, dim, block_size, window, softcap, dtype, stored):
    case = Case.make(
        [1, 7, 130, 300],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        softcap=softcap,
        stored=stored,
    )
    for r, found in enumerate(case.run([{3: 129, 1: 1, 2: 130}, {1: 5, 3: 170}, {3: 1, 1: 1, 0: 1}])):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), case.reference(r), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_the_reference_is_ordinary_attention():
    case = Case.make([50], heads=4, kv_heads=4)
    q, k, v = (of[0].transpose(0, 1)[None] for of in (case.q, case.k, case.v))
    usual = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.params.scale)
    torch.testing.assert_close(case.reference(0), usual[0].transpose(0, 1), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": BF16},
        {"window": 100},
        {"dim": 40, "heads": 2, "kv_heads": 2, "softcap": 10.0},
        {"dim": 256, "heads": 4, "kv_heads": 1, "dtype": BF16, "window": 130},
        {"dim": 16, "heads": 8, "kv_heads": 1, "block_size": 12},
        {"stored": "int8"},
        {"stored": "int8", "dtype": BF16, "dim": 44, "heads": 4, "kv_heads": 2, "window": 100, "block_size": 12},
        {"stored": "fp8", "dtype": BF16, "dim": 44, "heads": 4, "kv_heads": 2, "window": 100, "block_size": 12},
    ],
    ids=str,
)
def test_same_bits_however_a_prompt_is_divided(options, threads):
    n = 290
    case = Case.make([n], **options)
    threads(1)
    whole = case.run([{0: n}])[0]
    divisions = [[1] * n, [n - 1, 1], [128, 128, 34], [127, 2, 161], [9] * 32 + [2], [200, *[3] * 30]]
    for count in (1, 2):
        threads(count)
        for sizes in divisions:
            assert torch.equal(case.run([{0: size} for size in sizes])[0], whole), (count, sizes[:3])
    for count in (3, 4):
        threads(count)
        assert torch.equal(case.run([{0: size} for size in (150, 1, 4, 135)])[0], whole), count


@pytest.mark.parametrize(("dtype", "stored"), [(F32, ""), (BF16, ""), (BF16, "int8"), (BF16, "fp8")])
@pytest.mark.parametrize("window", [None, 64])
def test_same_bits_alone_and_in_a_batch_of_32(dtype, stored, window, threads):
    lengths = [1 + (37 * r) % 400 for r in range(32)]
    case = Case.make(lengths, dtype=dtype, window=window, stored=stored)
    threads(1)
    alone = [case.run([{r: lengths[r]}])[r] for r in range(32)]
    for count in (1, 2):
        threads(count)
        whole = case.run([{r: lengths[r] for r in reversed(range(32))}], seed=count)
        assert all(torch.equal(*pair) for pair in zip(whole, alone, strict=True))
        steps = [{r: lengths[r] - min(lengths[r] - 1, r % 9) for r in range(32) if lengths[r] > r % 9}]
        steps += [{r: 1 for r in range(32) if lengths[r] > r % 9 and r % 9 > i} for i in range(8)]
        mixed = case.run([step for step in steps if step])
        for r in range(32):
            assert torch.equal(mixed[r], alone[r][: len(mixed[r])]), (count, r)


def test_draft_lengths_of_other_requests_do_not_matter(threads):
    lengths = [40, 300, 131, 260]
    case = Case.make(lengths)
    threads(2)
    alone = [case.run([{r: n}])[r] for r, n in enumerate(lengths)]
    first = {r: n - 9 for r, n in enumerate(lengths)}
    mixed = case.run([first, {0: 1, 1: 4, 2: 2, 3: 6}, {3: 3, 2: 7, 1: 1, 0: 8}])
    for r in range(4):
        assert torch.equal(mixed[r], alone[r][: len(mixed[r])])


@pytest.mark.parametrize("stored", ["", "int8", "fp8"])
def test_what_was_in_the_blocks_before_does_not_matter(stored):
    case = Case.make([37, 150], stored=stored)
    steps = [{0: 20, 1: 140}, {0: 1, 1: 1}, {0: 16, 1: 9}]
    clean = case.run(steps)
    dirty = case.run(steps, fill=float("nan"))
    assert all(torch.equal(*pair) for pair in zip(clean, dirty, strict=True))
    assert all(bool(rows.isfinite().all()) for rows in dirty)


def test_a_request_with_nan_harms_no_other():
    case = Case.make([37, 150])
    steps = [{0: 37, 1: 140}, {1: 1}, {1: 9}]
    good = case.run(steps)[1]
    case.v[0][:] = case.k[0][:] = float("nan")
    assert torch.equal(case.run(steps)[1], good)


def test_int8_rows():
    """Integers and a scale of each row; what can't be scaled is zeros, or NaN when it held NaN or an infinity."""
    x = torch.randn(7, 3, 44, generator=torch.Generator().manual_seed(1))
    x[0], x[1] = 0, 1e-42
    x[2, :, 5], x[3, :, 0] = torch.nan, -torch.inf
    x[4] = torch.arange(44) + 0.5
    x[4, :, 0] = 127
    for rows in (x, x.bfloat16()):
        found = quantize(rows)
        assert found.dtype == torch.int8
        assert found.shape == (7, 3, 48)
        integers, scales = found[..., :44], found[..., 44:].contiguous().view(F32)
        assert integers[:4].count_nonzero() == 0
        assert bool((scales[:2] == 0).all())
        assert bool(scales[2:4].isnan().all())
        assert integers[4, 0].tolist() == [127, *(round(i + 0.5) for i in range(1, 44))]
        good = rows[4:].float()
        assert torch.equal(scales[4:], good.abs().amax(-1, keepdim=True) / 127)
        assert bool(((integers[4:] * scales[4:] - good).abs() <= 0.50001 * scales[4:]).all())


def test_fp8_rows():
    """e4m3 numbers and a scale of each row, as kernels/triton writes them; rows without a proper scale as in int8."""
    x = torch.randn(7, 3, 44, generator=torch.Generator().manual_seed(1))
    x[0], x[1] = 0, 1e-42
    x[2, :, 5], x[3, :, 0] = torch.nan, -torch.inf
    x[4] = torch.linspace(-2, 448, 44)
    for rows in (x, x.bfloat16()):
        found = quantize(rows, torch.float8_e4m3fn)
        assert found.dtype == torch.float8_e4m3fn
        assert found.shape == (7, 3, 48)
        numbers, scales = found[..., :44].float(), found[..., 44:].contiguous().view(F32)
        assert numbers[:4].count_nonzero() == 0
        assert bool((scales[:2] == 0).all())
        assert bool(scales[2:4].isnan().all())
        good = rows[4:].float()
        assert torch.equal(scales[4:], good.abs().amax(-1, keepdim=True) / 448)
        half = torch.maximum(good.abs() / 16, scales[4:] * 2**-10)  # of a step: 3 bits of fraction, or steps of 2^-9 below 2^-6
        assert bool(((numbers[4:] * scales[4:] - good).abs() <= 1.0001 * half).all())
        k_cache, v_cache = (torch.zeros(2, 4, 3, 48, dtype=torch.float8_e4m3fn) for _ in range(2))
        triton_write_kv(rows, rows, k_cache, v_cache, torch.arange(7))
        values, written = values_and_scales(k_cache)
        assert torch.equal(values.flatten(0, 1)[:7].view(torch.float8_e4m3fn).float(), numbers)  # but for the sign of zeros
        assert torch.equal(written.flatten(0, 1)[:7].nan_to_num(-1), scales[..., 0].nan_to_num(-1))


@pytest.mark.parametrize(("stored", "step"), [("int8", 3.5 / 127), ("fp8", 1 / 8)])
def test_error_beside_an_unquantised_cache(stored, step):
    """Rounding moves an element x by half a step, of max |x| / 127 or |x| / 8: random in sign, so a score by that times |q| / sqrt(3),
    and V likewise."""
    case, exact = Case.make([400], stored=stored), Case.make([400])
    found, wanted = case.run([{0: 400}])[0], exact.run([{0: 400}])[0]
    noise = step / 12**0.5
    bound = noise + 1.7 * noise * float(case.v[0].abs().mean()) * 2
    assert 0 < float((found - wanted).square().mean().sqrt()) < bound


def test_nan_in_an_int8_cache_reaches_those_who_see_it():
    case = Case.make([37, 150], stored="int8")
    steps = [{0: 37, 1: 140}, {1: 1}, {1: 9}]
    good = case.run(steps)
    case.k[1][140, 0, 3] = torch.inf
    bad = case.run(steps)
    assert torch.equal(bad[0], good[0])
    assert torch.equal(bad[1][:140], good[1][:140])
    assert bool(bad[1][140:, :3].isnan().all())
    assert torch.equal(bad[1][140:, 3:], good[1][140:, 3:])


def test_long_context():
    case = Case.make([8192], heads=3, kv_heads=1)
    case.q[0][:] *= 3
    found = case.run([{0: 8000}, {0: 190}, {0: 2}])[0]
    k, v = (of[0][None] for of in (case.k, case.v))
    rows = reference_attention(case.q[0][-70:], k, v, [0, 70], [8192], [[0]], case.params.scale)
    torch.testing.assert_close(found[-70:], rows, rtol=2e-5, atol=2e-5)  # three times the scores


def test_strided_inputs_and_bfloat16_cache_under_float32_queries():
    case = Case.make([33], dtype=BF16)
    q, k, v = (of[0].float() for of in (case.q, case.k, case.v))
    table = {0: case.tables([0])[0][0]}
    qkv = torch.cat([q, k, v], dim=1)
    parts = qkv.split([9, 3, 3], dim=1)
    assert not parts[0].is_contiguous()
    caches = case.caches(10)
    batch = case.batch({0: slice(0, 33)}, table)
    found = case.backend.attend(*parts, *caches, batch, case.params)
    assert found.dtype == F32
    torch.testing.assert_close(found, case.reference(0), rtol=2e-6, atol=2e-6)
    assert torch.equal(caches[0][table[0]].flatten(0, 1)[:33], case.k[0])


def test_the_plugin_gives_the_same_backend():
    layout = KVLayout(1, (3,), (64,), 16, F32, torch.device("cpu"))
    backend = TorchAttentionPlugin(NoSettings(), "worker").attention_backend(layout)
    assert backend is not None
    assert backend.invariant
    case = Case.make([100, 3])
    core = case.run([{0: 90, 1: 2}, {0: 10, 1: 1}])
    case.backend = backend
    assert all(torch.equal(*pair) for pair in zip(case.run([{0: 90, 1: 2}, {0: 10, 1: 1}]), core, strict=True))


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, spans: list[tuple[int, int]]):
    """Plain float64 attention of one sequence [n, heads, dim], with spans that see all of themselves."""
    n, group = len(q), q.shape[1] // k.shape[1]
    at = torch.arange(n)
    sees = at[:, None] >= at
    for start, end in spans:
        sees[start:end, start:end] = True
    if window is not None:
        sees &= at > at[:, None] - window
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 40])
def test_rows_that_see_ahead_are_dense_attention_and_do_not_mind_their_batch(window, threads):
    case = Case.make([300, 9, 150, 6], window=window)
    case.spans = {0: [(5, 8), (100, 260)], 1: [(1, 7)], 2: [(0, 150)]}
    threads(2)
    alone = [case.run([{r: len(case.q[r])}])[r] for r in range(4)]
    for r, found in enumerate(alone):
        dense = _dense(case.q[r], case.k[r], case.v[r], case.params.scale, window, case.spans.get(r, []))
        torch.testing.assert_close(found.double(), dense, rtol=1e-5, atol=1e-5)
    mixed = case.run([{1: 1, 3: 5, 0: 3}, {0: 5, 1: 6, 2: 150}, {0: 92, 1: 2}, {3: 1, 0: 160}, {0: 40}])
    assert all(torch.equal(*pair) for pair in zip(mixed, alone, strict=True))
