"""The sampling kernel against the engine's own path: core/sampler.py's steps, the truncation plugin's set, core/rng.py's draw.

In the interpreter exponentials are numpy's on both sides, so sets and tokens have to be the same, not close.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from tokenbus.core import rng
from tokenbus.core.sampler import MIN_TEMPERATURE
from tokenbus.kernels.triton.philox import gumbels, random_words, rough_gumbels
from tokenbus.kernels.triton.sampling import NOT_A_NUMBER, NOTHING_FINITE, OK, SamplingRows, filter_logits, sample
from tokenbus.plugins.sampling.truncation import keep

from .paged import DEVICE, INTERPRETED, seeded

pytestmark = pytest.mark.usefixtures("where_kernels_run")

INF = float("inf")
KINDS = {
    "normal": lambda g, n: torch.randn(n, generator=g) * 3,
    "ties": lambda g, n: (torch.randn(n, generator=g) * 2).round() / 2,
    "equal": lambda g, n: torch.full((n,), 7.25),
    "wide": lambda g, n: torch.randn(n, generator=g) * 200,
    "masked": lambda g, n: (
        torch.randn(n, generator=g)
        .round()
        .masked_fill(torch.rand(n, generator=g) < 0.8, -INF)
        .index_fill(0, torch.tensor([n // 2]), 1.0)
    ),
    "one": lambda g, n: torch.full((n,), -INF).index_fill(0, torch.tensor([n // 2]), -3.0),
}
PARAMETERS = [  # temperature, top_k, top_p, min_p
    (1.0, 0, 1.0, 0.0),
    (0.7, -1, 1.0, 0.05),
    (1.0, 1, 1.0, 0.0),
    (1.7, 5, 1.0, 0.0),
    (0.3, 40, 0.9, 0.0),
    (1.0, 10_000, 0.5, 0.0),
    (2.0, 7, 0.5, 0.3),
    (1.0, 0, 0.9, 0.0),
    (0.9, 0, 0.0, 0.0),
    (1.3, 0, 0.3, 0.0),
    (1.0, 3, 0.999, 1.0),
    (0.0, 3, 0.5, 0.5),
]


def make_rows(*args, **options):
    return SamplingRows.make(*args, **options, device=DEVICE)


def batch(kind, size, seed=0):
    g = seeded(seed)
    return torch.stack([KINDS[kind](g, size) for _ in PARAMETERS])


def rows_for(parameters, *, seed=11, position=5):
    n = len(parameters)
    temperature, top_k, top_p, min_p = zip(*parameters, strict=True)
    return make_rows(
        temperature,
        [seed + 2**63 * (i % 2) for i in range(n)],
        [position + i for i in range(n)],
        choice=[i % 3 for i in range(n)],
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )


def engine_filtered(logits, temperature, top_k, top_p, min_p):
    """One row as core/sampler.py and the plugin leave it for the draw."""
    values = logits.float().cpu().numpy().copy()
    if temperature < MIN_TEMPERATURE:
        return values
    values -= values.max()
    if temperature != 1.0:
        values /= np.float32(temperature)
    kept = keep(values, max(top_k, 0), top_p, min_p)
    out = np.full_like(values, -INF)
    out[kept] = values[kept]
    return out


def engine_token(values, temperature, seed, position, choice):
    return int(values.argmax()) if temperature < MIN_TEMPERATURE else rng.sample(values, seed, position, choice)


def engine_tokens(filtered, rows):
    keys = zip(*(t.tolist() for t in (rows.temperature, rows.seed, rows.position, rows.choice)), strict=True)
    return [engine_token(values, *key) for values, key in zip(filtered, keys, strict=True)]


@triton.jit
def gumbels_kernel(x, exact, rough, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.arange(0, BLOCK)
    word = tl.load(x + i).to(tl.uint32)
    tl.store(exact + i, gumbels(word))
    tl.store(rough + i, rough_gumbels(word))


@pytest.mark.parametrize("size", [1, 19, 1100])
def test_words_are_those_of_the_engine(size):
    keys = [(0, 0, 0), (2**64 - 1, 7, 3), (123456789, 2**40, 1), (-5, 1, 2**33)]
    seeds, positions, choices = zip(*keys, strict=True)
    rows = make_rows([1.0] * len(keys), seeds, positions, choice=choices)
    found = random_words(rows.seed, rows.position, rows.choice, size)
    for row, (seed, position, choice) in zip(found.cpu().numpy(), keys, strict=True):
        assert np.array_equal(row, rng.words(seed, position, choice, size).astype(np.int64))


def test_gumbels_are_those_of_the_engine_and_rough_ones_are_near():
    words = [0, 1, 2, 2**20, 2**26 - 1, 2**26, 2**26 + 1, 2**31, 2**32 - 2, 2**32 - 1]
    words += np.random.default_rng(0).integers(0, 2**32, 512 - len(words)).tolist()
    exact, rough = torch.empty(512, dtype=torch.float64), torch.empty(512)
    gumbels_kernel[(1,)](torch.tensor(words), exact, rough, BLOCK=512)
    wanted = rng.gumbels(np.array(words, dtype=np.uint32))
    np.testing.assert_allclose(exact.cpu().numpy(), wanted, rtol=0, atol=1e-14)
    np.testing.assert_allclose(rough.cpu().numpy(), wanted, rtol=0, atol=2e-5 if INTERPRETED else 1e-4)  # 1e-3 is allowed for


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [5, 100])
def test_the_set_that_survives_and_the_token(size, kind):
    logits, rows = batch(kind, size), rows_for(PARAMETERS)
    before = logits.clone()
    wanted = np.stack([engine_filtered(row, *parameters) for row, parameters in zip(logits, PARAMETERS, strict=True)])
    found = filter_logits(logits, rows, config={"BLOCK": 64})
    assert np.array_equal(found.cpu().numpy(), wanted)
    drawn = sample(logits, rows, config={"BLOCK": 64})
    assert drawn.tokens.tolist() == engine_tokens(wanted, rows)
    assert drawn.states.tolist() == [OK] * len(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("kind", ["normal", "ties"])
def test_every_place_at_which_a_row_can_be_cut(kind):
    size = 24
    parameters = [(1.0, k, 1.0, 0.0) for k in range(1, size + 1)] + [(1.0, 0, (i + 0.5) / 12, 0.0) for i in range(12)]
    logits = batch(kind, size, seed=1)[:1].expand(len(parameters), -1)
    wanted = np.stack([engine_filtered(row, *of) for row, of in zip(logits, parameters, strict=True)])
    assert np.array_equal(filter_logits(logits, rows_for(parameters)).cpu().numpy(), wanted)
    assert np.isfinite(wanted).sum(axis=1)[:size].tolist() == list(range(1, size + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_in_rows_of_a_wider_tensor(dtype):
    logits = batch("normal", 60).to(dtype)[:, 7:50]
    rows = rows_for(PARAMETERS)
    wanted = [engine_filtered(row, *parameters) for row, parameters in zip(logits, PARAMETERS, strict=True)]
    assert np.array_equal(filter_logits(logits, rows).cpu().numpy(), np.stack(wanted))
    assert sample(logits, rows).tokens.tolist() == engine_tokens(wanted, rows)


def test_where_top_p_is_met_exactly():
    """Four equally likely tokens: half of the probability is two of them, not three."""
    logits = torch.zeros(3, 4)
    rows = make_rows([1.0] * 3, [1] * 3, [1] * 3, top_p=[0.5, 0.25, 0.50001])
    assert (filter_logits(logits, rows) == 0).sum(dim=1).tolist() == [2, 1, 3]


def test_greedy_rows_take_the_lowest_of_the_most_likely_ids():
    logits = torch.full((4, 100), -1.0)
    logits[0, [70, 20, 90]] = 3.5
    logits[1, 99] = 0.0
    logits[2] = -INF
    logits[2, 33] = -1e30
    rows = make_rows([0.0, 1e-6, 0.0, 0.0], [1] * 4, [1] * 4, top_k=[2] * 4)
    assert sample(logits, rows, config={"BLOCK": 16}).tokens.tolist() == [20, 99, 33, 0]


def test_a_temperature_at_the_bound_is_not_greedy():
    logits = torch.zeros(2, 9)
    rows = make_rows([MIN_TEMPERATURE, MIN_TEMPERATURE / 2], [3, 3], [4, 4])
    assert sample(logits, rows).tokens.tolist() == [rng.sample(np.zeros(9, np.float32), 3, 4, 0), 0]
    assert rng.sample(np.zeros(9, np.float32), 3, 4, 0) != 0


def test_rows_without_a_token_say_why_and_harm_no_other():
    logits = torch.zeros(7, 20)
    logits[0] = -INF
    logits[1, 19] = float("nan")
    logits[2, 3] = INF
    logits[5, 0] = float("nan")
    rows = make_rows([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1] * 7, [1] * 7, min_p=[0.0] * 4 + [1.5, 0.0, 0.0])
    found = sample(logits, rows, logprobs="raw", config={"BLOCK": 16})
    assert found.states.tolist() == [NOTHING_FINITE, NOT_A_NUMBER, NOT_A_NUMBER, OK, NOTHING_FINITE, NOT_A_NUMBER, OK]
    assert (found.tokens >= 0).tolist() == [state == OK for state in found.states.tolist()]
    assert found.logprobs is not None
    assert found.logprobs.isnan().tolist() == [state != OK for state in found.states.tolist()]
    copied = filter_logits(logits, rows)
    assert torch.equal(copied[2], logits[2])
    assert torch.equal(copied[6], logits[6])


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs(mode):
    parameters = [PARAMETERS[i] for i in (0, 3, 4, 6, 9, 11)]
    logits = batch("normal", 90)[: len(parameters)] * 2
    rows = rows_for(parameters)
    found = sample(logits, rows, logprobs=mode, config={"BLOCK": 32})
    source = logits.double() if mode == "raw" else filter_logits(logits, rows).double()
    wanted = source.log_softmax(-1).gather(1, found.tokens[:, None])[:, 0]
    assert found.logprobs is not None
    torch.testing.assert_close(found.logprobs.double(), wanted, rtol=0, atol=1e-5)
    assert torch.equal(found.tokens, sample(logits, rows, config={"BLOCK": 32}).tokens)
    assert sample(logits[:0], make_rows([], [], []), logprobs=mode).tokens.shape == (0,)


def test_a_row_does_not_depend_on_the_others_nor_on_the_block():
    logits, rows = batch("normal", 70), rows_for(PARAMETERS)
    whole = sample(logits, rows, logprobs="processed", config={"BLOCK": 32})
    assert whole.logprobs is not None
    for i in (4, 7):
        fields = {name: getattr(rows, name)[i : i + 1] for name in rows.__slots__}
        alone = sample(logits[i : i + 1], SamplingRows(**fields), logprobs="processed", config={"BLOCK": 32})
        assert alone.logprobs is not None
        assert torch.equal(alone.tokens, whole.tokens[i : i + 1])
        assert torch.equal(alone.logprobs, whole.logprobs[i : i + 1])
    assert torch.equal(sample(logits, rows).tokens, whole.tokens)


# ---- the distribution -----------------------------------------------------------------------------------------------------------

RIGHT, WRONG = 1e-4, 1e-8
"""A right sampler may look this unlikely; a wrong one has to look this unlikely at least. Seeds are fixed."""
LOGITS = np.random.default_rng(7).normal(0, 1.5, 12).astype(np.float32)


def expected(temperature, top_k=0, top_p=1.0):
    chance = np.exp(LOGITS.astype(np.float64) / temperature)
    chance /= chance.sum()
    order = np.argsort(-chance, kind="stable")
    if top_k:
        chance[order[top_k:]] = 0
        chance /= chance.sum()
    before = np.cumsum(chance[order]) - chance[order]
    chance[order[before >= top_p]] = 0
    return chance / chance.sum()


def likelihood(tokens, chance):
    """How likely counts this far from `chance` are."""
    counts = np.bincount(tokens, minlength=len(chance))
    if counts[chance == 0].any():
        return 0.0
    likely = chance * len(tokens) >= 5
    seen, wanted = counts[likely], chance[likely] * len(tokens)
    rest = len(tokens) - wanted.sum()
    if rest > 1e-6:
        seen, wanted = np.append(seen, len(tokens) - seen.sum()), np.append(wanted, rest)
    return stats.chisquare(seen, wanted).pvalue


def draw(count, temperature, top_k=0, top_p=1.0):
    """From seeds, positions and choices that all differ."""
    rows = make_rows(
        [temperature] * count,
        [i // 20 for i in range(count)],
        [2 + i % 5 for i in range(count)],
        choice=[i // 5 % 4 for i in range(count)],
        top_k=[top_k] * count,
        top_p=[top_p] * count,
    )
    logits = torch.tensor(LOGITS).expand(count, -1)
    return sample(logits, rows, config={"BLOCK": 16}).tokens.cpu().numpy()


def test_draws_follow_softmax_after_temperature():
    tokens = draw(180, 1.3)
    assert likelihood(tokens, expected(1.3)) > RIGHT
    assert likelihood(tokens, expected(9.0)) < WRONG, "the test can't tell one temperature from another"


@pytest.mark.long
def test_draws_follow_what_top_k_and_top_p_left():
    tokens, chance = draw(120, 0.8, top_k=8, top_p=0.95), expected(0.8, 8, 0.95)
    assert likelihood(tokens, chance) > RIGHT
    assert likelihood(tokens, expected(0.8, 8, 0.5)) < WRONG
    assert likelihood(tokens, (chance > 0) / (chance > 0).sum()) < WRONG, (
        "the test can't tell these tokens from equally likely ones"
    )


def test_wrong_arguments_are_refused():
    logits, rows = torch.zeros(2, 9), make_rows([1.0] * 2, [1] * 2, [1] * 2)
    calls = {
        "logits are torch.int64": lambda: sample(logits.long(), rows),
        "\\[2, 0\\]": lambda: sample(logits[:, :0], rows),
        "in one piece": lambda: sample(torch.zeros(9, 2).T, rows),
        "temperature is": lambda: sample(logits[:1], rows),
        "top_k is torch.int32": lambda: sample(
            logits, SamplingRows(**{n: getattr(rows, n) for n in rows.__slots__} | {"top_k": rows.top_k.int()})
        ),
        "logprobs is 'both'": lambda: sample(logits, rows, logprobs="both"),
        "BLOCK is 24": lambda: sample(logits, rows, config={"BLOCK": 24}),
        "no size": lambda: filter_logits(logits, rows, config={"SIZE": 16}),
        "must be int64": lambda: random_words(rows.seed.int(), rows.position, rows.choice, 3),
    }
    for words, call in calls.items():
        with pytest.raises(ValueError, match=words):
            call()
