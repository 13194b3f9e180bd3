from __future__ import annotations

import pytest

from tokenbus import SamplingParams
from tokenbus.core.errors import FieldError
from tokenbus.core.params import asks_for_nothing


@pytest.mark.parametrize(
    ("field", "value", "nothing"),
    [
        ("top_p", None, True),
        ("top_p", 1, True),
        ("top_p", 1.0, True),
        ("top_p", True, False),
        ("top_p", 0.9, False),
        ("stop", [], True),
        ("stop", "", False),
        ("logit_bias", {}, True),
        ("response_format", {"type": "text"}, True),
        ("response_format", {"type": "json_object"}, False),
        ("tool_choice", "none", True),
        ("logprobs", 0, False),
        ("anything", None, True),
        ("anything", 0, False),
    ],
)
def test_neutral_values(field, value, nothing):
    assert asks_for_nothing(field, value) is nothing


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": 1e9}, {"max_tokens": -1}, {"n": 0}])
def test_core_ranges(bad):
    with pytest.raises(FieldError) as caught:
        SamplingParams(**bad)
    assert caught.value.param in bad


def test_unknown_names_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(temperatur=0.5)
