"""One decoder for every family that `families` knows: a DecoderConfig and a checkpoint's tensors, run over paged K/V.

Each operation is either exact per element (index, add, multiply) or one that `kernels` keeps bit-invariant per row, so that a
token's result does not depend on what else is in the batch. Casts follow transformers': the residual stream and what enters a
matrix product in the model's dtype, norms in float32; angles, soft-caps and logits stay in float32 where transformers rounds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from ...kernels.torch_ops.elementwise import gelu_tanh_mul, rms_norm, rope, silu_mul, softcap
from ...kernels.torch_ops.linear import TiledLinear
from ..worker.attention import AttentionParams, KVLayout
from .base import CausalModel, ForwardBatch, KVCache, ModelSpec
from .moe import Experts
from .rope import RopeTable, inverse_frequencies

if TYPE_CHECKING:
    from ..worker.attention import AttentionBackend
    from .config import DecoderConfig, LayerConfig, RopeConfig


class Tensors(Protocol):
    """A checkpoint's tensors, already in the model's dtype and on its device."""

    def get(self, name: str) -> torch.Tensor: ...


Linear = Callable[[torch.Tensor], torch.Tensor]
"""x [M, in_features] -> [M, out_features], bit-invariant per row."""


class TorchLinears:
    """Makes a decoder's matrix products. Weights [N, K] and biases [N] (all or none) in the model's dtype; they may be a file's memory."""

    def one(self, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> Linear:
        """One matrix from the rows of several."""
        if len(weights) > 1:
            return TiledLinear.fuse(weights, biases)
        return TiledLinear(weights[0], biases[0] if biases else None)  # packed straight from the file's memory map

    def gate_up(self, weights: list[torch.Tensor], biases: list[torch.Tensor]) -> Linear:
        """Gate's rows, then up's: two matrices, or one that has both."""
        return self.one(weights, biases)


def _read(tensors: Tensors, names: list[str], *, bias: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    weights = [tensors.get(f"{name}.weight") for name in names]
    return weights, [tensors.get(f"{name}.bias") for name in names] if bias else []


class _Norm:
    def __init__(self, tensors: Tensors, name: str, config: DecoderConfig) -> None:
        self.weight = tensors.get(f"{name}.weight")
        self.eps = config.norm_eps
        self.unit_offset = config.unit_offset_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class _Mlp:
    def __init__(self, tensors: Tensors, name: str, config: DecoderConfig, linears: TorchLinears) -> None:
        parts = [f"{name}.gate_up_proj"] if config.fused_checkpoint else [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gate_up = linears.gate_up(*_read(tensors, parts, bias=config.mlp_bias))
        self.down = linears.one(*_read(tensors, [f"{name}.down_proj"], bias=config.mlp_bias))
        self.activate = silu_mul if config.activation == "silu" else gelu_tanh_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activate(gate, up))


class _Attention:
    def __init__(
        self, tensors: Tensors, name: str, config: DecoderConfig, layer: LayerConfig, index: int, linears: TorchLinears
    ) -> None:
        parts = [f"{name}.qkv_proj"] if config.fused_checkpoint else [f"{name}.{p}_proj" for p in "qkv"]
        self.qkv = linears.one(*_read(tensors, parts, bias=config.qkv_bias))
        self.out = linears.one(*_read(tensors, [f"{name}.o_proj"], bias=config.output_bias))
        self.q_norm = _Norm(tensors, f"{name}.q_norm", config) if config.qk_norm else None
        self.k_norm = _Norm(tensors, f"{name}.k_norm", config) if config.qk_norm else None
        self.params = AttentionParams(config.attention_scale, layer.window, config.attention_softcap)
        self.sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim = config.head_dim
        self.index = index

    def __call__(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        batch: ForwardBatch,
        kv: KVCache,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], -1, self.head_dim).split(self.sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if angles is not None:
            q, k = rope(q, *angles), rope(k, *angles)
        found = backend.attend(q, k, v, kv.k[self.index], kv.v[self.index], batch.attention, self.params)
        return self.out(found.reshape(x.shape[0], -1))


class _Layer:
    def __init__(self, tensors: Tensors, config: DecoderConfig, index: int, linears: TorchLinears) -> None:
        layer = config.layers[index]
        name = f"model.layers.{index}"
        self.rope = layer.rope
        self.attention = _Attention(tensors, f"{name}.self_attn", config, layer, index, linears)
        self.mlp = (
            Experts.load(tensors, name, config, layer.moe) if layer.moe else _Mlp(tensors, f"{name}.mlp", config, linears)
        )
        self.before_attention = _Norm(tensors, f"{name}.input_layernorm", config)
        between = "post_attention_layernorm"
        self.after_attention = self.after_mlp = None
        if config.sandwich_norm:
            self.after_attention = _Norm(tensors, f"{name}.{between}", config)
            self.after_mlp = _Norm(tensors, f"{name}.post_feedforward_layernorm", config)
            between = "pre_feedforward_layernorm"
        self.before_mlp = _Norm(tensors, f"{name}.{between}", config)


class Decoder(CausalModel):
    """See the module. Weights are read once, here; Q, K, V and gate, up become one matrix each."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        linears: TorchLinears | None = None,
    ) -> None:
        linears = linears or TorchLinears()
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = tensors.get("model.embed_tokens.weight")
        self.embed_scale = None if config.embed_scale is None else torch.tensor(config.embed_scale).to(device, dtype)
        self.layers = [_Layer(tensors, config, i, linears) for i in range(len(config.layers))]
        self.norm = _Norm(tensors, "model.norm", config)
        self.head = linears.one([self.embedding if config.tied else tensors.get("lm_head.weight")], [])
        self._tables: dict[RopeConfig, RopeTable] = {
            layer.rope: RopeTable(inverse_frequencies(layer.rope), device) for layer in config.layers if layer.rope
        }
        self.spec = spec(config, dtype)

    def kv_layout(self, block_size: int) -> KVLayout:
        n = len(self.layers)
        heads, dims = (self.config.num_kv_heads,) * n, (self.config.head_dim,) * n
        return KVLayout(n, heads, dims, block_size, self.dtype, self.device)

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        x = self.embedding[batch.token_ids]
        if self.embed_scale is not None:
            x = x * self.embed_scale
        length = max(batch.attention.context_len)
        angles = {r: table.rows(batch.positions, length) for r, table in self._tables.items()}
        for layer in self.layers:
            found = layer.attention(layer.before_attention(x), layer.rope and angles[layer.rope], batch, kv, attention)
            x = x + (found if layer.after_attention is None else layer.after_attention(found))
            found = layer.mlp(layer.before_mlp(x))
            x = x + (found if layer.after_mlp is None else layer.after_mlp(found))
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def spec(config: DecoderConfig, dtype: torch.dtype) -> ModelSpec:
    from .sizing import count_parameters

    count = count_parameters(config)
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        weights_bytes=count.total * dtype.itemsize,
        linear_params=count.per_token,
        head_params=count.head,
        eos_token_ids=config.eos_token_ids,
    )
