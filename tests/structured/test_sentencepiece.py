"""Structured output with vocabularies of SentencePiece's kind: a small random model, whose answers fit because of the masks alone."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from pathlib import Path

import jsonschema
import pytest

from tokenbus import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "é the": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": -20, "maximum": 300},
        "日": {"enum": ["the the", "☃", True, None]},
    },
    "required": ["é the", "n", "日"],
    "additionalProperties": False,
}


def _kit():
    spec = importlib.util.spec_from_file_location(
        "tokenbus_sentencepiece", Path(__file__).parents[1] / "api" / "sentencepiece_kit.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KIT = _kit()


@pytest.fixture(scope="module", params=KIT.STYLES)
def llm(request, tmp_path_factory):
    import torch
    import transformers

    folder = tmp_path_factory.mktemp(request.param)
    config = transformers.LlamaConfig(
        vocab_size=KIT.SIZE + 5, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    KIT.sentencepiece(request.param).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    with LLM(str(folder), dtype="float32", num_blocks=400) as made:
        yield made


def texts(llm, seeds=8, **params):
    params = [SamplingParams(max_tokens=200, seed=seed, **params) for seed in range(seeds)]
    answers = [output.outputs[0] for output in llm.generate(["the"] * seeds, params, use_tqdm=False)]
    assert {answer.finish_reason for answer in answers} == {"stop"}
    return [answer.text for answer in answers]


def test_json_schema(llm):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    found = texts(llm, response_format=form)
    for text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(found)) > 4


@pytest.mark.parametrize(
    "form", [{"regex": "( the|☃|[ é]{3}){2,4}"}, {"grammar": 'root ::= ("☃" | " the" | [ é] [ é] [ é]){2,4}'}]
)
def test_spaces_and_bytes_of_characters(llm, form):
    found = texts(llm, structured_outputs=form)
    assert all(re.fullmatch("( the|☃|[ é]{3}){2,4}", text) for text in found)
    assert any(text.startswith(" ") for text in found), "a space at the beginning of an answer is the answer's"
    assert any("☃" in text for text in found)


def test_choices(llm):
    choices = [" the", "the", "☃☃", "  é"]
    found = texts(llm, seeds=16, structured_outputs={"choice": choices})
    assert set(found) <= set(choices)
    assert len(set(found)) > 2
