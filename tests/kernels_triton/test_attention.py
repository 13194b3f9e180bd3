"""Paged attention in Triton against the float32 reference, and the same bits in whatever batch a row is."""

from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.triton import attention, attention_plan
from tokenbus.kernels.triton.attention import INTERPRETED, AttentionPlan, Tiling, launches, paged_attention
from tokenbus.kernels.triton.attention_plan import Work
from tokenbus.kernels.triton.kv_write import write_kv

from .paged import BF16, DEVICE, F16, F32, FP8, SMALL, Case, same

INT8 = torch.int8
TOLERANCE = {
    # scores of up to about 12, in units of log2, are rounded to 7e-7 and weigh values of up to about 4; products are IEEE
    F32: (1e-5, 1e-5),
    # interpreted: products in float32, but the result loses its last bits, not rounded. On a device weights are rounded to bfloat16 too
    BF16: (2**-7, 2e-5 if INTERPRETED else 2**-6),
    F16: (2**-10, 2e-5 if INTERPRETED else 2**-9),
}


def check(case: Case, steps: list[dict[int, int]], **options) -> None:
    rtol, atol = TOLERANCE[case.q[0].dtype]
    for r, found in enumerate(case.run(steps, **options)):
        assert found.dtype == case.q[r].dtype
        torch.testing.assert_close(found.float(), case.reference(r)[len(case.q[r]) - len(found) :], rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "softcap", "dtype", "cache_dtype"),
    [
        (6, 2, 64, 16, None, None, F32, None),
        (8, 1, 256, 32, 40, 5.0, BF16, None),
        (2, 2, 96, 64, 70, None, F16, None),
        (6, 2, 80, 12, None, 30.0, F32, INT8),
        (4, 1, 128, 128, None, None, BF16, INT8),
        (3, 1, 72, 8, 1, None, F32, FP8),
        (4, 2, 64, 16, 33, 8.0, BF16, FP8),
        (2, 2, 16, 16, None, None, F32, BF16),
    ],
)
def test_matches_the_reference(heads, kv_heads, dim, block_size, window, softcap, dtype, cache_dtype):
    case = Case.make(
        [1, 7, 40, 100],
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    check(case, [{3: 45, 1: 1, 2: 40}, {1: 5, 3: 54}, {3: 1, 1: 1, 0: 1}])


@pytest.mark.parametrize(("dim", "dtype"), [(64, F32), (128, BF16), (160, BF16)])
def test_default_tilings(dim, dtype):
    """More than one split of the default size, spread among programs and not."""
    case = Case.make([530], heads=1, kv_heads=1, dim=dim, dtype=dtype, block_size=64)
    check(case, [{0: 70}, {0: 7}, {0: 3}], config=None, known={0: 450})


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, None),
        ({}, {"tile": 16, "split": 32}),
        ({"window": 40, "softcap": 10.0, "dtype": BF16}, {"tile": 32, "split": 32}),
        ({"cache_dtype": INT8, "dtype": BF16, "dim": 80}, {"tile": 32, "split": 64}),
        ({"cache_dtype": FP8, "dtype": F16, "heads": 5, "kv_heads": 1}, None),
    ],
    ids=str,
)
def test_tilings_that_follow_the_batch(options, config):
    """Prompts, a mixture, short drafts, decode steps: some in one program over several splits that don't begin afresh, some spread."""
    case = Case.make([2, 70, 85], **{"heads": 4, "kv_heads": 2, **options})
    check(case, [{2: 80, 1: 40}, {1: 25, 2: 1, 0: 1}, {1: 4, 2: 3}, {2: 1, 1: 1, 0: 1}], config=config, invariant=False)


