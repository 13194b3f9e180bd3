"""Writes tiny checkpoints in the formats that `quantization.checkpoint` reads, from their published descriptions, number by number; and
what their weights stand for, by the plain formula in float64."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

E4M3 = torch.float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's: the output that bits 4i of a word belong to."""
Packed = tuple[dict[str, torch.Tensor], np.ndarray]
"""A module's tensors by the ends of their names, and the weight in float64."""


@dataclass(frozen=True)
class Kind:
    """One way to store a checkpoint."""

    config: dict[str, Any]
    pack: Callable[[np.ndarray, np.random.Generator], Packed]
    skip: tuple[str, ...] = field(default=())
    """Ends of names of matrices that stay as they are."""


def integers(weight: np.ndarray, bits: int, group: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q [N, K] from 0 on, scales [N, G] in float16, zeros [N, G]) of groups of inputs; group 0: one for all."""
    rows, columns = weight.shape
    group = group or columns
    top, groups = 2**bits - 1, weight.reshape(rows, -1, group)
    if symmetric:
        scales = np.abs(groups).max(2) / (top // 2)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
        scales = (high - low) / top
        zeros = np.clip(np.round(-low / scales), 0, top)
    scales = scales.astype(np.float16)
    q = np.clip(np.round(groups / scales[:, :, None].astype(np.float64)) + zeros[:, :, None], 0, top)
    return q.reshape(rows, columns).astype(np.int64), scales, zeros.astype(np.int64)


def meant(q: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    return (q - zeros[:, group_of]) * scales.astype(np.float64)[:, group_of]


def words(q: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """[A, B] -> uint32 [A, B * bits / 32]: number order[i] of a word's at bit i * bits."""
    each = 32 // bits
    out = np.zeros((q.shape[0], q.shape[1] // each), dtype=np.uint32)
    for row, column in np.ndindex(out.shape):
        for i, place in enumerate(order or range(each)):
            out[row, column] |= np.uint32(int(q[row, column * each + place]) << (i * bits))
    return out


def tensor(array: np.ndarray) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)


def awq(group: int = 32) -> Kind:
    def pack(weight: np.ndarray, _: np.random.Generator) -> Packed:
        q, scales, zeros = integers(weight, 4, group, symmetric=False)
        stored = {"qweight": words(q.T, 4, AWQ_ORDER), "qzeros": words(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
        return {k: tensor(v) for k, v in stored.items()}, meant(
            q, scales, zeros, np.arange(q.shape[1]) // (group or q.shape[1])
        )

    return Kind(
        {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": None}, pack,
    )  # fmt: skip


def gptq(bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: bool = False, version: str = "gptq") -> Kind:
    def pack(weight: np.ndarray, random: np.random.Generator) -> Packed:
        columns = weight.shape[1]
        group_of = np.arange(columns) // (group or columns)
        places = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        q, scales, zeros = integers(weight[:, places], bits, group, symmetric=symmetric)  # sorted by activation
        q_own, own = np.empty_like(q), np.empty_like(group_of)
        q_own[:, places], own[places] = q, group_of
        zero_words = words(zeros.T, bits)
        if version == "gptq":
            zero_words = zero_words - np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
        stored = {"qweight": words(q_own, bits).T, "qzeros": zero_words, "scales": scales.T, "g_idx": own.astype(np.int32)}
        return {k: tensor(v) for k, v in stored.items()}, meant(q_own, scales, zeros, own)

    return Kind(
        {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": act_order, "sym": symmetric, "lm_head": False,
         "checkpoint_format": version, "damp_percent": 0.01, "meta": {"quantizer": ["somebody:1.0"]}}, pack,
    )  # fmt: skip


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, pack: Any) -> Kind:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5, "version": "0.11",
    }  # fmt: skip
    return Kind(config, pack)


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True, "group_size": None}
FLOAT_TOKEN = {**TOKEN, "type": "float"}


def int8_channel(form: str = "int-quantized", inputs: Any = TOKEN, *, for_all: bool = False) -> Kind:
    def pack(weight: np.ndarray, _: np.random.Generator) -> Packed:
        largest = np.abs(weight).max(1, keepdims=True)
        scales = ((largest.max(keepdims=True) if for_all else largest) / 127.5).astype(np.float32)
        q = np.clip(np.round(weight / scales), -128, 127)
        stored = {"weight": tensor(q.astype(np.int8)), "weight_scale": tensor(scales[0] if for_all else scales)}
        return stored, q * scales.astype(np.float64)

    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor" if for_all else "channel",
        "dynamic": False,
    }
    return compressed(form, weights, inputs, pack)


def packed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Kind:
    def pack(weight: np.ndarray, _: np.random.Generator) -> Packed:
        rows, columns = weight.shape
        group_of = np.arange(columns) // (group or columns)
        places = np.random.default_rng(columns).permutation(columns) if act_order else np.arange(columns)
        q, scales, zeros = integers(weight[:, places], bits, group, symmetric=symmetric)
        q_own, own = np.empty_like(q), np.empty_like(group_of)
        q_own[:, places], own[places] = q, group_of
        stored = {
            "weight_packed": tensor(words(q_own, bits)),  # a number and its zero point both have 2^(bits - 1) added
            "weight_scale": tensor(scales).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            stored["weight_zero_point"] = tensor(words(zeros.T, bits).T)
        if act_order:
            stored["weight_g_idx"] = tensor(own.astype(np.int32))
        return stored, meant(q_own, stored["weight_scale"].double().numpy(), zeros, own)

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "dynamic": False, "actorder": "group" if act_order else None, "observer": "minmax",
    }  # fmt: skip
    return compressed("pack-quantized", weights, None, pack)


