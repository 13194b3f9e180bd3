"""Within one set of lossy plugins the determinism contract holds: the demo model with each of them, in bfloat16 as it is served."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from equivalence_stand import Answer, Ask, Stand

from tokenbus import LLM, SamplingParams
from tokenbus.core.errors import ConflictError, StartupError
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear
from tokenbus.kernels.cpu.quantized import QuantLinear


@pytest.fixture(scope="module", autouse=True)
def _kernels():  # not asked for when tests are collected: that must not build the library
    if lib.load() is None:
        pytest.skip(f"the plugins refuse every model: {lib.unavailable_reason()}")


INT8, GGUF, KV, FP8 = "quantization.int8", "quantization.gguf", "quantization.kv_int8", "quantization.kv_fp8"
OFF = ("chunked_prefill", "prefix_cache")
SETS = {"int8": (INT8,), "gguf": (GGUF,), "kv_int8": (KV,), "gguf and kv_int8": (GGUF, KV), "kv_fp8": (FP8,)}
PARAMETERS = 134_515_008
HEAD = 49152 * 576
DOWN = 30 * 576 * 1536
NORMS = 61 * 576
KV_VALUES = 30 * 2 * 3
"""Rows of 64 values that K and V of all layers hold for one token."""


@pytest.fixture(scope="module", params=list(SETS))
def stand(request: pytest.FixtureRequest) -> Any:
    return request.param, Stand("demo", "cpu", SETS[request.param], "bfloat16")


@pytest.fixture(scope="module")
def asks() -> list[Ask]:
    draw = random.Random(3)
    made = []
    for index in range(9):
        prompt = [draw.randrange(100, 40000) for _ in range(draw.choice((5, 16, 17, 33, 65, 90)))]
        sampling: dict[str, Any] = {"temperature": 0.8, "seed": index} if index % 2 else {}
        made.append(Ask(prompt=prompt, max_tokens=8, fields={"logprobs": 2}, **sampling))
    return made


def bits(answers: list[Answer]) -> list[Any]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


def test_alone_batched_and_chunked_are_one(stand: Any, asks: list[Ask]) -> None:
    name, runs = stand
    together = runs.run(asks, off=OFF)
    assert together.largest_batch == len(asks)
    for index in (0, 1, 5):
        assert bits(runs.run([asks[index]], off=OFF, threads=1 + index % 2).answers) == bits([together.answers[index]]), name
    chunked = runs.run(asks, off=("prefix_cache",), chunk=7)
    assert chunked.chunks > 2 * len(asks)
    assert bits(chunked.answers) == bits(together.answers)
    cached = runs.run([*asks, *(Ask(**{**vars(ask), "at_step": 40}) for ask in asks)])
    assert sum(answer.cached for answer in cached.answers) > 0
    assert bits(cached.answers) == bits(together.answers) * 2


def test_the_plugins_really_ran(stand: Any, asks: list[Ask]) -> None:
    name, runs = stand
    model = runs.runner._model
    assert isinstance(model, CpuDecoder)
    before = model._fused.steps
    outcome = runs.run(asks[:1], off=OFF)
    fused = 0 if name == "kv_fp8" else outcome.steps  # core's torch attention reads it, between layers in C++
    assert model._fused.steps == before + fused
    wanted = CpuLinear if name in {"kv_int8", "kv_fp8"} else QuantLinear
    assert {type(layer.attention.qkv) for layer in model.layers} == {wanted}
    cache = torch.float8_e4m3fn if name == "kv_fp8" else torch.int8 if "kv_int8" in name else torch.bfloat16
    assert runs.runner._kv.k[0].dtype == cache
    assert runs.runner._kv.k[0].shape[-1] == (68 if "kv" in name else 64)


def test_sizes_are_those_of_the_plugins(stand: Any) -> None:
    name, runs = stand
    assert runs.info.lossless, "the kernels are invariant: chunking and caching change nothing"
    assert runs.info.kv_bytes_per_token == KV_VALUES * (68 if "kv" in name else 128)
    spec = runs.runner._model.spec
    assert runs.info.weights_bytes == spec.weights_bytes
    if name == "int8":
        weights = PARAMETERS - NORMS - DOWN + 2 * DOWN + 2 * NORMS
        assert spec.step_bytes == pytest.approx(weights, rel=0.01)  # scales come on top
        assert spec.weights_bytes == spec.step_bytes + 2 * HEAD
        assert spec.head_bytes == HEAD + 4 * 49152
    elif "gguf" in name:
        assert spec.step_bytes == spec.weights_bytes == pytest.approx((PARAMETERS - HEAD) * 20 / 32 + HEAD * 34 / 32, rel=0.01)
        assert spec.head_bytes == HEAD * 34 // 32


def test_the_answers_are_not_those_of_the_model_itself(stand: Any, asks: list[Ask]) -> None:
    """Else nothing was quantised."""
    plain = Stand("demo", "cpu", (), "bfloat16").run(asks[:2], off=OFF)
    assert bits(stand[1].run(asks[:2], off=OFF).answers) != bits(plain.answers)


def test_an_engine_says_what_is_on_and_refuses_to_switch_it() -> None:
    with LLM("demo", max_model_len=256, num_blocks=16, enable=(GGUF, KV)) as llm:
        answer = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        assert answer.outputs[0].text.startswith(" Paris")
        assert {GGUF, KV} <= set(answer.features)
        for name, word in ((GGUF, "disable"), (KV, "disable"), (INT8, "enable")):
            with pytest.raises(
                ConflictError, match=rf"'{name}' is chosen at start \(scope engine\): restart with --{word} {name}"
            ):
                llm.switch(**{name: word == "enable"})
        again = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        assert again.outputs[0].token_ids == answer.outputs[0].token_ids


@pytest.mark.parametrize(
    ("enable", "kernels", "message"),
    [
        ((GGUF,), "torch", r"can't be run with quantization\.gguf: it needs the C\+\+ kernels, and model\.kernels is torch"),
        ((INT8, GGUF), "auto", "can't enable 'quantization.gguf': its slot 'quantization' is held by 'quantization.int8'"),
    ],
)
def test_an_engine_that_cannot_apply_them_does_not_start(enable: tuple[str, ...], kernels: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        LLM("demo", max_model_len=256, num_blocks=16, enable=enable, kernels=kernels)
