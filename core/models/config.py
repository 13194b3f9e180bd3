"""The shape of a decoder, as plain frozen data. Made by `families`, read by `decoder` and `sizing`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of the first `dim` values of a head (halves rotated against each other, as Llama's checkpoints need)."""

    dim: int
    theta: float
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    factor: float = 1.0
    """linear: all frequencies are divided by it; llama3: the low ones are."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    freq_factors: tuple[float, ...] = ()
    """factors: dim // 2 divisors, one a frequency (GGUF's `rope_freqs.weight`)."""
    sections: tuple[int, ...] = ()
    """M-RoPE: how many frequencies turn with a token's place in time, in height and in width. Text has the same place in all three. Empty:
    positions are plain."""
    interleaved: bool = False
    """M-RoPE: frequencies take the three axes in turn (Qwen3-VL), not section by section (Qwen2-VL)."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A router's `top_k` of `num_experts` gated MLPs."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalise: bool
    """Divide the chosen probabilities by their sum."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    window: int | None = None
    """Sliding window in tokens, None: everything before."""
    rope: RopeConfig | None = None
    """None: no positions in this layer."""
    moe: MoeConfig | None = None
    """None: a dense MLP."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A pre-norm decoder: attention and gated MLP, each added to the residual stream."""

    architecture: str
    family: str
    """The checkpoint's `model_type`; decides which tensor names are read."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_model_len: int
    attention_scale: float
    eos_token_ids: tuple[int, ...] = ()
    unit_offset_norm: bool = False
    """Gemma's norm: weights are stored less 1, and multiplied in float32 before the cast."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of Q and K, before the rotary embedding."""
    sandwich_norm: bool = False
    """Norms behind attention and MLP too, before they are added to the residual stream (Gemma 2 and 3)."""
    fused_checkpoint: bool = False
    """The checkpoint holds `qkv_proj` and `gate_up_proj` (Phi-3)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float | None = None
    tied: bool = False
    """The LM head is the embedding table."""

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that K and V of all layers hold for one token."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
