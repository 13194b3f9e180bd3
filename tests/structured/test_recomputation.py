"""Row C29 of the case book: what looks at past tokens sees each of them once and in order, whatever is computed again."""

from __future__ import annotations

import re

import pytest

from tokenbus import LLM, SamplingParams
from tokenbus.core.front.events import RequestRecord

WANTED = [
    {"frequency_penalty": 1.0, "seed": 1},
    {"structured_outputs": {"regex": "([a-z]{2,6} ){12,20}"}, "frequency_penalty": 1.0, "seed": 2, "logprobs": 1},
    {"extra": {"counting": True}, "seed": 3},
    {
        "extra": {"counting": True},
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.2,
        "structured_outputs": {"regex": "[0-9 ]{60}"},
        "seed": 4,
    },
    {"temperature": 0.0, "frequency_penalty": 1.0, "extra": {"counting": True}},
]
pytestmark = pytest.mark.slow
PROMPT = "The capital of France is Paris, and the capital of Spain is"


def answers(wanted: list[dict], **settings) -> tuple[list[tuple], list[RequestRecord]]:
    with LLM("demo", max_model_len=128, load=("counting_plugin:Counting",), enable=("counting",), **settings) as llm:
        records: list[RequestRecord] = []
        llm._portal.call(lambda: llm._service.bus.listen(records.append, RequestRecord))
        params = [SamplingParams(**{"temperature": 0.9, "max_tokens": 40, "ignore_eos": True, **one}) for one in wanted]
        outputs = [output.outputs[0] for output in llm.generate([PROMPT] * len(wanted), params, use_tqdm=False)]
        (plain,) = llm.generate(["1, 2, 3, 4,"], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert plain.outputs[0].text == " 5,"
    return [(output.token_ids, output.text, output.logprobs) for output in outputs], records[: len(wanted)]


@pytest.fixture(scope="module")
def roomy():
    found, records = answers(WANTED, num_blocks=128, block_size=8)
    assert sum(record.preemptions for record in records) == 0
    return found


def test_c29_the_answers_do_depend_on_the_state(roomy):
    assert len({tuple(tokens) for tokens, _, _ in roomy}) == len(WANTED)
    assert re.match("([a-z]{2,6} )+", roomy[1][1])
    assert re.fullmatch("[0-9 ]{20,60}", roomy[3][1])
    without = [{name: value for name, value in one.items() if name != "extra"} for one in WANTED]
    assert [a[0] == b[0] for a, b in zip(answers(without, num_blocks=128, block_size=8)[0], roomy, strict=True)] == [
        "extra" not in one for one in WANTED
    ]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"plugins": {"chunked_prefill": {"mode": "fixed", "chunk_size": 4}}}, marks=pytest.mark.long),
        pytest.param({"disable": ("prefix_cache",)}, marks=pytest.mark.long),
    ],
)
def test_c29_recomputed_in_a_small_pool_the_answers_are_those_of_a_large_one(roomy, more):
    found, records = answers(WANTED, num_blocks=16, block_size=8, **more)
    assert sum(record.preemptions for record in records) > 0
    assert found == roomy
