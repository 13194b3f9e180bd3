"""Shapes of Llama models, and folders that hold one: with weights, or with a config alone (see synthetic.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, *, tied: bool, head_dim: int | None = None
) -> dict[str, Any]:  # fmt: skip
    """A config.json."""
    return COMMON | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": tied,
    }


SHAPES = {
    "tiny": llama(64, 2, 4, 2, 96, 256, tied=True),
    "135M": llama(576, 30, 9, 3, 1536, 49152, tied=True),
    "1B": llama(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8B": llama(4096, 32, 32, 8, 14336, 128256, tied=False),
}


def products(config: dict[str, Any]) -> list[tuple[int, int]]:
    """(outputs, inputs) of a layer's four matrices, as the decoder fuses them: Q, K and V; output; gate and up; down."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of every tensor of a Llama checkpoint, by its name."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def write_config(folder: Path, shape: str, dtype: str) -> Path:
    """A folder with config.json, and a checkpoint without any tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape] | {"dtype": dtype}), encoding="utf-8")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def write_peaked(folder: Path, shape: str, device: str, seed: int = 5) -> Path:
    """A float32 checkpoint on disk whose attention and next tokens are peaked, so that every mistake shows in the ids: normal weights
    with a spread of 2.4 / sqrt(inputs), norms about 1. Matrices are drawn on `device`."""
    import torch
    from safetensors.torch import save_file

    write_config(folder, shape, "float32")
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, size in tensor_shapes(SHAPES[shape]).items():
        noise = torch.randn(size, generator=generator, device=device)
        tensors[name] = (1 + 0.3 * noise if len(size) == 1 else noise * (2.4 * size[1] ** -0.5)).cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
