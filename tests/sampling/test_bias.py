from __future__ import annotations

import math

import numpy as np
import pytest
from sampling_kit import VOCAB, Kit, random_logits

from tokenbus.core.config import LimitsConfig
from tokenbus.core.errors import FieldError


def checked(**fields):
    return Kit().check("sampling.bias", fields)


def test_logit_bias():
    kit, row = Kit(), random_logits(1)[0]
    fields = kit.check("sampling.bias", {"logit_bias": {"7": 2.5, 3: -100, "999": 100}})
    assert fields == {"logit_bias": [[3, -100.0], [7, 2.5], [999, 100.0]]}
    expected = row.copy()
    expected[[3, 7, 999]] += np.array([-100, 2.5, 100], dtype=np.float32)
    assert np.array_equal(kit.adjust(row, kit.row([1], **fields)), expected)


def test_plus_100_yields_that_id_each_step():
    """C04."""
    kit, logits = Kit(), random_logits(8)
    fields = kit.check("sampling.bias", {"logit_bias": {str(VOCAB - 1): 100}})
    rows = [kit.row([1] * (i + 1), temperature=0.0, request_id=str(i), **fields) for i in range(8)]
    assert kit.sample(logits, rows).token_ids == [VOCAB - 1] * 8


@pytest.mark.parametrize(
    "value",
    [{"1000": 5}, {"-1": 5}, {"abc": 1}, {"5": 1e9}, {"5": None}, {"5": "1"}, {"5": True}, {"5": math.nan}, {" 5": 1}, {"05": 1},
     {"5.0": 1}, {"+5": 1}, {"٣": 1}, {"5": 1, 5: 1}, {"9" * 5000: 1}, {1.5: 1}, [5], "5", {"": 1}, {"-": 1}, {"5": 100.5}],
)  # fmt: skip
def test_bad_logit_bias(value):
    with pytest.raises(FieldError) as caught:
        checked(logit_bias=value)
    assert caught.value.param == "logit_bias"


def test_allowed_token_ids():
    kit, row = Kit(), random_logits(1)[0]
    fields = kit.check("sampling.bias", {"allowed_token_ids": [9, 4, 9]})
    assert fields == {"allowed_token_ids": [4, 9]}
    got = kit.adjust(row, kit.row([1], **fields))
    assert np.flatnonzero(got > -np.inf).tolist() == [4, 9]
    assert np.array_equal(got[[4, 9]], row[[4, 9]])


def test_bad_words():
    """ "A" is id 65 alone and (32, 65) with a space; "BC" is (66, 67) and (32, 66, 67)."""
    kit, row = Kit(), random_logits(1)[0]
    fields = kit.check("sampling.bias", {"bad_words": ["A", "BC"]})
    assert fields == {"bad_words": [[65], [32, 65], [66, 67], [32, 66, 67]]}

    def banned(tokens, num_prompt):
        return np.flatnonzero(np.isinf(kit.adjust(row, kit.row(tokens, num_prompt, **fields)))).tolist()

    assert banned([1, 2], 2) == [65]
    assert banned([1, 2, 66], 2) == [65, 67]
    assert banned([1, 2, 66], 3) == [65]  # the prompt's tokens begin no word
    assert banned([1, 66, 2], 1) == [65]
    assert banned([1, 32, 66], 1) == [65, 67]


@pytest.mark.parametrize(
    "fields",
    [{"bad_words": [""]}, {"bad_words": "A"}, {"bad_words": [5]}, {"bad_words": ["x" * 257]}, {"bad_words": ["x"] * 129},
     {"allowed_token_ids": [1000]}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": [True]}, {"allowed_token_ids": ["1"]},
     {"allowed_token_ids": 5}, {"allowed_token_ids": [1] * 8193}, {"allowed_token_ids": [65], "bad_words": ["A"]}],
)  # fmt: skip
def test_bad_fields(fields):
    with pytest.raises(FieldError) as caught:
        checked(**fields)
    assert caught.value.param == next(iter(fields))


def test_banning_the_whole_vocabulary():
    with pytest.raises(FieldError, match="every token is banned"):
        Kit().check("sampling.bias", {"bad_words": ["\0", "\1"]}, vocab_size=2, tokenize=lambda text: [ord(text.strip(" "))])


def test_limit_on_entries():
    limits = LimitsConfig(max_logit_bias=3)
    entries = {str(i): 1 for i in range(4)}
    with pytest.raises(FieldError, match="the limit is 3"):
        Kit().check("sampling.bias", {"logit_bias": entries}, limits=limits)
    entries.popitem()
    assert len(Kit().check("sampling.bias", {"logit_bias": entries}, limits=limits)["logit_bias"]) == 3


def test_bad_words_are_bounded_together():
    limits = LimitsConfig(max_bad_words_chars=10)
    with pytest.raises(FieldError, match="11 characters in all; at most 10"):
        Kit().check("sampling.bias", {"bad_words": ["abcdef", "ghijk"]}, limits=limits)
    assert Kit().check("sampling.bias", {"bad_words": ["abcde", "ghijk"]}, limits=limits)["bad_words"]
