from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from sampling_kit import SAMPLING, Kit, log_softmax, random_logits

from tokenbus.core.errors import FieldError
from tokenbus.plugins.sampling.logprobs import describe


@pytest.mark.parametrize("vocab", [7, 1000, 49152, 151936])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_values_against_float64(vocab, scale):
    row = random_logits(1, vocab, scale, vocab)[0]
    expected = log_softmax(row)
    order = np.lexsort((np.arange(vocab), -row))
    for token in (0, vocab - 1, int(order[0]), int(order[4])):
        entry = describe(row, token, 5)
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry.rank == 1 + int(np.flatnonzero(order == token)[0])
        assert entry.top_ids == order[:5].tolist()
        np.testing.assert_allclose(entry.top_logprobs, expected[order[:5]], atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_raw_whatever_sampling_does(temperature):
    """C18: temperature, filters and penalties don't move raw logprobs."""
    kit, logits = Kit(), random_logits(1)
    fields = {"top_p": 0.3, "logprobs": 5, "repetition_penalty": 1.5, "logit_bias": [[3, 20.0]]}
    got = kit.sample(logits, [kit.row([1, 2], temperature=temperature, **fields)])
    (entry,), (token,) = got.logprobs, got.token_ids
    assert entry is not None
    assert entry.token_id == token
    assert entry.logprob == pytest.approx(log_softmax(logits[0])[token], abs=1e-4)
    assert entry.top_ids == np.argsort(-logits[0])[:5].tolist()


def test_processed_mode():
    kit = Kit(plugins={"sampling.logprobs": {"mode": "processed"}})
    logits = random_logits(1)
    (entry,) = kit.sample(logits, [kit.row([1], temperature=0.5, top_k=3, logprobs=5)]).logprobs
    assert entry is not None
    best = np.argsort(-logits[0])[:3]
    assert entry.top_ids == best.tolist()  # banned alternatives are not listed
    np.testing.assert_allclose(entry.top_logprobs, log_softmax(logits[0][best] / 0.5), atol=1e-4)
    assert sum(np.exp(entry.top_logprobs)) == pytest.approx(1)
    assert json.loads(msgspec.json.encode(entry))["token_id"] == entry.token_id


def test_zero_gives_the_token_only():
    """C16: 0 is not off."""
    kit, logits = Kit(), random_logits(2)
    with_zero, without = kit.sample(logits, [kit.row([1], logprobs=0), kit.row([1], request_id="b")]).logprobs
    assert with_zero is not None
    assert (with_zero.top_ids, with_zero.top_logprobs) == ([], [])
    assert without is None


def test_ties_and_ranks():
    row = np.array([1, 2, 2, 0, 2], dtype=np.float32)
    assert [describe(row, t, 2).rank for t in range(5)] == [4, 1, 2, 5, 3]
    assert describe(row, 4, 2).top_ids == [1, 2]


def test_a_token_the_model_rules_out_stays_json():
    row = np.array([0, -np.inf, 1], dtype=np.float32)
    entry = describe(row, 1, 3)
    assert entry.logprob == -9999.0
    assert entry.top_ids == [2, 0]


def test_prompt_logits_only_for_prompt_logprobs():
    kit = Kit()
    assert kit.host.table(frozenset(SAMPLING), ["prompt_logprobs"]).first(
        "wants_prompt_logits", request=kit.row([1], prompt_logprobs=0).request
    )
    assert not kit.host.table(frozenset(SAMPLING), ["logprobs"]).first(
        "wants_prompt_logits", request=kit.row([1], logprobs=2).request
    )


@pytest.mark.parametrize("value", [-1, 21, True, 1.0, "1", None])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_bad_fields(name, value):
    with pytest.raises(FieldError) as caught:
        Kit().check("sampling.logprobs", {name: value})
    assert caught.value.param == name
