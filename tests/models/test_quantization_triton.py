"""The plugins of the slot "quantization" on kernels/triton: in the interpreter, on CPU tensors, as they would run on a GPU."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))

from test_gguf import write_gguf
from test_quantization import GGUF, INT8, dequantised, error, pack_as

from tokenbus.core.config import Config
from tokenbus.core.errors import ModelError
from tokenbus.core.host import make_host
from tokenbus.core.models import gguf_file
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.loader import describe, load
from tokenbus.core.models.resolve import ResolvedModel, read_json
from tokenbus.core.models.sizing import model_size
from tokenbus.core.models.slot import choose_linears
from tokenbus.plugins.quantization.triton_products import Int4Product, Joined, PlainProduct, QuantizedProduct


def choose(name: str, **settings: Any) -> Callable[[Any], Any]:
    host = make_host("worker", Config(plugins=settings))
    on = host.start_switches([name]).on
    host.load(on)
    return lambda model: choose_linears(host, on, dataclasses.replace(model, triton=True))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "phi3"])
def test_int8_is_close_to_the_model(kind: str, tiny: Any, paged: Any, tokens: Any) -> None:
    source, prompt = tiny(kind), tokens(9, seed=8)
    resolved = ResolvedModel(source.path, kind, read_json(source.path / "config.json"))
    model = load(resolved, "float32", choose=choose(INT8))
    assert type(model) is Decoder
    found = paged(model).prefill("a", prompt, 9)
    assert error(found, source.truth(prompt)) < 0.2  # as on the C++ kernels
    assert torch.equal(paged(model).prefill("a", prompt, 4), found)
    assert {type(layer.attention.qkv) for layer in model.layers} == {type(model.head)} == {QuantizedProduct}
    assert {type(layer.mlp.down) for layer in model.layers} == {PlainProduct}  # pyright: ignore[reportAttributeAccessIssue]
    assert (
        model_size(resolved, "float32", choose(INT8)(describe(resolved, "float32"))).weights_bytes == model.spec.weights_bytes
    )


def test_int8_is_the_cpu_kernels_int8(tiny: Any, paged: Any, tokens: Any) -> None:
    """The same scheme: both round the same weights and activations, to the same integers but for the last bits of a rotation."""
    from tokenbus.kernels.cpu import lib

    if lib.load() is None:
        pytest.skip(f"there are no C++ kernels: {lib.unavailable_reason()}")
    source, prompt = tiny("llama"), tokens(9, seed=8)
    resolved = ResolvedModel(source.path, "m", read_json(source.path / "config.json"))
    host = make_host("worker", Config())
    on = host.start_switches([INT8]).on
    host.load(on)
    on_cpu = paged(load(resolved, "float32", choose=lambda model: choose_linears(host, on, model))).prefill("a", prompt, 9)
    on_triton = paged(load(resolved, "float32", choose=choose(INT8))).prefill("a", prompt, 9)
    assert error(on_triton, on_cpu) < 0.25 * error(on_cpu, source.truth(prompt))


def test_matrices_that_int8_keeps_are_named(tiny: Any) -> None:
    source = tiny("qwen3")
    resolved = ResolvedModel(source.path, "m", read_json(source.path / "config.json"))
    keep = {INT8: {"keep": ["layers.1.self_attn.o_proj", "q_proj", "embed_tokens"]}}
    model = load(resolved, choose=choose(INT8, **keep))
    assert type(model) is Decoder
    assert [type(layer.attention.out) for layer in model.layers] == [QuantizedProduct, PlainProduct, QuantizedProduct]
    assert type(model.head) is PlainProduct
    qkv = model.layers[0].attention.qkv
    assert isinstance(qkv, Joined)
    assert [type(part) for part in qkv.parts] == [PlainProduct, QuantizedProduct]
    with pytest.raises(ModelError, match="its setting `keep` names 'lm_head', and no matrix of the model ends so"):
        load(resolved, choose=choose(INT8, **{INT8: {"keep": ["lm_head"]}}))


@pytest.fixture(scope="module")
def packed_file(tmp_path_factory: pytest.TempPathFactory, remake: Any) -> Any:
    """packed_file(pack): a tiny Llama as a resolved GGUF file."""
    wide = {"vocab_size": 256, "head_dim": 16, "tie_word_embeddings": True}
    source = remake("llama-linear", tmp_path_factory.mktemp("llama"), std=0.06, **wide)

    def get(pack: Any) -> ResolvedModel:
        file = tmp_path_factory.mktemp("gguf") / "model.gguf"
        write_gguf(file, "llama", read_json(source.path / "config.json"), load_file(source.path / "model.safetensors"), pack)
        return ResolvedModel(file.parent, "m", gguf_file.read_config(gguf_file._open(file), "m"), file)

    return get


def test_q4_0_stays_packed_exactly(packed_file: Any, paged: Any, tokens: Any) -> None:
    resolved, prompt = packed_file(pack_as("Q4_0")), tokens(9, seed=8)
    model = load(resolved, "float32", choose=choose(GGUF))
    assert type(model) is Decoder
    truth = paged(dequantised(resolved)).prefill("a", prompt, 9)
    found = paged(model).prefill("a", prompt, 9)
    assert error(found, truth) < 2e-5  # sums of float32 in another order
    assert torch.equal(found.argmax(-1), truth.argmax(-1))
    assert {type(layer.attention.qkv) for layer in model.layers} == {type(model.head)} == {Int4Product}
    size = model_size(resolved, "float32", choose(GGUF)(describe(resolved, "float32")))
    assert size.weights_bytes == model.spec.weights_bytes
    head: Any = model.head
    assert model.spec.head_bytes == head.nbytes


def test_other_formats_are_dequantised_beside_it(packed_file: Any, paged: Any, tokens: Any) -> None:
    def mixed(name: str, value: np.ndarray) -> Any:
        return pack_as("Q8_0" if "attn_v" in name or "token_embd" in name else "Q4_0")(name, value)

    resolved, prompt = packed_file(mixed), tokens(9, seed=8)
    model = load(resolved, "float32", choose=choose(GGUF))
    assert type(model) is Decoder
    assert error(paged(model).prefill("a", prompt, 9), paged(dequantised(resolved)).prefill("a", prompt, 9)) < 2e-5
    qkv = model.layers[0].attention.qkv
    assert isinstance(qkv, Joined)
    assert [type(part) for part in qkv.parts] == [Int4Product, PlainProduct]
    assert type(model.head) is PlainProduct
    assert model.embedding.weight is model.head.weight, "a tied model holds it once"  # pyright: ignore[reportFunctionMemberAccess]


def test_a_file_of_which_nothing_can_stay_packed_is_refused(packed_file: Any) -> None:
    def no_q4_0(name: str, value: np.ndarray) -> Any:
        number = gguf.GGMLQuantizationType.Q4_1
        return gguf.quantize(value, number), number

    with pytest.raises(ModelError, match=r"of its formats \(Q4_1\) none can stay packed on a GPU, only Q4_0 can; without"):
        load(packed_file(no_q4_0), choose=choose(GGUF))