def test_a_program_of_several_splits_begins_afresh_only_where_rows_must_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(attention_plan, "ENOUGH", 0)
    case = Case.make([140], heads=3, kv_heads=1)
    small = {**SMALL, "tile": 32, "split": 64}
    free = case.run([{0: 140}], config=small, invariant=False)[0]
    one = case.run([{0: 140}], config={**small, "split": 192}, invariant=False)[0]
    assert not torch.equal(free, case.run([{0: 140}], config=small)[0])
    torch.testing.assert_close(free, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache_dtype", [F32, INT8])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("invariant", [True, False])
def test_padding_reads_and_writes_nothing(invariant, window, cache_dtype):
    """A captured graph runs a fixed number of work items, merge jobs, rows: what has no tokens, and slots below 0, changes nothing."""
    case = Case.make([140, 30], heads=4, kv_heads=2, window=window, cache_dtype=cache_dtype)
    q, k, v = (torch.cat([of[0][-1:], of[1]]).to(DEVICE) for of in (case.q, case.k, case.v))
    k_cache, v_cache = case.caches(14)
    tables = [list(range(9)), [11, 10]]
    for r in (0, 1):
        slots = torch.tensor([tables[r][p // 16] * 16 + p % 16 for p in range(len(case.k[r]))], device=DEVICE)
        write_kv(case.k[r].to(DEVICE), case.v[r].to(DEVICE), k_cache, v_cache, slots)
    plan = AttentionPlan([0, 1, 31], [140, 30], tables, DEVICE)
    tiling = Tiling.choose(64, 2, F32, SMALL, one_byte=cache_dtype is INT8, invariant=invariant)
    work = plan.work(tiling.block_m // 2, tiling.split, window, 2)
    assert work.slots > 0
    assert len(work.jobs) > 0

    def run(rows):
        out = torch.full((rows, 4, 64), 7.0, device=DEVICE)
        padded = torch.full((rows, 4, 64), float("nan"), device=DEVICE)
        padded[:31] = q
        for launch in launches(out, padded, k_cache, v_cache, plan, case.scale, window, None, tiling):
            launch.run(DEVICE)
        return out

    before = run(31)
    stale = torch.tensor(
        [[3, 0, 50, 1 << 20, 0, 3, 1, 0], [0] * 8, [1 << 20, 0, 7, 0, 5, 9, -1, 0]], dtype=torch.int32, device=DEVICE
    )
    items = torch.cat([work.items[:1], stale, work.items[1:], stale])
    jobs = torch.cat([stale[:, :4], work.jobs, stale[:, :4]])
    plan._work = {key: Work(items, jobs, work.slots) for key in plan._work}
    after = run(40)
    assert torch.equal(after[:31], before)
    assert bool((after[31:] == 7.0).all())
    bytes_before = k_cache.clone(), v_cache.clone()
    write_kv(k, v, k_cache, v_cache, torch.full((31,), -1, device=DEVICE))
    assert all(torch.equal(a.view(INT8), b.view(INT8)) for a, b in zip(bytes_before, (k_cache, v_cache), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 40, "softcap": 10.0},
        {"dtype": BF16, "dim": 80, "heads": 4, "kv_heads": 1},
        {"cache_dtype": INT8, "window": 100},
        {"cache_dtype": FP8, "dtype": BF16},
    ],
    ids=str,
)
def test_same_bits_however_a_prompt_is_divided(options):
    n = 135
    case = Case.make([n], **{"heads": 3, "kv_heads": 1, **options})
    whole = case.run([{0: n}])[0]
    for sizes in ([127, 2, 6], [64, 33, *[9] * 4, 1, 1]):
        assert torch.equal(case.run([{0: size} for size in sizes])[0], whole), sizes


@pytest.mark.parametrize("options", [{}, {"cache_dtype": INT8, "dtype": BF16, "window": 50}], ids=str)
def test_same_bits_alone_and_in_a_batch(options):
    lengths = [1, 140, 33, 64, 65]
    case = Case.make(lengths, **{"heads": 3, "kv_heads": 1, **options})
    alone = [case.run([{r: n}])[r] for r, n in enumerate(lengths)]
    assert same(case.run([dict(reversed(list(enumerate(lengths))))], seed=1), alone)
    mixed = case.run([{1: 130, 2: 30}, {1: 1, 3: 60, 2: 3}, {4: 65, 3: 4, 1: 9, 0: 1}])
    assert same(mixed, alone)


@pytest.mark.parametrize("window", [None, 50])
def test_same_bits_whether_splits_are_spread_or_not(window, monkeypatch):
    case = Case.make([140], heads=4, kv_heads=2, window=window)
    steps = [{0: 133}, {0: 6}, {0: 1}]
    found = []
    for enough in (0, 1 << 30):
        monkeypatch.setattr(attention_plan, "ENOUGH", enough)
        plan = AttentionPlan([0, 1], [140], [[0] * 9], DEVICE)
        work = plan.work(8, 64, window, 2)
        assert (work.slots > 0) == (enough > 0)
        assert len(work.items) == max(1, work.slots)
        found.append(case.run(steps)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("enough", [0, 40, 1 << 30])
def test_work_goes_over_what_each_row_sees_once_and_in_order(window, enough, monkeypatch):
    monkeypatch.setattr(attention_plan, "ENOUGH", enough)
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 60, (20,), generator=g)
    lengths = tokens + torch.randint(0, 400, (20,), generator=g)
    starts = [0, *tokens.cumsum(0).tolist()]
    plan = AttentionPlan(starts, lengths.tolist(), [[0]] * 20, DEVICE)
    work = plan.work(7, 64, window, 4)
    seen: dict[int, list[int]] = {}
    parts: dict[int, int] = {}
    for row, count, _, _, first, end, slot, _ in sorted(work.items.tolist(), key=lambda item: item[4]):
        for r in range(row, row + count):
            seen.setdefault(r, []).extend(range(first, end))
        if slot >= 0:
            assert end == first + 1
            parts[slot] = first
    assert sorted(parts) == list(range(work.slots))
    for _, _, slot, count in work.jobs.tolist():
        splits = [parts.pop(slot + i) for i in range(count)]
        assert splits == list(range(splits[0], splits[0] + count))
    assert parts == {}
    for r in range(20):
        for i in range(tokens[r]):
            position = int(lengths[r] - tokens[r]) + i
            lowest = 0 if window is None else max(0, position - window + 1)
            splits = seen.pop(starts[r] + i)
            assert splits == list(range(splits[0], splits[-1] + 1))
            assert splits[0] <= lowest // 64
            assert splits[-1] >= position // 64
    assert seen == {}


def test_the_bits_checks_would_notice_another_tiling():
    """Other splits give other bits: what is equal above is not equal for want of a difference."""
    case = Case.make([140], heads=3, kv_heads=1)
    assert not torch.equal(case.run([{0: 140}])[0], case.run([{0: 140}], config={**SMALL, "split": 32})[0])


@pytest.mark.parametrize("cache_dtype", [F32, FP8])
def test_what_was_in_the_blocks_before_does_not_matter(cache_dtype):
    case = Case.make([37, 90], cache_dtype=cache_dtype)
    steps = [{0: 20, 1: 80}, {0: 1, 1: 1}, {0: 16, 1: 9}]
    clean, dirty = case.run(steps), case.run(steps, fill=float("nan"))
    assert same(dirty, clean)
    assert all(bool(rows.isfinite().all()) for rows in dirty)


@pytest.mark.filterwarnings("ignore:.*NaN.*:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_request_with_nan_harms_no_other():
    case = Case.make([37, 90])
    steps = [{0: 37, 1: 80}, {1: 1}, {1: 9}]
    good = case.run(steps)[1]
    case.v[0][:] = case.k[0][:] = float("nan")
    found = case.run(steps)
    assert bool(found[0].isnan().all())
    assert torch.equal(found[1], good)


@pytest.mark.filterwarnings("ignore:.*NaN.*:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_nan_in_a_one_byte_cache_reaches_those_who_see_it():
    case = Case.make([90], heads=3, kv_heads=3, cache_dtype=INT8)
    good = case.run([{0: 90}])[0]
    case.k[0][80, 0, 3] = case.v[0][80, 1, 5] = torch.inf
    bad = case.run([{0: 90}])[0]
    assert torch.equal(bad[:80], good[:80])
    assert bool(bad[80:, :2].isnan().all())
    assert torch.equal(bad[80:, 2], good[80:, 2])


def test_strided_inputs():
    case = Case.make([33], heads=6, kv_heads=2)
    q, k, v = (of[0].to(DEVICE) for of in (case.q, case.k, case.v))
    packed = torch.cat([q, k, v], dim=1)
    parts = packed.split([6, 2, 2], dim=1)
    assert not parts[0].is_contiguous()
    big = torch.full((5, 2, 3, 16, 70), float("nan"), device=DEVICE)  # K and V of a block side by side, heads before tokens
    k_cache, v_cache = (big[:, i, :2, :, 2:66].transpose(1, 2) for i in (0, 1))
    slots = torch.tensor([16 * [3, 0, 4][p // 16] + p % 16 for p in range(33)], device=DEVICE)
    plan = AttentionPlan([0, 33], [33], [[3, 0, 4]], DEVICE)
    write_kv(parts[1], parts[2], k_cache, v_cache, slots)
    for config in (SMALL, None):
        found = paged_attention(parts[0], k_cache, v_cache, plan, case.scale, config=config)
        torch.testing.assert_close(found.cpu(), case.reference(0), rtol=1e-5, atol=1e-5)
    every_other = torch.stack([q, q], dim=-1)[..., 0]
    assert every_other.stride(-1) == 2
    assert torch.equal(paged_attention(every_other, k_cache, v_cache, plan, case.scale), found)


def test_nothing_to_do():
    q, cache = torch.empty(0, 4, 64, device=DEVICE), torch.empty(2, 16, 2, 64, device=DEVICE)
    assert paged_attention(q, cache, cache, AttentionPlan([0], [], [], DEVICE), 1.0).shape == (0, 4, 64)


def test_tilings_depend_on_shapes_only_and_hold_the_group():
    assert Tiling.choose(128, 8, BF16).block_m == 64
    assert len({Tiling.choose(128, 8, BF16, longest=longest) for longest in (None, 1, 5, 9000)}) == 1
    assert Tiling.choose(64, 71, BF16).block_m == 128
    assert Tiling.choose(64, 3, F32, {"split": 96}).split == 96


def test_tilings_that_may_do_so_follow_the_longest_query():
    decode, drafts, prompt = (Tiling.choose(128, 4, BF16, longest=longest, invariant=False) for longest in (4, 8, 9))
    assert [tiling.block_m for tiling in (decode, drafts, prompt)] == [16, 32, 64]
    assert Tiling.choose(128, 4, BF16, invariant=False).block_m == 128
    assert Tiling.choose(128, 4, BF16, longest=1, invariant=False, one_byte=True).tile == 2 * decode.tile
    assert all(tiling.flat for tiling in (decode, drafts, prompt))
    assert not Tiling.choose(128, 4, BF16).flat


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"block_n": 32}, "no such entry of an attention config: block_n"),
        ({"tile": 48}, "powers of two"),
        ({"block_m": 8}, "at least 16"),
        ({"tile": 64, "split": 96}, "multiple of tile"),
    ],
)
def test_impossible_configs(config, words):
    with pytest.raises(ValueError, match=words):
        Tiling.choose(64, 3, F32, config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(3, 4, 64, dtype=torch.float64)}, "q must be"),
        ({"q": torch.zeros(3, 4, 260)}, "head_dim <= 256"),
        ({"q": torch.zeros(3, 5, 64)}, "5 query heads can't share 2"),
        ({"q": torch.zeros(2, 4, 64)}, "q has 2 rows, the plan 3"),
        ({"q": torch.zeros(3, 4, 64, dtype=F16)}, "don't serve"),
        ({"cache": torch.zeros(1, 16, 2, 68)}, "must be head_dim; head_dim is 64"),
        ({"cache": torch.zeros(1, 16, 2, 64, dtype=INT8)}, "a multiple of 4; head_dim is 64"),
        ({"cache": torch.zeros(1, 16, 64, 2).transpose(2, 3)}, "behind each other"),
        ({"window": 0}, "window"),
        ({"softcap": 0.0}, "softcap"),
        ({"scale": 0.0}, "scale"),
    ],
)
def test_arguments_that_do_not_fit(change, words):
    q = change.get("q", torch.zeros(3, 4, 64)).to(DEVICE)
    cache = change.get("cache", torch.zeros(1, 16, 2, 64)).to(DEVICE)
    plan = AttentionPlan([0, 3], [3], [[0]], DEVICE)
    with pytest.raises(ValueError, match=words):
        paged_attention(q, cache, cache, plan, change.get("scale", 1.0), change.get("window"), change.get("softcap"))


def test_tensors_where_no_kernel_runs(monkeypatch):
    monkeypatch.setattr(attention, "INTERPRETED", False)
    q, cache = torch.zeros(1, 4, 64), torch.zeros(1, 16, 2, 64)
    with pytest.raises(ValueError, match="need tensors on a GPU, or TRITON_INTERPRET=1"):
        paged_attention(q, cache, cache, AttentionPlan([0, 1], [1], [[0]], torch.device("cpu")), 1.0)
