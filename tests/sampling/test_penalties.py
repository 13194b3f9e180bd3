from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_kit import VOCAB, Kit, random_logits

from tokenbus.core.errors import FieldError
from tokenbus.core.worker.state import SampleRow
from tokenbus.plugins.sampling.penalties import STATE


def reference(row: np.ndarray, prompt: list[int], output: list[int], rep: float, pres: float, freq: float) -> np.ndarray:
    values = row.astype(np.float64)
    for token in set(prompt + output):
        values[token] = values[token] / rep if values[token] > 0 else values[token] * rep
    for token in set(output):
        values[token] -= pres + freq * output.count(token)
    return values


@pytest.mark.parametrize(("rep", "pres", "freq"), [(1.3, 0, 0), (0.7, 0, 0), (1, 0.5, 0), (1, 0, 1.5), (1.1, -2, 2), (5, 1, 1)])
def test_values(rep, pres, freq):
    kit, row = Kit(), random_logits(1)[0]
    prompt, output = [3, 3, 8, 500], [8, 9, 9, 9, 999]
    fields = {"repetition_penalty": rep, "presence_penalty": pres, "frequency_penalty": freq}
    got = kit.adjust(row, kit.row(prompt + output, len(prompt), **fields))
    np.testing.assert_allclose(got, reference(row, prompt, output, rep, pres, freq), rtol=1e-6, atol=1e-6)
    untouched = np.setdiff1d(np.arange(VOCAB), prompt + output)
    assert np.array_equal(got[untouched], row[untouched])


def test_state_grows_by_one_and_survives_a_rebuild():
    kit, logits = Kit(), random_logits(1)[0]
    fields = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    request = kit.row([1, 2, 3], **fields).request
    for token in (5, 5, 1, 7, 5, 999, 2):
        request.tokens.append(token)
        row = SampleRow(request, len(request.tokens))
        grown, rebuilt = kit.adjust(logits, row), kit.adjust(logits, kit.row(request.tokens, 3, **fields))
        assert np.array_equal(grown, rebuilt)
        assert request.stash[STATE].length == len(request.tokens)
    early = kit.adjust(logits, SampleRow(request, 5))  # a row before tokens that were already counted
    assert np.array_equal(early, kit.adjust(logits, kit.row(request.tokens[:5], 3, **fields)))
    assert request.stash[STATE].length == 10


def test_prompt_counts_for_repetition_only():
    kit, row = Kit(), random_logits(1)[0]
    got = kit.adjust(row, kit.row([4, 4, 4], frequency_penalty=2.0, presence_penalty=2.0))
    assert np.array_equal(got, row)


def test_neutral_requests_are_not_touched():
    kit = Kit()
    assert kit.row([1, 2], top_k=3).request.hooks.adjust_logits == ()
    assert kit.check("sampling.penalties", {"repetition_penalty": 1, "presence_penalty": 0.0, "frequency_penalty": 0}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf), ("repetition_penalty", True),
     ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", "1"), ("frequency_penalty", math.nan)],
)  # fmt: skip
def test_bad_fields(name, value):
    with pytest.raises(FieldError) as caught:
        Kit().check("sampling.penalties", {name: value})
    assert caught.value.param == name


def test_limits_are_inclusive():
    fields = {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 100}
    assert Kit().check("sampling.penalties", fields) == {k: float(v) for k, v in fields.items()}


@pytest.mark.parametrize("value", [0, 1e-40, 0.0099, 101, float("nan"), float("inf"), 10**4000])
def test_repetition_penalties_that_would_leave_float32(value):
    with pytest.raises(FieldError, match=r"between 0\.01 and 100") as found:
        Kit().check("sampling.penalties", {"repetition_penalty": value})
    assert len(found.value.message) < 300


def test_an_overflow_is_not_blamed_on_masks():
    kit = Kit()
    row = kit.row([1, 2], repetition_penalty=1e-40)  # admission would refuse it
    with np.errstate(over="ignore"):
        outcome = kit.sample(np.full((1, VOCAB), 3.0, np.float32), [row])
    (error,) = outcome.errors.values()
    assert "penalties and biases made a logit that is inf" in error.message
    assert "masks" not in error.message
