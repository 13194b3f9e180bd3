"""What each family's `config.json` means: one small function a family, from the JSON object to a DecoderConfig.

Names and defaults are those of the Hugging Face configuration classes (a checkpoint on the hub often leaves defaults out).
Whatever a function does not know how to run, it refuses with a ModelError that names the model and the reason. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..errors import ModelError
from .config import DecoderConfig, LayerConfig, MoeConfig, RopeConfig
from .media_config import is_multimodal, text_config

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    build: Callable[[_Reader], DecoderConfig]


class _Reader:
    """A config.json with its family's name for messages. `null` counts as absent."""

    def __init__(self, data: Json, name: str) -> None:
        self.data = data
        self.name = name

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.name} can't be run: {reason}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.data.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.data.get(key)
        if value is None:
            raise self.refuse(f"its config.json has no {key!r}")
        return value

    @property
    def num_layers(self) -> int:
        return self.need("num_hidden_layers")

    @property
    def head_dim(self) -> int:
        return self.get("head_dim") or self.need("hidden_size") // self.need("num_attention_heads")

    def activation(self, key: str = "hidden_act", default: str = "silu") -> Literal["silu", "gelu_tanh"]:
        known: dict[str, Literal["silu", "gelu_tanh"]] = {
            "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
        }  # fmt: skip
        value = self.get(key, default)
        if value not in known:
            raise self.refuse(f"unknown activation {value!r}")
        return known[value]

    def rope(self, default_theta: float = 10000.0) -> RopeConfig:
        """One rotary embedding for all layers, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5."""
        given = {**self.get("rope_scaling", {}), **self.get("rope_parameters", {})}
        return self.rope_from(given, self.get("rope_theta", default_theta))

    def rope_from(self, given: Json, theta: float) -> RopeConfig:
        kind = given.get("rope_type") or given.get("type") or "default"
        partial = given.get("partial_rotary_factor") or self.get("partial_rotary_factor", 1.0)
        dim = int(self.head_dim * partial)
        theta = float(given.get("rope_theta") or theta)
        match kind:
            case "default":
                return RopeConfig(dim, theta)
            case "linear":
                return RopeConfig(dim, theta, "linear", factor=float(given["factor"]))
            case "llama3":
                return RopeConfig(
                    dim,
                    theta,
                    "llama3",
                    factor=float(given["factor"]),
                    low_freq_factor=float(given["low_freq_factor"]),
                    high_freq_factor=float(given["high_freq_factor"]),
                    original_max_len=int(given.get("original_max_position_embeddings") or self.need("max_position_embeddings")),
                )
            case "factors":
                return RopeConfig(dim, theta, "factors", freq_factors=tuple(given["freq_factors"]))
        raise self.refuse(f"RoPE type {kind!r} is not supported (supported: default, linear, llama3)")

    def layers(self, rope: RopeConfig, windows: list[int | None], moe: dict[int, MoeConfig] | None = None) -> Any:
        return tuple(LayerConfig(window, rope, (moe or {}).get(i)) for i, window in enumerate(windows))

    def windows(self, types: list[str], window: int | None) -> list[int | None]:
        """Each layer's window from `layer_types`."""
        if len(types) != self.num_layers:
            raise self.refuse(f"layer_types has {len(types)} entries for {self.num_layers} layers")
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise self.refuse(f"unknown layer type {min(unknown)!r}")
        if "sliding_attention" in types and not window:
            raise self.refuse("sliding layers without a sliding_window")
        return [window if t == "sliding_attention" else None for t in types]

    def eos(self) -> tuple[int, ...]:
        value = self.get("eos_token_id", ())
        return (value,) if isinstance(value, int) else tuple(value)

    def common(self) -> Json:
        """Fields that all families share, by DecoderConfig's names; norms' epsilon defaults to 1e-6."""
        heads = self.need("num_attention_heads")
        return {
            "architecture": self.data["architectures"][0],
            "family": self.data["model_type"],
            "vocab_size": self.need("vocab_size"),
            "hidden_size": self.need("hidden_size"),
            "intermediate_size": self.need("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": self.get("num_key_value_heads", heads),
            "head_dim": self.head_dim,
            "norm_eps": float(self.get("rms_norm_eps", 1e-6)),
            "max_model_len": self.need("max_position_embeddings"),
            "attention_scale": self.head_dim**-0.5,
            "eos_token_ids": self.eos(),
            "tied": self.get("tie_word_embeddings", False),
        }


def _llama(c: _Reader) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **c.common(),
        layers=c.layers(c.rope(), [None] * c.num_layers),
        activation=c.activation(),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=c.get("mlp_bias", False),
    )


