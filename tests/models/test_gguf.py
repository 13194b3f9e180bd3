"""GGUF files: metadata and tensors come back as the Hugging Face checkpoint they were made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tokenbus.core.errors import ModelError
from tokenbus.core.models import gguf_file
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.families import decoder_config
from tokenbus.core.models.resolve import read_json

ARCH = {
    "llama-linear": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "gemma2": "gemma2",
    "phi3": "phi3",
}


class InMemory:
    """Tensors from a dict."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.get = tensors.__getitem__


def write_gguf(path: Path, arch: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], pack: Any = None) -> None:
    """What llama.cpp's converter writes: Q and K rows of llama as (pair, half), gemma norms plus 1, experts stacked.

    pack: (name, array) -> (array as it is stored, its GGUF type or None), of tensors of two dimensions."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_key_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(9)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "qwen3moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for name, value in gguf_tensors(arch, config, tensors).items():
        if pack is None or value.ndim != 2:
            writer.add_tensor(name, value)
        else:
            stored, kind = pack(name, value)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(arch: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    from gguf.tensor_mapping import get_tensor_name_map

    number = {n: i for i, n in gguf.MODEL_ARCH_NAMES.items()}[arch]
    table = get_tensor_name_map(number, config["num_hidden_layers"])
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        value = tensor.numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if arch == "gemma2" and "norm" in name:
            value = value + 1
        if ".experts." in name:
            head, tail = name.split(".experts.")
            stacks.setdefault(f"{head}.experts.{tail.split('.', 1)[1]}", []).append(value)
            continue
        out[table.get_name(name, try_suffixes=(".weight", ".bias"))] = value  # pyright: ignore[reportArgumentType]
    for name, values in stacks.items():
        out[table.get_name(name, try_suffixes=(".weight",))] = np.stack(values)  # pyright: ignore[reportArgumentType]
    return out


@pytest.mark.parametrize("name", ARCH)
def test_a_gguf_file_is_the_model_it_was_made_from(
    name: str, tiny: Any, paged: Any, tokens: Any, tmp_path: Path, remake: Any
) -> None:
    arch = ARCH[name]
    checkpoint = remake(name, tmp_path, norm_topk_prob=True, mlp_only_layers=[]) if arch == "qwen3moe" else tiny(name)
    if arch in {"qwen2", "gemma2", "phi3"}:  # what the format can't say: which layers have windows, other scales
        changes = {"qwen2": {"use_sliding_window": False}, "gemma2": {"query_pre_attn_scalar": 24}, "phi3": {}}[arch]
        checkpoint = remake(name, tmp_path, **changes)
    original = load_file(checkpoint.path / "model.safetensors")
    file = tmp_path / "model.gguf"
    write_gguf(file, arch, read_json(checkpoint.path / "config.json"), original)
    reader = gguf_file._open(file)
    read = dict(gguf_file.read_tensors(reader, "model.gguf"))
    assert read.keys() == original.keys()
    for key, value in read.items():
        assert torch.allclose(value, original[key], atol=1e-6), key
    config = decoder_config(gguf_file.read_config(reader, "model.gguf"), "model.gguf")
    assert config is not None
    assert config.eos_token_ids == (5, 9)
    model = Decoder(config, InMemory(read), torch.float32, torch.device("cpu"))
    prompt = tokens(40, seed=8)
    assert torch.allclose(paged(model).prefill("a", prompt, 40), checkpoint.truth(prompt), atol=2e-4)


def test_llama3_frequencies_of_a_gguf_file_are_read(tmp_path: Path, tiny: Any) -> None:
    checkpoint = tiny("llama-linear")
    config = read_json(checkpoint.path / "config.json") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tensors = load_file(checkpoint.path / "model.safetensors")
    file = tmp_path / "model.gguf"
    factors = np.array([1, 1, 2, 4, 8, 8, 8, 8], dtype=np.float32)
    real = gguf_tensors

    def with_factors(*args: Any) -> dict[str, np.ndarray]:
        return {**real(*args), "rope_freqs.weight": factors}

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "gguf_tensors", with_factors)
        write_gguf(file, "llama", config, tensors)
    found = decoder_config(gguf_file.read_config(gguf_file._open(file), "m"), "m")
    assert found is not None
    assert found.layers[0].rope is not None
    assert found.layers[0].rope.freq_factors == tuple(factors)
    from tokenbus.core.models.rope import inverse_frequencies

    plain = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)
    assert torch.allclose(inverse_frequencies(found.layers[0].rope), plain / torch.from_numpy(factors))


def test_an_architecture_we_do_not_run_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"m\.gguf can't be run: GGUF architecture 'mamba'"):
        gguf_file.read_config(gguf_file._open(tmp_path / "m.gguf"), "m.gguf")


def test_the_cache_key_follows_the_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    keys = set()
    for content in (b"a" * 10, b"b" * 10, b"b" * 11):
        file.write_bytes(content)
        os.utime(file, (1, 1))
        keys.add(gguf_file._folder(file))
    os.utime(file, (1, 2))
    keys.add(gguf_file._folder(file))
    assert len(keys) == 4
