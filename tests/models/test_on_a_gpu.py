"""What only a GPU can show (-m cuda): where weights are, what runs by default, transformers' models, the other kernels, the measuring."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokenbus.core.device import GPU_IS_OFF, free_bytes, resolve_device
from tokenbus.core.errors import ModelError
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.triton_decoder import TritonDecoder
from tokenbus.core.models.triton_linears import DenseLinear, InvariantLinear
from tokenbus.core.worker.attention import KVLayout
from tokenbus.core.worker.default_attention import default_attention
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.core.worker.triton_attention import TritonAttention
from tokenbus.kernels.torch_ops.limits import measure_limits

from .test_families import limit

pytestmark = pytest.mark.cuda


@pytest.fixture
def where() -> torch.device:
    return resolve_device("auto")


def error_of(model: Any, checkpoint: Any, paged: Any, prompt: list[int]) -> float:
    truth = checkpoint.truth(prompt)
    found = paged(model, backend=default_attention(model.kv_layout(4))).prefill("a", prompt, 17).cpu()
    return float((found - truth).abs().max()) / limit(truth)


def test_the_device_is_found(where):
    assert where.type == "cuda"
    assert where == resolve_device("cuda")
    assert 0 < free_bytes(where) <= torch.cuda.get_device_properties(where).total_memory
    assert resolve_device("cpu").type == "cpu"


@pytest.mark.parametrize(("invariance", "kind"), [("auto", DenseLinear), ("on", InvariantLinear)])
def test_a_model_by_default(invariance, kind, where, tiny, paged, tokens):
    checkpoint = tiny("llama")
    model: Any = load(resolve(str(checkpoint.path)), "auto", where, batch_invariant=invariance)
    assert isinstance(model, TritonDecoder)
    assert type(model.head) is kind
    assert {model.head.weight.device, model.norm.weight.device, model.embedding.weight.device} == {where}
    assert (model.spec.lossless_reason == GPU_IS_OFF) is (invariance == "auto")
    assert isinstance(default_attention(model.kv_layout(16)), TritonAttention)
    assert error_of(model, checkpoint, paged, tokens(60, seed=1)) <= 1
    if invariance == "on":
        assert model.numerics_probe() == (True, "")


@pytest.mark.parametrize("invariance", ["off", "on"])
def test_torchs_kernels(invariance, where, tiny, paged, tokens):
    checkpoint = tiny("qwen3")
    model: Any = load(resolve(str(checkpoint.path)), "auto", where, "torch", batch_invariant=invariance)
    assert type(model) is Decoder
    assert model.embedding.weight.data_ptr() == model.head.weight.data_ptr(), "a tied model's table is there twice"
    assert error_of(model, checkpoint, paged, tokens(60, seed=2)) <= 1
    assert isinstance(model.numerics_probe()[0], bool)


@pytest.mark.parametrize("invariance", ["off", "on"])
def test_a_model_through_transformers(invariance, where, tiny, paged, tokens):
    checkpoint = tiny("gpt2")
    try:
        model = load(resolve(str(checkpoint.path)), "auto", where, batch_invariant=invariance)
    except ModelError as error:
        if invariance == "off" or "a token's result depends on what else is in its batch" not in str(error):
            raise
        pytest.skip("torch's products of 32 rows are not invariant on this device")
    assert model.kv_layout(4).device == where
    assert error_of(model, checkpoint, paged, tokens(60, seed=3)) <= 1


def test_torchs_attention_says_whether_it_is_invariant(where):
    layout = KVLayout(1, (2,), (64,), 16, torch.float32, where)
    assert isinstance(TorchAttention(layout).invariant, bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_the_device_can_do_is_measured(dtype, where):
    before = torch.cuda.memory_reserved(where)
    found = measure_limits(dtype, where)
    assert found.read_bytes_per_second > 1e9
    assert found.flops_per_second > 1e9
    assert torch.cuda.memory_reserved(where) <= before
