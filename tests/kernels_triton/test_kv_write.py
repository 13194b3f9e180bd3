"""K and V written to slots by Triton: the same numbers as torch writes, with the scales of a block behind its values."""

from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.torch_ops.attention import quantize
from tokenbus.kernels.triton.attention import AttentionPlan, paged_attention, values_and_scales
from tokenbus.kernels.triton.kv_write import write_kv

from .paged import BF16, DEVICE, F16, F32, FP8, quantize_fp8

INT8 = torch.int8
MAKE = {INT8: quantize, FP8: quantize_fp8}


def empty(blocks: int, size: int, heads: int, row: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of 77."""
    return torch.full((blocks, size, heads, row * dtype.itemsize), 77, dtype=INT8, device=DEVICE).view(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(INT8).cpu()


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """Bytes [blocks, block_size, heads, row], a row's scale behind its values, if it has one."""
    values, scales = values_and_scales(cache)
    rows = as_bytes(values)
    return rows if scales is values else torch.cat([rows, as_bytes(scales[..., None])], dim=-1)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (F32, INT8), (BF16, INT8), (F32, FP8), (F16, FP8)]
)
@pytest.mark.parametrize(("heads", "dim", "block_size"), [(3, 64, 16), (1, 80, 12), (8, 4, 128)])
def test_rows_are_where_the_slots_say(dtype, cache_dtype, heads, dim, block_size):
    tokens = 11
    g = torch.Generator().manual_seed(0)
    packed = torch.randn(tokens, 3, heads, dim, generator=g).to(dtype)
    packed[4] *= 1e-3
    _, k, v = packed.to(DEVICE).unbind(1)
    assert not k.is_contiguous()
    slots = torch.randperm(5 * block_size, generator=g)[:tokens]
    slots[6] = -1
    row = dim + 4 if cache_dtype.itemsize == 1 else dim
    caches = [empty(5, block_size, heads, row, cache_dtype) for _ in "kv"]
    write_kv(k, v, *caches, slots.to(DEVICE))
    for cache, x in zip(caches, (k, v), strict=True):
        expected = as_bytes(empty(5, block_size, heads, row, cache_dtype)).flatten(0, 1)
        kept = slots >= 0
        expected[slots[kept]] = as_bytes(MAKE.get(cache_dtype, torch.clone)(x.cpu()))[kept]
        assert torch.equal(rows_of(cache).flatten(0, 1), expected)


def one_row_each(x: torch.Tensor, cache_dtype: torch.dtype) -> torch.Tensor:
    """The bytes of x [T, heads, dim] in a cache of one block."""
    caches = [empty(1, len(x), x.shape[1], x.shape[2] + 4, cache_dtype) for _ in "kv"]
    write_kv(x.to(DEVICE), x.to(DEVICE), *caches, torch.arange(len(x), device=DEVICE))
    assert torch.equal(*(as_bytes(cache) for cache in caches))
    return rows_of(caches[0])[0]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("cache_dtype", [INT8, FP8])
def test_rows_without_a_proper_scale(dtype, cache_dtype):
    x = torch.randn(6, 2, 44, generator=torch.Generator().manual_seed(1))
    x[0], x[1] = 0, 1e-42
    x[2, :, 5], x[3, :, 0] = torch.nan, -torch.inf
    x = x.to(dtype)
    found = one_row_each(x, cache_dtype)
    codes, scales = found[..., :44], found[..., 44:].contiguous().view(F32)
    assert codes[2:4].count_nonzero() == 0
    assert bool(scales[2:4].isnan().all())
    for rows in (slice(0, 2), slice(4, 6)):
        assert torch.equal(found[rows], as_bytes(MAKE[cache_dtype](x[rows])))
    assert codes[:2].count_nonzero() == 0
    assert bool((scales[:2] == 0).all())


def test_integers_are_rounded_to_even():
    x = torch.arange(-64, 64)[None, None] + 0.5
    x[..., 0] = 127
    assert torch.equal(one_row_each(x, INT8), as_bytes(quantize(x)))
    assert one_row_each(x, INT8)[0, 0, 64:67].tolist() == [0, 2, 2]