def _mistral(c: _Reader) -> DecoderConfig:
    # an absent sliding_window means 4096 (the class's default), an explicit null none
    window = c.data.get("sliding_window", 4096)
    return DecoderConfig(**c.common(), layers=c.layers(c.rope(), [window] * c.num_layers), activation=c.activation())


def _qwen_windows(c: _Reader) -> list[int | None]:
    window = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    first = c.get("max_window_layers", 28)
    types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(c.num_layers)]
    return c.windows(c.get("layer_types", types), window)


def _qwen2(c: _Reader) -> DecoderConfig:
    return DecoderConfig(**c.common(), layers=c.layers(c.rope(), _qwen_windows(c)), activation=c.activation(), qkv_bias=True)


def _qwen3(c: _Reader) -> DecoderConfig:
    c.data.setdefault("head_dim", 128)
    bias = c.get("attention_bias", False)
    return DecoderConfig(
        **c.common(),
        layers=c.layers(c.rope(), _qwen_windows(c)),
        activation=c.activation(),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _qwen3_moe(c: _Reader) -> DecoderConfig:
    bias = c.get("attention_bias", False)
    experts = c.get("num_experts") or c.get("num_local_experts", 128)
    moe = MoeConfig(
        num_experts=experts,
        top_k=c.get("num_experts_per_tok", 8),
        intermediate_size=c.get("moe_intermediate_size", 768),
        normalise=c.get("norm_topk_prob", False),
    )
    dense, step = set(c.get("mlp_only_layers", [])), c.get("decoder_sparse_step", 1)
    sparse = {i: moe for i in range(c.num_layers) if i not in dense and (i + 1) % step == 0}
    window = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    return DecoderConfig(
        **c.common(),
        layers=c.layers(c.rope(), [window] * c.num_layers, sparse),
        activation=c.activation(),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _mixtral(c: _Reader) -> DecoderConfig:
    c.data.setdefault("rms_norm_eps", 1e-5)
    moe = MoeConfig(
        num_experts=c.get("num_local_experts", 8),
        top_k=c.get("num_experts_per_tok", 2),
        intermediate_size=c.need("intermediate_size"),
        normalise=True,
    )
    layers = c.layers(
        c.rope(default_theta=1e6), [c.get("sliding_window")] * c.num_layers, dict.fromkeys(range(c.num_layers), moe)
    )
    return DecoderConfig(**c.common(), layers=layers, activation=c.activation())


def _phi3(c: _Reader) -> DecoderConfig:
    c.data.setdefault("rms_norm_eps", 1e-5)
    return DecoderConfig(
        **c.common(),
        layers=c.layers(c.rope(), [c.get("sliding_window")] * c.num_layers),
        activation=c.activation(),
        fused_checkpoint=True,
    )


def _gemma_common(c: _Reader) -> Json:
    if c.get("use_bidirectional_attention", False):
        raise c.refuse("its attention is bidirectional")
    c.data.setdefault("head_dim", 256)
    c.data.setdefault("tie_word_embeddings", True)
    bias = c.get("attention_bias", False)
    return c.common() | {
        "activation": c.activation("hidden_activation", "gelu_pytorch_tanh"),
        "attention_scale": float(c.get("query_pre_attn_scalar", 256)) ** -0.5,
        "unit_offset_norm": True,
        "sandwich_norm": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "embed_scale": c.need("hidden_size") ** 0.5,
    }


def _gemma(c: _Reader) -> DecoderConfig:
    # the first checkpoints say hidden_act "gelu" and mean its tanh form
    act = c.get("hidden_activation") or c.get("hidden_act", "gelu")
    c.data["hidden_activation"] = "gelu_pytorch_tanh" if act == "gelu" else act
    common = _gemma_common(c) | {"attention_scale": c.head_dim**-0.5, "sandwich_norm": False}
    return DecoderConfig(**common, layers=c.layers(c.rope(), [None] * c.num_layers))


def _gemma2(c: _Reader) -> DecoderConfig:
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(c.num_layers)]
    windows = c.windows(c.get("layer_types", types), c.get("sliding_window", 4096))
    return DecoderConfig(
        **_gemma_common(c),
        layers=c.layers(c.rope(), windows),
        attention_softcap=c.data.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.data.get("final_logit_softcapping", 30.0),
    )


def _gemma3(c: _Reader) -> DecoderConfig:
    common = _gemma_common(c)
    if c.get("attn_logit_softcapping"):
        raise c.refuse("Gemma 3 with attn_logit_softcapping")
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern", 6)
    types = c.get("layer_types", ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(c.num_layers)])
    windows = c.windows(types, c.get("sliding_window", 4096))
    given = c.get("rope_parameters", {})
    full = c.rope_from({**(given.get("full_attention") or {}), **c.get("rope_scaling", {})}, c.get("rope_theta", 1e6))
    local = c.rope_from(given.get("sliding_attention") or {}, c.get("rope_local_base_freq", 1e4))
    layers = tuple(LayerConfig(w, full if t == "full_attention" else local) for w, t in zip(windows, types, strict=True))
    return DecoderConfig(**common, layers=layers, qk_norm=True, logit_softcap=c.get("final_logit_softcapping"))


