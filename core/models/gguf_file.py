"""GGUF files: metadata to config.json, tensors to Hugging Face names and dense values, tokenizer to tokenizer.json; all cached.

A converted file is a folder in the cache, `gguf/NAME-KEY`, KEY from the file's size, mtime and both ends. It holds config.json and
the tokenizer; one `model-DTYPE.safetensors` a dtype is added when a model is first loaded at that dtype, so that later loads
are a memory map. llama.cpp's storage differs from Hugging Face's in three ways, undone here: Q and K rows of the "llama"
architecture are permuted (pairs beside each other instead of halves), Gemma's norm weights have 1 added, experts are stacked.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...kernels.cache import cache_root, locked, publish
from ..errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import gguf
    import numpy as np
    import torch

FORMAT = 1
"""Part of the cache key: raise it when the conversion changes."""

TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
"""GGUF architecture -> model_type and class."""

KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PERMUTED = {"attn_q": "q_proj", "attn_k": "k_proj"}
IGNORED = "rope_f"
"""Beginning of names of tensors that are read into the config, not as weights."""
STACKED = "{expert}"
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def convert(path: Path) -> Path:
    """The file's folder in the cache with config.json and tokenizer, made first when needed. ModelError: not a GGUF file we can run."""
    target = _folder(path)
    if target.is_dir():
        return target
    with locked(target):
        if not target.is_dir():
            reader = _open(path)
            config = read_config(reader, path.name)
            with publish(target) as draft:
                draft.mkdir()
                _save_tokenizer(path, reader, config, draft)
                (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return target


def weights(path: Path, dtype: torch.dtype) -> Path:
    """The file's weights, dequantised and cast to `dtype`, as a safetensors file in its cache folder; made first when needed."""
    target = _folder(path) / f"model-{str(dtype).removeprefix('torch.')}.safetensors"
    if target.is_file():
        return target
    with locked(target):
        if not target.is_file():
            from safetensors.torch import save_file

            reader = _open(path)
            tensors = {name: value.to(dtype) for name, value in read_tensors(reader, path.name)}
            with publish(target) as draft:
                save_file(tensors, draft, metadata={"format": "pt"})
    return target


def _folder(path: Path) -> Path:
    stat = path.stat()
    digest = hashlib.sha256(f"{FORMAT} {stat.st_size} {stat.st_mtime_ns} ".encode())
    with path.open("rb") as handle:
        digest.update(handle.read(1 << 16))
        handle.seek(max(0, stat.st_size - (1 << 16)))
        digest.update(handle.read(1 << 16))
    return cache_root() / "gguf" / f"{path.stem}-{digest.hexdigest()[:16]}"


def _open(path: Path) -> gguf.GGUFReader:
    import gguf

    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from None


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def read_config(reader: gguf.GGUFReader, name: str) -> dict[str, Any]:
    """The config.json that Hugging Face's checkpoint of this model would have. ModelError when we can't run the model."""
    arch = _value(reader, "general.architecture")
    if arch not in TYPES:
        raise ModelError(f"{name} can't be run: GGUF architecture {arch!r} is not supported (supported: {', '.join(TYPES)})")
    model_type, architecture = TYPES[arch]
    found = {hf: _value(reader, f"{arch}.{key}") for key, hf in KEYS.items()}
    config: dict[str, Any] = {k: v for k, v in found.items() if v is not None}
    if arch == "llama" and config.get("num_experts"):
        model_type, architecture = "mixtral", "MixtralForCausalLM"
        config["num_local_experts"] = config.pop("num_experts")
    names = {t.name for t in reader.tensors}
    heads = config["num_attention_heads"]
    if not isinstance(heads, int) or not isinstance(config.get("num_key_value_heads", 0), int):
        raise ModelError(f"{name} can't be run: the number of heads differs between its layers")
    config.setdefault("head_dim", config["hidden_size"] // heads)
    config.setdefault("vocab_size", len(_value(reader, "tokenizer.ggml.tokens") or ()))
    eos = {_value(reader, f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")} - {None}
    config |= {
        "model_type": model_type,
        "architectures": [architecture],
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(eos),
        "rope_parameters": _rope(reader, arch, config, name),
    }
    config |= _family_extras(arch, config, names, name)
    return config


def _family_extras(arch: str, config: dict[str, Any], names: set[str], name: str) -> dict[str, Any]:
    """What the metadata leaves to convention."""
    if arch == "llama":
        config.pop("sliding_window", None)
        bias = {"blk.0.attn_q.bias" in names, "blk.0.attn_output.bias" in names}
        if len(bias) > 1:
            raise ModelError(f"{name} can't be run: Llama with biases on Q, K, V alone")
        return {"attention_bias": bias.pop(), "mlp_bias": "blk.0.ffn_down.bias" in names}
    if arch == "qwen3moe":
        return {"norm_topk_prob": True}
    if arch in {"gemma2", "gemma3"}:
        # the 27B models scale by the width of a head's share of the hidden state, all others by head_dim
        large = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
        scalar = config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
        return {"query_pre_attn_scalar": scalar}
    return {}


def _rope(reader: gguf.GGUFReader, arch: str, config: dict[str, Any], name: str) -> dict[str, Any]:
    theta = config.pop("rope_theta", 10000.0)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = _value(reader, f"{arch}.rope.scaling.type")
    if kind not in {None, "none"}:
        rope |= {"rope_type": kind, "factor": _value(reader, f"{arch}.rope.scaling.factor")}
    if (dim := _value(reader, f"{arch}.rope.dimension_count")) and dim < config["head_dim"]:
        rope["partial_rotary_factor"] = dim / config["head_dim"]
    for tensor in reader.tensors:
        if tensor.name == "rope_freqs.weight":
            rope |= {"rope_type": "factors", "freq_factors": [float(f) for f in tensor.data]}
        if tensor.name.startswith("rope_factors_"):
            raise ModelError(f"{name} can't be run: RoPE type 'longrope' is not supported")
    if arch == "gemma3":
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    return rope


def read_tensors(reader: gguf.GGUFReader, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, float32 tensor) of every weight. ModelError on a tensor or a quantisation nobody knows."""
    import numpy as np
    import torch
    from gguf.quants import dequantize

    arch = _value(reader, "general.architecture")
    heads = {
        "q_proj": _value(reader, f"{arch}.attention.head_count"),
        "k_proj": _value(reader, f"{arch}.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        if tensor.name.startswith(IGNORED):
            continue
        try:
            value = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise ModelError(f"{name} can't be run: GGUF type {tensor.tensor_type.name} is not supported") from None
        value = from_file(value, tensor.name, arch, heads)
        named = hf_name(tensor.name, arch, name)
        stacked = STACKED in named
        for expert, one in enumerate(value if stacked else [value]):
            owned = np.require(one, np.float32, ["C", "W"])  # float32 tensors come as a read-only map of the file
            yield named.replace(STACKED, str(expert)), torch.from_numpy(owned)


def from_file(value: np.ndarray, name: str, arch: str, heads: dict[str, int]) -> np.ndarray:
    """A dequantised tensor as Hugging Face's checkpoint has it. name: the file's; heads: of "q_proj" and "k_proj"."""
    part = name.split(".")[-2]
    if arch == "llama" and part in PERMUTED:
        return unpermute(value, heads[PERMUTED[part]])
    return value - 1.0 if arch.startswith("gemma") and part.endswith("norm") else value


def unpermute(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (pair, half) order back to (half, pair) order."""
    pairs = value.reshape(heads, value.shape[0] // heads // 2, 2, *value.shape[1:])
    return pairs.swapaxes(1, 2).reshape(value.shape)


def hf_name(gguf_name: str, arch: str, model: str) -> str:
    """The tensor's Hugging Face name, with STACKED in it when the tensor holds all experts. ModelError for one that nobody knows."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if block is None:
        stem, _, kind = gguf_name.rpartition(".")
        if stem in GLOBAL:
            return f"{GLOBAL[stem]}.{kind}"
    else:
        layer, part, kind = block.groups()
        table = BLOCK | (SANDWICH if arch.startswith("gemma") else {})
        if arch == "phi3":
            table = table | {"ffn_up": "mlp.gate_up_proj"}
        if part in table:
            return f"model.layers.{layer}.{table[part]}.{kind}"
        if part in EXPERTS:
            return f"model.layers.{layer}.mlp.experts.{STACKED}.{EXPERTS[part]}.{kind}"
    raise ModelError(f"{model} can't be run: unknown tensor {gguf_name}")


def _save_tokenizer(path: Path, reader: gguf.GGUFReader, config: dict[str, Any], folder: Path) -> None:
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        raise ModelError(f"{path.name}: its tokenizer can't be read: {error}") from error
    _match_bos(tokenizer, _value(reader, "tokenizer.ggml.add_bos_token"))
    tokenizer.model_max_length = config["max_position_embeddings"]
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    data = json.loads(settings.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only", "gguf_file"):
        data.pop(key, None)
    settings.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")


def _match_bos(tokenizer: Any, wanted: bool | None) -> None:
    """Make the tokenizer put a beginning-of-sequence token in front, or not, as the file's metadata say."""
    bos = tokenizer.bos_token_id
    if wanted is None or bos is None or (tokenizer("a")["input_ids"][:1] == [bos]) == wanted:
        return
    from tokenizers.processors import TemplateProcessing

    text = tokenizer.bos_token
    single = f"{text} $A" if wanted else "$A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=[(text, bos)] if wanted else []
    )
