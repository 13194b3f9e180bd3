"""Bytes a model needs, without loading its weights: for `tokenbus plan-memory` and for the scheduler's KV pool.

Imports torch for the fallback's models only.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..device import check_dtype
from ..errors import ModelError
from .families import decoder_config
from .linears import Matrix
from .media_config import is_multimodal, text_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ..worker.attention import KVLayout
    from .config import DecoderConfig
    from .linears import Linears
    from .resolve import ResolvedModel

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PLAIN = {"F64", "F32", "F16", "BF16", "I64", "BOOL"}
"""What tensors of an encoder are stored as: weights, places, masks."""
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


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
    fixed_bytes: int = 0
    """Of side models, beside weights and K/V."""


@dataclass(frozen=True, slots=True)
class WeightsBytes:
    total: int
    """In memory."""
    step: int
    """That a step reads: all but the embedding, whose rows are looked up; the LM head once."""
    head: int
    """Of the LM head alone."""


def resolve_dtype(resolved: ResolvedModel, dtype: str, device: str = "cpu") -> str:
    """A key of ITEM_BYTES for the setting "auto" (or any of them): the checkpoint's own, GGUF bfloat16; on the CPU float16 becomes float32,
    and asked for by name it raises ConfigError. device: "cpu" or "cuda"."""
    check_dtype(dtype, device)
    if dtype != "auto":
        return dtype
    if resolved.gguf is not None:
        return "bfloat16"
    own = resolved.config.get("dtype") or resolved.config.get("torch_dtype") or "float32"
    return own if own == "bfloat16" or (own == "float16" and device != "cpu") else "float32"


def model_size(resolved: ResolvedModel, dtype: str, linears: Linears | None = None, device: str = "cpu") -> ModelSize:
    """What the model takes at a dtype setting, with the slot "quantization" held by `linears`; K/V as the model alone has it. Reads
    config.json and the heads of the safetensors files, no weights. device: "cpu" or "cuda"."""
    name = resolve_dtype(resolved, dtype, device)
    item = ITEM_BYTES[name]
    config = decoder_config(resolved.config, resolved.name)
    if config is not None:
        total = count_parameters(config).total * item if linears is None else weights_bytes(config, name, linears).total
        return ModelSize(name, total, config.kv_values_per_token * item, config.max_model_len)
    from .fallback import plain_shape

    shape = plain_shape(resolved)
    values = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    return ModelSize(name, header_parameters(resolved.path) * item, values * item, shape.max_model_len)


def layer_matrices(config: DecoderConfig, index: int) -> Iterator[Matrix]:
    """A layer's products: Q, K and V; output; and, in a dense one, gate and up; down."""
    h, name = config.hidden_size, f"model.layers.{index}"
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    fused, wide = config.fused_checkpoint, config.intermediate_size
    qkv = (f"{attention}.qkv_proj",) if fused else tuple(f"{attention}.{part}_proj" for part in "qkv")
    yield Matrix(qkv, config.qkv_size, h, config.qkv_bias)
    yield Matrix((f"{attention}.o_proj",), h, config.num_heads * config.head_dim, config.output_bias)
    if config.layers[index].moe is None:
        gate_up = (f"{mlp}.gate_up_proj",) if fused else (f"{mlp}.gate_proj", f"{mlp}.up_proj")
        yield Matrix(gate_up, 2 * wide, h, config.mlp_bias)
        yield Matrix((f"{mlp}.down_proj",), h, wide, config.mlp_bias)


def matrices(config: DecoderConfig) -> Iterator[Matrix]:
    """All products of the decoder, the LM head last. A mixture's experts are not among them."""
    for index in range(len(config.layers)):
        yield from layer_matrices(config, index)
    yield outer_matrix(config, EMBEDDING if config.tied else HEAD)


def outer_matrix(config: DecoderConfig, name: str) -> Matrix:
    """The LM head or the embedding."""
    return Matrix((name,), config.vocab_size, config.hidden_size)


def weights_bytes(config: DecoderConfig, dtype: str, linears: Linears) -> WeightsBytes:
    """With products made by `linears`; norms, and a mixture's experts and routers, are of the model's dtype."""
    item = ITEM_BYTES[dtype]
    embedding = outer_matrix(config, EMBEDDING)
    head = linears.nbytes(embedding if config.tied else outer_matrix(config, HEAD))
    products = [matrix for i in range(len(config.layers)) for matrix in layer_matrices(config, i)]
    count = count_parameters(config)
    others = count.total - sum(m.weights + m.rows * m.bias for m in products) - count.head * (1 if config.tied else 2)
    step = sum(map(linears.nbytes, products)) + others * item + head
    return WeightsBytes(step + linears.embedding_bytes(embedding, tied=config.tied), step, head)


def plain_layout(resolved: ResolvedModel, dtype: str, device: torch.device, block_size: int) -> KVLayout:
    """K/V as the model alone has it. Imports torch."""
    import torch

    from ..worker.attention import KVLayout

    config = decoder_config(resolved.config, resolved.name)
    if config is not None:
        layers, heads, dim = len(config.layers), config.num_kv_heads, config.head_dim
    else:
        from .fallback import plain_shape

        shape = plain_shape(resolved)
        layers, heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
    kind = getattr(torch, resolve_dtype(resolved, dtype, device.type))
    return KVLayout(layers, (heads,) * layers, (dim,) * layers, block_size, kind, device)


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


def tower_bytes(resolved: ResolvedModel, dtype: str) -> int:
    """Of what a multimodal checkpoint holds beside its text part; 0 for any other."""
    if resolved.gguf is not None or not is_multimodal(resolved.config):
        return 0
    return ITEM_BYTES[dtype] * sum(math.prod(head["shape"]) for head in tower_heads(resolved).values())


def tower_heads(resolved: ResolvedModel) -> dict[str, Any]:
    """As `read_header`, of the tensors that are not of a multimodal checkpoint's text part. ModelError when one of them is quantised: what
    reads such matrices is for the decoder alone."""
    heads = {name: head for path in weight_files(resolved.path) for name, head in read_header(path).items()}
    of_text = set(text_names(heads).values())
    found = {name: head for name, head in heads.items() if name not in of_text}
    if odd := sorted(name for name, head in found.items() if head["dtype"] not in PLAIN):
        raise ModelError(
            f"{resolved.name} can't read media: its tower is quantised ({odd[0]} is {found[odd[0]]['dtype']}), which is read of text parts "
            "only; take a checkpoint whose tower was left as it is, or switch multimodal off"
        )
    return found


def read_header(path: Path) -> dict[str, Any]:
    """A safetensors file's table of tensors: name -> {"dtype", "shape", "data_offsets"}."""
    with path.open("rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        if size > path.stat().st_size:
            raise ModelError(f"{path} is not a safetensors file")
        table = json.loads(handle.read(size))
    table.pop("__metadata__", None)
    return table