def all_codes() -> torch.Tensor:
    """float32 of all finite e4m3 numbers, ascending, without -0."""
    codes = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    return codes[codes.isfinite()].unique()


def test_fp8_is_rounded_to_the_nearest_even():
    numbers = all_codes()
    assert len(numbers) == 253
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([numbers, middles, middles * (1 + 2**-23), middles * (1 - 2**-23), torch.tensor([-0.0])])
    rows = torch.full((-(-len(x) // 60), 1, 64), 448.0)  # the last four of a row stay 448: its scale is 1
    padded = torch.cat([x, torch.zeros(-len(x) % 60)])
    rows[:, 0, :60] = padded.view(-1, 60)
    found = one_row_each(rows, FP8)
    assert torch.equal(found[..., :64], as_bytes(rows.to(FP8)))
    assert bool((found[..., 64:].contiguous().view(F32) == 1).all())


@pytest.mark.parametrize("cache_dtype", [INT8, FP8])
def test_attention_reads_what_every_code_means(cache_dtype):
    """A lone position has weight 1: what comes out is its V."""
    codes = torch.arange(256, dtype=torch.uint8).view(cache_dtype)
    codes = torch.where(codes.float().isfinite(), codes.view(INT8), 0).view(cache_dtype)
    q = torch.zeros(1, 1, 256, device=DEVICE)
    plan = AttentionPlan([0, 1], [1], [[0]], DEVICE)
    for scale in (3e-5, 0.7):
        k_cache, v_cache = (torch.zeros(1, 4, 1, 260, dtype=INT8, device=DEVICE).view(cache_dtype) for _ in "kv")
        values, scales = values_and_scales(v_cache)
        values[0, 0, 0], scales[0, 0, 0] = codes.view(INT8).to(DEVICE), scale
        found = paged_attention(q, k_cache, v_cache, plan, 1.0)
        torch.testing.assert_close(found[0, 0].cpu(), codes.float() * torch.tensor(scale), rtol=0, atol=0)


def test_a_block_is_values_and_then_scales():
    cache = torch.arange(2 * 3 * 2 * 12).to(INT8).view(2, 3, 2, 12)
    values, scales = values_and_scales(cache)
    assert torch.equal(values, cache.view(2, 72)[:, :48].view(2, 3, 2, 8))
    assert torch.equal(scales.contiguous().view(INT8).view(2, 24), cache.view(2, 72)[:, 48:])
    part = values_and_scales(cache[1:])
    assert torch.equal(part[0], values[1:])
    assert torch.equal(part[1].contiguous().view(INT8), scales[1:].contiguous().view(INT8))


def test_nothing_to_write():
    cache = empty(1, 16, 2, 64, F32)
    before = cache.clone()
    k = torch.empty(0, 2, 64, device=DEVICE)
    write_kv(k, k, cache, cache, torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert torch.equal(as_bytes(cache), as_bytes(before))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"v": torch.zeros(3, 2, 60)}, "k and v must be alike"),
        ({"v": torch.zeros(3, 2, 64, dtype=BF16)}, "k and v must be alike"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots must be int64 \[3\]"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots must be int64"),
        ({"cache": torch.zeros(1, 16, 3, 64)}, "k has 2 heads, the cache 3"),
        ({"cache": torch.zeros(1, 16, 2, 68)}, "must be head_dim; head_dim is 64"),
        ({"cache": torch.zeros(1, 16, 2, 64, dtype=torch.int16)}, "don't serve"),
        ({"cache": torch.zeros(16, 2, 64)}, "caches must be alike"),
        (
            {"cache": torch.zeros(1, 2, 16, 68, dtype=INT8).transpose(1, 2)},
            "blocks of a cache of torch.int8 must be contiguous",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    k, v = torch.zeros(3, 2, 64), change.get("v", torch.zeros(3, 2, 64))
    cache = change.get("cache", torch.zeros(1, 16, 2, 64)).to(DEVICE)
    slots = change.get("slots", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=words):
        write_kv(k.to(DEVICE), v.to(DEVICE), cache, cache, slots.to(DEVICE))
