"""Whole steps of the runner with the model on Triton kernels: chunks, drafts, a preemption and batch mates change nothing."""

from __future__ import annotations

from typing import Any

import pytest
from worker_fakes import BLOCK, Driver, Spec, config

from tokenbus.core.host import make_host
from tokenbus.core.models.triton_decoder import TritonDecoder
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.triton_attention import TritonAttention

FEATURES = ("attention.triton", "sampling.logprobs", "sampling.truncation")
PROMPTS = [[5, 9, 33, 2, 17, 40, 41, 8, 8, 60, 1], [7, 20], [100, 3, 3, 50, 12]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


def runner(model: str, where: str, kernels: str, *features: str, **plugins: Any) -> ModelRunner:
    settings = config(
        model={"model": model, "dtype": "float32", "device": where, "kernels": kernels, "batch_invariant": "on", "threads": 1},
        plugins=plugins,
    )
    made = ModelRunner(settings, features, make_host("worker", settings))
    info = made.load()
    assert (info.lossless, info.lossless_reason) == (True, "")
    made.allocate(64)
    return made


def test_whole_steps(tiny_model, device):
    made = runner(tiny_model, device.type, "triton", *FEATURES)
    assert isinstance(made._loaded()[0], TritonDecoder)
    assert isinstance(made.plugins.attention(made._loaded()[1]).inner, TritonAttention)
    rich = {"temperature": 0.8, "seed": 7, "top_k": 20, "logprobs": 2}
    plain = [Spec("greedy", PROMPTS[0], 4, features=FEATURES), Spec("seeded", PROMPTS[1], 4, features=FEATURES, **rich)]
    for spec in plain:
        Driver([spec]).run(made)
    mixed = [
        Spec("g", PROMPTS[0], 4, chunk=BLOCK, features=FEATURES, draft=lambda tokens: [tokens[-1], 3]),
        Spec("s", PROMPTS[1], 4, preempt_at=2, features=FEATURES, **rich),
        Spec("mate", PROMPTS[2], 2, features=FEATURES),
    ]
    Driver(mixed).run(made)
    assert [spec.output for spec in mixed[:2]] == [spec.output for spec in plain]
    assert mixed[1].logprobs == plain[1].logprobs
    on_torch = runner(tiny_model, "cpu", "torch", *FEATURES[1:])
    other = Spec("torch", PROMPTS[0], 4, features=FEATURES[1:])
    Driver([other]).run(on_torch)
    assert other.output == plain[0].output


def test_without_a_plugin_core_chooses_attention_by_the_device(tiny_model, device):
    made = runner(tiny_model, device.type, "triton")
    assert made.plugins.attention(made._loaded()[1]).name == ("triton" if device.type == "cuda" else "torch")
    spec = Spec("r", PROMPTS[2], 2, features=())
    Driver([spec]).run(made)
    assert len(spec.output) == 2


def test_a_draft_model_runs_where_the_model_runs(tiny_model, device):
    """On the same kernels: the model drafts for itself, so every draft is right."""
    name = "speculative.draft_model"
    made = runner(
        tiny_model, device.type, "triton", name, "attention.triton", **{name: {"model": tiny_model, "adaptive": False}}
    )
    paged: Any = made.plugins.sides[0]._model
    assert isinstance(paged.model, TritonDecoder)
    assert paged.layout.device.type == device.type
    assert isinstance(paged._attention.inner, TritonAttention)
    spec = Spec("r", PROMPTS[1], 4, features=(name,))
    driver = Driver([spec])
    spec.draft = lambda _: driver.results[-1].drafts["r"].tokens[:2]
    driver.run(made)
    assert len(driver.results) == 2  # the prompt; two drafts and one more
    plain = Spec("plain", PROMPTS[1], len(spec.output), features=())
    Driver([plain]).run(made)
    assert plain.output == spec.output