def _by_axis(config: DecoderConfig, c: _Reader, *, interleaved: bool) -> DecoderConfig:
    """With M-RoPE in every layer."""
    given = {**c.get("rope_scaling", {}), **c.get("rope_parameters", {})}
    sections = tuple(given.get("mrope_section") or ())
    if len(sections) != 3 or (sum(sections) != config.head_dim // 2):
        raise c.refuse(f"mrope_section {list(sections)} does not share out the {config.head_dim // 2} frequencies of a head")
    layers = tuple(
        replace(la, rope=la.rope and replace(la.rope, sections=sections, interleaved=interleaved)) for la in config.layers
    )
    return replace(config, layers=layers)


def _qwen2_vl(c: _Reader) -> DecoderConfig:
    return _by_axis(_qwen2(c), c, interleaved=False)


def _qwen3_vl(c: _Reader) -> DecoderConfig:
    return _by_axis(_qwen3(c), c, interleaved=True)


def _qwen3_vl_moe(c: _Reader) -> DecoderConfig:
    c.data["norm_topk_prob"] = True  # its class has no such setting, and always does it
    return _by_axis(_qwen3_moe(c), c, interleaved=True)


FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _llama),
    "mistral": _Family("MistralForCausalLM", _mistral),
    "mixtral": _Family("MixtralForCausalLM", _mixtral),
    "qwen2": _Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": _Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": _Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma": _Family("GemmaForCausalLM", _gemma),
    "gemma2": _Family("Gemma2ForCausalLM", _gemma2),
    "gemma3_text": _Family("Gemma3ForCausalLM", _gemma3),
    "phi3": _Family("Phi3ForCausalLM", _phi3),
    # text parts of multimodal checkpoints only (core/models/media.py)
    "qwen2_vl_text": _Family("Qwen2VLTextModel", _qwen2_vl),
    "qwen2_5_vl_text": _Family("Qwen2_5_VLTextModel", _qwen2_vl),
    "qwen3_vl_text": _Family("Qwen3VLTextModel", _qwen3_vl),
    "qwen3_vl_moe_text": _Family("Qwen3VLMoeTextModel", _qwen3_vl_moe),
}


def decoder_config(config: Json, name: str) -> DecoderConfig | None:
    """The DecoderConfig of a config.json; None when its architecture is not the decoder's (the fallback's turn).

    Of a multimodal checkpoint it is the text part's. Raises ModelError when the family is known, but not what this checkpoint does with
    it."""
    whole = config
    if is_multimodal(config):
        config = text_config(config, name)
    family = FAMILIES.get(config.get("model_type", ""))
    architectures = config.get("architectures") or ([family.architecture] if family else [])
    if family is None or family.architecture not in architectures:
        return None
    reader = _Reader({**config, "architectures": [family.architecture]}, name)
    try:
        built = family.build(reader)
    except (KeyError, TypeError, ValueError) as error:
        raise reader.refuse(f"its config.json is malformed ({type(error).__name__}: {error})") from error
    if built.num_heads % built.num_kv_heads:
        raise reader.refuse(f"{built.num_heads} heads can't share {built.num_kv_heads} KV heads")
    if config is not whole and whole.get("architectures"):
        return replace(built, architecture=whole["architectures"][0])
    return built
