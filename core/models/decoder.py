"""One decoder for every family that `families` knows: a DecoderConfig and a checkpoint's tensors, run over paged K/V.

Each operation is either exact per element (index, add, multiply) or one that `kernels` keeps bit-invariant per row, so that a
token's result does not depend on what else is in the batch. Casts follow transformers': the residual stream and what enters a
matrix product in the model's dtype, norms in float32; angles, soft-caps and logits stay in float32 where transformers rounds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.torch_ops.elementwise import gelu_tanh_mul, rms_norm, rope, silu_mul, softcap
from ...kernels.torch_ops.linear import TiledLinear
from ..device import GPU_IS_OFF
from ..worker.attention import AttentionParams, KVLayout
from .base import CausalModel, ForwardBatch, KVCache, ModelSpec
from .linears import Linears, tensors_of
from .moe import Experts
from .rope import RopeTable, inverse_frequencies, mrope_axes
from .sizing import EMBEDDING, HEAD, count_parameters, layer_matrices, outer_matrix, weights_bytes

if TYPE_CHECKING:
    from ...kernels.cpu.linear import CpuLinear
    from ..worker.attention import AttentionBackend
    from .config import DecoderConfig, LayerConfig, RopeConfig
    from .linears import Embedding, Linear, Matrix, Weights


class Table:
    """Embeddings as rows of a tensor [vocabulary, hidden_size]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class HeadRows:
    """Embeddings of a tied model as rows of its LM head, which is a layer of kernels/cpu: one copy serves both."""

    def __init__(self, head: CpuLinear) -> None:
        self.head = head

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head.rows(ids)