def e4m3(weight: np.ndarray, block: tuple[int, int]) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """(e4m3 [N, K], scales float32 of blocks, the weight in float64)."""
    rows, columns = weight.shape
    high, wide = block[0] or rows, block[1] or columns
    scales = np.zeros((-(-rows // high), -(-columns // wide)), dtype=np.float32)
    stored, means = np.zeros_like(weight), np.zeros_like(weight)
    for a, b in np.ndindex(scales.shape):
        part = (slice(a * high, (a + 1) * high), slice(b * wide, (b + 1) * wide))
        scales[a, b] = np.abs(weight[part]).max() / 448
        stored[part] = torch.from_numpy(weight[part] / scales[a, b]).float().clamp(-448, 448).to(E4M3).double().numpy()
        means[part] = stored[part] * np.float64(scales[a, b])
    return torch.from_numpy(stored).float().to(E4M3), scales, means


def float8(strategy: str, *, static: bool = False, block: tuple[int, int] = (0, 0)) -> Kind:
    def pack(weight: np.ndarray, random: np.random.Generator) -> Packed:
        stored, scales, means = e4m3(weight, block)
        tensors = {"weight": stored, "weight_scale": tensor(scales[0] if strategy == "tensor" else scales)}
        if static:
            tensors["input_scale"] = torch.tensor([random.uniform(0.2, 0.3)], dtype=torch.float32)
        return tensors, means

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    inputs = {**FLOAT_TOKEN, "strategy": "tensor", "dynamic": False} if static else FLOAT_TOKEN
    if strategy == "block":
        inputs = {**FLOAT_TOKEN, "strategy": "group", "group_size": block[1]}
    return compressed("float-quantized", weights, inputs, pack)


def fine_grained(
    block: tuple[int, int] | None, *, static: bool = False, names: tuple[str, str] = ("weight_scale_inv", "activation_scale")
) -> Kind:
    def pack(weight: np.ndarray, _: np.random.Generator) -> Packed:
        stored, scales, means = e4m3(weight, block or (0, 0))
        tensors = {"weight": stored, names[0]: tensor(scales) if block else torch.tensor(scales.item())}
        if static:
            tensors[names[1]] = torch.tensor(0.25)
        return tensors, means

    config = {
        "quant_method": "fp8", "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": None if block is None else list(block), "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    return Kind(config, pack)


KINDS: dict[str, Callable[[], Kind]] = {
    "awq": awq,
    "awq, a scale per output": lambda: awq(0),
    "gptq": gptq,
    "gptq, asymmetric": lambda: gptq(symmetric=False),
    "gptq, sorted": lambda: gptq(symmetric=False, act_order=True),
    "gptq v2, sorted": lambda: gptq(act_order=True, version="gptq_v2"),
    "gptq, 8 bits": lambda: gptq(8, 0),
    "gptq, 8 bits in groups": lambda: gptq(8, symmetric=False),
    "int8": int8_channel,
    "int8, a scale for all": lambda: int8_channel(for_all=True),
    "int8, weights alone": lambda: int8_channel("naive-quantized", None),
    "packed int4": lambda: packed(4, 32),
    "packed int4, asymmetric": lambda: packed(4, 32, symmetric=False),
    "packed int4, sorted": lambda: packed(4, 32, symmetric=False, act_order=True),
    "packed int4, a scale per output": lambda: packed(4, 0),
    "packed int8": lambda: packed(8, 0),
    "packed int8 in groups": lambda: packed(8, 32, symmetric=False),
    "float8": lambda: float8("channel", block=(1, 0)),
    "float8, static": lambda: float8("tensor", static=True),
    "float8, blocks": lambda: float8("block", block=(32, 32)),
    "fp8": lambda: fine_grained((128, 128)),
    "fp8, small blocks": lambda: fine_grained((32, 32)),
    "fp8, odd blocks": lambda: fine_grained((24, 32)),
    "fp8, a scale for all": lambda: fine_grained(None),
    "fp8, static": lambda: fine_grained(None, static=True),
    "fp8, vLLM's names": lambda: fine_grained(None, static=True, names=("weight_scale", "input_scale")),
}


def quantise(source: Path, folder: Path, kind: Kind, *, only: str = "") -> tuple[Path, Path]:
    """A dense checkpoint as (one in that format, a dense one of what its weights stand for, in float32). only: the regular expression of
    names that are quantised; those of other matrices never are."""
    random = np.random.default_rng(7)
    paths = folder / "quantised", folder / "dense"
    stored: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, value in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if name == stem or not stem.endswith(LINEAR) or stem.endswith(kind.skip or ("never",)) or not re.match(only, name):
            stored[name] = dense[name] = value
            continue
        made, means = kind.pack(value.double().numpy(), random)
        stored |= {f"{stem}.{end}": part for end, part in made.items()}
        dense[name] = torch.from_numpy(means).float()
    for path, tensors, config in zip(paths, (stored, dense), (kind.config, None), strict=True):
        path.mkdir(parents=True)
        for file in source.glob("*.json"):
            shutil.copy(file, path)
        made_by = {"format": "pt"}
        save_file({name: part.contiguous() for name, part in tensors.items()}, path / "model.safetensors", metadata=made_by)
        if config is not None:
            text = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**text, "quantization_config": config}))
    return paths
