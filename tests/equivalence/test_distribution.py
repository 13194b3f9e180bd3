"""A whole engine's first tokens, over many seeds: as the model's own probabilities have them, and with drafts the same ones to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from equivalence_stand import Ask, Stand
from scipy import stats

from tokenbus.core import rng
from tokenbus.core.selftest.ways import Oracle

pytestmark = pytest.mark.parametrize("kernels", ["cpu", pytest.param("torch", marks=pytest.mark.long)], indirect=True)
PROMPT = [60, 61, 62, 63, 90, 91]
IDS = [97, 98, 99, 100]
TEMPERATURE = 3.0
"""The tiny model is sure of itself."""
SEEDS = 1500
FIELDS: dict[str, Any] = {"allowed_token_ids": IDS, "ignore_eos": True, "logprobs": 0}
OFF = ("prefix_cache", "chunked_prefill")


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    return [Ask(PROMPT, max_tokens=4, temperature=TEMPERATURE, seed=seed, fields=FIELDS) for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def chances(tiny_stand: Stand) -> np.ndarray:
    """[first, second]: of each two tokens, from the model's logprobs of prompts that end so."""
    pairs = [Ask([*PROMPT, a, b], max_tokens=1, fields={"prompt_logprobs": 0}) for a in IDS for b in IDS]
    found = [answer.prompt_logprobs[-2:] for answer in tiny_stand.run(pairs, off=OFF).answers]
    logprobs = np.array([[entry.logprob for entry in two] for two in found]).reshape(len(IDS), len(IDS), 2)
    first, second = logprobs[:, 0, 0], logprobs[:, :, 1]
    return _softmax(first)[:, None] * np.stack([_softmax(row) for row in second])


def _softmax(values: np.ndarray) -> np.ndarray:
    made = np.exp((values - values.max()) / TEMPERATURE)
    return made / made.sum()


def likely(answers: list[Any], chances: np.ndarray) -> float:
    seen = np.zeros_like(chances)
    for answer in answers:
        seen[IDS.index(answer.tokens[0]), IDS.index(answer.tokens[1])] += 1
    want = chances.ravel() * len(answers)
    enough = want >= 5
    assert enough.sum() > 6, "a test of few cells says little"
    seen, want = (np.append(x[enough], x[~enough].sum()) for x in (seen.ravel(), want))
    return float(stats.chisquare(seen[want > 0], want[want > 0]).pvalue)


def test_first_and_second_token_and_the_same_with_drafts(tiny_stand: Stand, asks: list[Ask], chances: np.ndarray):
    plain = tiny_stand.run(asks, off=OFF, blocks=200).answers
    assert likely(plain, chances) > 1e-4
    Oracle.learn(asks, plain)
    drafted = tiny_stand.run(asks, off=OFF, blocks=200, on=(Oracle.info.name,), plugins=(Oracle,))
    assert [answer.tokens for answer in drafted.answers] == [answer.tokens for answer in plain]
    accepted, rejected = (sum(getattr(answer, name) for answer in drafted.answers) for name in ("accepted", "rejected"))
    assert accepted > SEEDS / 4
    assert rejected > SEEDS / 20


def test_an_engine_that_draws_too_evenly_is_found(
    tiny_stand: Stand, asks: list[Ask], chances: np.ndarray, monkeypatch: pytest.MonkeyPatch
):
    sample = rng.sample
    monkeypatch.setattr(rng, "sample", lambda logits, *key: sample(logits * np.float32(0.6), *key))
    assert likely(tiny_stand.run(asks, off=OFF, blocks=200).answers, chances) < 1e-8
