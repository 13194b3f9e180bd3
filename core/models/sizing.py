"""Bytes a model needs, without loading its weights: for `tokenbus plan-memory` and for the scheduler's KV pool.

Imports torch for the fallback's models only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .families import decoder_config

if TYPE_CHECKING:
    from .config import DecoderConfig
    from .resolve import ResolvedModel

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ParameterCount:
    total: int
    per_token: int
    """Multiplied with every token: matrices of all layers, experts counted as often as one token uses them, LM head excluded."""
    head: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    max_model_len: int


def resolve_dtype(resolved: ResolvedModel, dtype: str) -> str:
    """ "float32" or "bfloat16" for the setting "auto" (or either of them): the checkpoint's own, float16 becomes float32, GGUF bfloat16."""
    if dtype != "auto":
        return dtype
    if resolved.gguf is not None:
        return "bfloat16"
    own = resolved.config.get("dtype") or resolved.config.get("torch_dtype") or "float32"
    return "bfloat16" if own == "bfloat16" else "float32"


def model_size(resolved: ResolvedModel, dtype: str) -> ModelSize:
    """What the model takes at a dtype setting. Reads config.json and the heads of the safetensors files, no weights."""
    name = resolve_dtype(resolved, dtype)
    item = ITEM_BYTES[name]
    config = decoder_config(resolved.config, resolved.name)
    if config is not None:
        return ModelSize(name, count_parameters(config).total * item, config.kv_values_per_token * item, config.max_model_len)
    from .fallback import plain_shape

    shape = plain_shape(resolved)
    values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return ModelSize(name, header_parameters(resolved.path) * item, values * item, shape.max_model_len)


def count_parameters(config: DecoderConfig) -> ParameterCount:
    h, heads = config.hidden_size, config.num_heads * config.head_dim
    attention = h * config.qkv_size + heads * h
    norms = (4 if config.sandwich_norm else 2) * h + (2 * config.head_dim if config.qk_norm else 0)
    biases = config.qkv_size * config.qkv_bias + h * config.output_bias
    total = per_token = 0
    for layer in config.layers:
        if layer.moe is None:
            mlp = used = 3 * h * config.intermediate_size
            extra = (2 * config.intermediate_size + h) * config.mlp_bias
        else:
            expert, router = 3 * h * layer.moe.intermediate_size, h * layer.moe.num_experts
            mlp, used, extra = expert * layer.moe.num_experts + router, expert * layer.moe.top_k + router, 0
        per_token += attention + used
        total += attention + mlp + norms + biases + extra
    head = config.vocab_size * h
    return ParameterCount(total + h + head * (1 if config.tied else 2), per_token, head)


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files, in the index's order. ModelError when there are none."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    missing = [n for n in names if not (folder / n).is_file()]
    if missing:
        raise ModelError(f"{folder} has no {missing[0]}: only safetensors checkpoints are read")
    return [folder / n for n in names]


def header_parameters(folder: Path) -> int:
    """Numbers in all tensors, from the files' heads."""
    return sum(math.prod(t["shape"]) for path in weight_files(folder) for t in read_header(path).values())


def read_header(path: Path) -> dict[str, Any]:
    """A safetensors file's table of tensors: name -> {"dtype", "shape", "data_offsets"}."""
    with path.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        if size > path.stat().st_size:
            raise ModelError(f"{path} is not a safetensors file")
        table = json.loads(handle.read(size))
    table.pop("__metadata__", None)
    return table