class TorchLinears(Linears):
    """Core's own: weights in the model's dtype, multiplied by torch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def one(self, weights: Weights, matrix: Matrix) -> Linear:
        tensors, biases = tensors_of(weights, matrix)
        if len(tensors) > 1:
            return TiledLinear.fuse(tensors, biases)
        return TiledLinear(tensors[0], biases[0] if biases else None)  # on the CPU packed straight from the file's memory map

    def gate_up(self, weights: Weights, matrix: Matrix) -> Linear:
        return self.one(weights, matrix)

    def embedding(self, weights: Weights, name: str, head: Linear | None) -> Embedding:
        shared = head.weight if isinstance(head, TiledLinear) else None
        return Table(weights.get(name) if shared is None or shared.device.type == "cpu" else shared)

    def nbytes(self, matrix: Matrix) -> int:
        return (matrix.weights + matrix.rows * matrix.bias) * self.dtype.itemsize

    def embedding_bytes(self, matrix: Matrix, *, tied: bool) -> int:
        return 0 if tied else matrix.weights * self.dtype.itemsize  # tied: a map of the file, which the kernel may drop


class _Norm:
    def __init__(self, tensors: Weights, name: str, config: DecoderConfig) -> None:
        self.weight = tensors.get(f"{name}.weight")
        self.eps = config.norm_eps
        self.unit_offset = config.unit_offset_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class _Mlp:
    def __init__(self, tensors: Weights, config: DecoderConfig, matrices: list[Matrix], linears: Linears) -> None:
        gate_up, down = matrices
        self.gate_up = linears.gate_up(tensors, gate_up)
        self.down = linears.one(tensors, down)
        self.activate = silu_mul if config.activation == "silu" else gelu_tanh_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.activate(gate, up))


class _Attention:
    def __init__(
        self,
        tensors: Weights,
        config: DecoderConfig,
        layer: LayerConfig,
        index: int,
        qkv: Matrix,
        out: Matrix,
        linears: Linears,
    ) -> None:
        name = f"model.layers.{index}.self_attn"
        self.qkv = linears.one(tensors, qkv)
        self.out = linears.one(tensors, out)
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
    def __init__(self, tensors: Weights, config: DecoderConfig, index: int, linears: Linears) -> None:
        layer = config.layers[index]
        name = f"model.layers.{index}"
        qkv, out, *mlp = layer_matrices(config, index)  # mlp: of a dense layer alone
        self.rope = layer.rope
        self.attention = _Attention(tensors, config, layer, index, qkv, out, linears)
        self.mlp = Experts.load(tensors, name, config, layer.moe) if layer.moe else _Mlp(tensors, config, mlp, linears)
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
        tensors: Weights,
        dtype: torch.dtype,
        device: torch.device,
        linears: Linears | None = None,
        *,
        invariant: bool = True,
    ) -> None:
        """invariant: rows must not depend on their batch. If not, attention is told so; `linears` do as they do."""
        linears = linears or TorchLinears(dtype)
        tensors = linears.source(tensors)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.invariant = invariant
        self.embed_scale = None if config.embed_scale is None else torch.tensor(config.embed_scale).to(device, dtype)
        self.layers = [_Layer(tensors, config, i, linears) for i in range(len(config.layers))]
        self.norm = _Norm(tensors, "model.norm", config)
        self.head = linears.one(tensors, outer_matrix(config, EMBEDDING if config.tied else HEAD))
        self.embedding = linears.embedding(tensors, f"{EMBEDDING}.weight", self.head if config.tied else None)
        self._tables: dict[RopeConfig, RopeTable] = {
            layer.rope: RopeTable(inverse_frequencies(layer.rope), device) for layer in config.layers if layer.rope
        }
        self._axes = {r: torch.tensor(mrope_axes(r), device=device) for r in self._tables if r.sections}
        self.takes_media = self._looks_ahead = False
        self.spec = spec(config, dtype, linears, invariant=invariant)

    def take_media(self, *, looks_ahead: bool) -> None:
        self.takes_media, self._looks_ahead, self.capturable = True, looks_ahead, False

    def kv_layout(self, block_size: int) -> KVLayout:
        n = len(self.layers)
        heads, dims = (self.config.num_kv_heads,) * n, (self.config.head_dim,) * n
        ahead = self._looks_ahead
        return KVLayout(n, heads, dims, block_size, self.dtype, self.device, invariant=self.invariant, looks_ahead=ahead)

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        x = self.embedding(batch.token_ids)
        if self.embed_scale is not None:
            x = x * self.embed_scale
        media = batch.media
        if media is not None:
            x = media.embed(x)
        angles = self._angles(batch)
        for index, layer in enumerate(self.layers):
            found = layer.attention(layer.before_attention(x), layer.rope and angles[layer.rope], batch, kv, attention)
            x = x + (found if layer.after_attention is None else layer.after_attention(found))
            found = layer.mlp(layer.before_mlp(x))
            x = x + (found if layer.after_mlp is None else layer.after_mlp(found))
            if media is not None:
                x = media.add(x, index)
        return self.norm(x)

    def _angles(self, batch: ForwardBatch) -> dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]:
        length, media = max(batch.attention.context_len), batch.media
        if media is None or media.places is None:
            return {r: table.rows(batch.positions, length) for r, table in self._tables.items()}
        length = max(length, int(media.places.max()) + 1)
        return {r: table.rows_by_axis(media.places, self._axes[r], length) for r, table in self._tables.items()}

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else softcap(logits, cap)


def spec(config: DecoderConfig, dtype: torch.dtype, linears: Linears, *, invariant: bool = True) -> ModelSpec:
    reason = linears.lossy_reason or ("" if invariant else GPU_IS_OFF)
    count = count_parameters(config)
    size = weights_bytes(config, str(dtype).removeprefix("torch."), linears)
    return ModelSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        weights_bytes=size.total,
        step_bytes=size.step,
        head_bytes=size.head,
        linear_params=count.per_token,
        head_params=count.head,
        eos_token_ids=config.eos_token_ids,
        lossless=not reason,
        lossless_reason=reason,
    )
