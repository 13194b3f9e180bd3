from __future__ import annotations

import numpy as np
import pytest
from sampling_kit import SAMPLING, VOCAB, Kit, random_logits

from tokenbus.core import rng
from tokenbus.core.errors import RequestError, WorkerError

FIELDS = [
    {},
    {"top_k": 20},
    {"top_p": 0.7, "logprobs": 3},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"frequency_penalty": 1.0, "logit_bias": [[4, 5.0]], "logprobs": 0},
    {"min_tokens": {"count": 9, "banned": [0, 1]}, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
    {"bad_words": [[7], [1, 2]], "presence_penalty": -1.0},
]


def many(kit: Kit, n: int):
    return [
        kit.row(
            [1, 2, 3 + i % 5, 4, i], 3, request_id=f"r{i}", seed=i, temperature=(0.0, 0.6, 1.0, 1.7)[i % 4], **FIELDS[i % 7]
        )
        for i in range(n)
    ]


def test_no_plugin_greedy_and_plain_temperature():
    kit = Kit(())
    logits = random_logits(2)
    rows = [kit.row([1], temperature=0.0), kit.row([1, 2], temperature=0.5, seed=4, request_id="b")]
    got = kit.sample(logits, rows)
    assert got.token_ids[0] == logits[0].argmax()
    scaled = (logits[1] - logits[1].max()) / np.float32(0.5)
    assert got.token_ids[1] == int((scaled.astype(np.float64) + rng.gumbels(rng.words(4, 2, 0, VOCAB))).argmax())
    assert (got.logprobs, got.errors) == ([None, None], {})


def test_a_row_does_not_depend_on_its_batch():
    kit = Kit()
    logits = random_logits(64)
    together = kit.sample(logits, many(kit, 64))
    for i, row in enumerate(many(kit, 64)):
        alone = kit.sample(logits[i : i + 1], [row])
        assert (alone.token_ids, alone.logprobs) == (together.token_ids[i : i + 1], together.logprobs[i : i + 1])
    assert together.errors == {}
    backwards = kit.sample(logits[::-1], many(kit, 64)[::-1])
    assert backwards.token_ids[::-1] == together.token_ids


@pytest.mark.parametrize("vocab", [5, 64, 1000, 49152])
def test_greedy_ties_go_to_the_lowest_id(vocab):
    kit = Kit(())
    logits = np.zeros((3, vocab), dtype=np.float32)
    logits[1, [vocab - 1, 2]] = 4
    logits[2, [vocab - 1, vocab - 2]] = 4
    rows = [kit.row([1], temperature=0.0, request_id=str(i)) for i in range(3)]
    assert kit.sample(logits, rows).token_ids == [0, 2, vocab - 2]


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    kit, logits = Kit(), random_logits(1)
    assert kit.sample(logits, [kit.row([1], temperature=temperature, top_k=5)]).token_ids == [logits[0].argmax()]


@pytest.mark.parametrize("temperature", [1.1e-5, 100.0])
def test_extreme_temperatures_stay_finite(temperature):
    kit, logits = Kit(), random_logits(1, scale=1e4)
    got = kit.sample(logits, [kit.row([1], temperature=temperature)])
    assert got.errors == {}
    assert got.token_ids == [logits[0].argmax()]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_end_that_request_only(bad):
    kit, logits = Kit(), random_logits(3)
    good = kit.sample(logits, many(kit, 3)).token_ids
    logits[1, 500] = bad
    got = kit.sample(logits, many(kit, 3))
    assert isinstance(got.errors.pop("r1"), WorkerError)
    assert got.errors == {}
    assert (got.token_ids[0], got.token_ids[2]) == (good[0], good[2])


def test_nothing_left_to_sample():
    kit, logits = Kit(), random_logits(2)
    rows = [kit.row([1], allowed_token_ids=[9], bad_words=[[9]], request_id="none"), kit.row([1], temperature=0.0)]
    got = kit.sample(logits, rows)
    assert isinstance(got.errors.pop("none"), RequestError)
    assert (got.errors, got.token_ids[1]) == ({}, logits[1].argmax())


@pytest.mark.parametrize("off", SAMPLING)
def test_each_plugin_off_is_truly_off(off):
    """Only its own rows change, and they become those of a request without its fields."""
    kit = Kit()
    claims = kit.host.info(off).claims
    less = Kit(tuple(n for n in SAMPLING if n != off))
    logits = random_logits(40, seed=3)
    logits[:, :8] += 7  # the rows' own tokens are likely
    on, without = kit.sample(logits, many(kit, 40)), less.sample(logits, many(less, 40))
    changed = 0
    for i, row in enumerate(many(kit, 40)):
        uses = bool(claims & row.request.fields.keys())
        same = (on.token_ids[i], on.logprobs[i]) == (without.token_ids[i], without.logprobs[i])
        assert uses or same
        changed += not same
    assert changed > 0 or off == "sampling.stops"


def test_load_order_does_not_matter():
    """Switched on one by one in any order: the same calls in the same order."""
    logits = random_logits(14)
    orders = []
    for names in (SAMPLING, SAMPLING[::-1], (*SAMPLING[2:], *SAMPLING[:2])):
        kit = Kit(())
        for name in names:
            kit.host.load([name])
        kit.features = SAMPLING
        orders.append([i.plugin for i in kit.host.table(frozenset(SAMPLING)).adjust_logits])
        assert kit.sample(logits, many(kit, 14)).token_ids == Kit().sample(logits, many(Kit(), 14)).token_ids
    assert orders == [["sampling.penalties", "sampling.bias", "sampling.stops"]] * 3
