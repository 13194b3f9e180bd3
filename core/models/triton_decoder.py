"""The decoder on Triton kernels, layer by layer: for GPUs, and on the CPU in Triton's interpreter, which is for tests.

What stands between two matrix products is one kernel each: a norm with the residual sum before it, and before that the norm of what the
half layer found (Gemma 2 and 3); the rotary embedding of Q and K in place, with their norms; the gated activation; the embedding with its
scale; the soft-cap of the logits. Left to torch, as there is no kernel for it: a mixture's experts, which run as in `moe`.

Rounding is `Decoder`'s: casts stand in the same places, sums are ordered otherwise. Importing this needs Triton (`triton_support`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from ...kernels.triton.elementwise import add_rms_norm, embed, gated, norm_add_rms_norm, rms_norm, rope_, softcap
from ...kernels.triton.launch import INTERPRETED
from ..worker.triton_attention import TritonAttention
from .batch_probe import batch_probe
from .decoder import Decoder, Table, _Mlp
from .triton_linears import CublasLinears, InvariantLinears

if TYPE_CHECKING:
    import torch

    from ..worker.attention import AttentionBackend
    from .base import ForwardBatch, KVCache
    from .config import DecoderConfig, RopeConfig
    from .decoder import _Attention, _Layer, _Norm
    from .linears import Linears, Weights

SLACK = 256
"""Positions beyond the longest request that have angles: drafts may reach there."""


class TritonDecoder(Decoder):
    """`unsupported` must be empty for it. `forward` and `logits` never wait for the device (a mixture's do)."""

    def __init__(
        self,
        config: DecoderConfig,
        tensors: Weights,
        dtype: torch.dtype,
        device: torch.device,
        linears: Linears | None = None,
        *,
        invariant: bool = True,
        max_len: int | None = None,
    ) -> None:
        """max_len: tokens of the longest request, where it is less than the model's: `spec` then says so, and angles are made for so many,
        once. Raises ValueError for products that are layers of the C++ decoder."""
        if linears is not None and linears.fused:
            raise ValueError(f"matrix products of {type(linears).__name__} are those of the C++ kernels, on the CPU")
        own = InvariantLinears if invariant else CublasLinears
        super().__init__(config, tensors, dtype, device, linears or own(dtype), invariant=invariant)
        longest = min(config.max_model_len, max_len or config.max_model_len)
        self.spec = dataclasses.replace(self.spec, max_model_len=longest)
        self.capturable = not any(layer.moe for layer in config.layers)
        self._positions = longest + SLACK
        self._rope_rows: dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]] = {}
        for rope, table in self._tables.items():
            cos, sin = table.table(self._positions).unbind(0)
            self._rope_rows[rope] = cos, sin
        self._scale = 1.0 if self.embed_scale is None else float(self.embed_scale)
        self._following = [*(layer.before_attention for layer in self.layers[1:]), self.norm]
        """The norm behind each layer."""
        self._probed: tuple[bool, str] | None = None

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """As the contract has it. Raises ValueError for a context longer than there are angles for. Where batches may hold media, what
        stands between the products is torch's."""
        if self.takes_media:
            return super().forward(batch, kv, attention)
        if (longest := max(batch.attention.context_len, default=0)) > self._positions:
            raise ValueError(f"a context of {longest} tokens: this model was loaded for {self.spec.max_model_len}")
        stream = self._embed(batch.token_ids)
        x = _normal(self.layers[0].before_attention, stream)
        for layer, following in zip(self.layers, self._following, strict=True):
            found = self._attend(layer, x, batch, kv, attention)
            x, stream = _added(found, layer.after_attention, stream, layer.before_mlp)
            found = _mlp(layer.mlp, x, self.config.activation) if isinstance(layer.mlp, _Mlp) else layer.mlp(x)
            x, stream = _added(found, layer.after_mlp, stream, following)
        return x

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embedding, Table):
            return embed(self.embedding.weight, ids, self._scale)
        x = self.embedding(ids)
        return x if self.embed_scale is None else x * self.embed_scale

    def _attend(
        self, layer: _Layer, x: torch.Tensor, batch: ForwardBatch, kv: KVCache, backend: AttentionBackend
    ) -> torch.Tensor:
        part: _Attention = layer.attention
        q, k, v = part.qkv(x).view(x.shape[0], -1, part.head_dim).split(part.sizes, dim=1)
        norms = None if part.q_norm is None or part.k_norm is None else (part.q_norm, part.k_norm)
        if layer.rope is None:
            q, k = (q, k) if norms is None else (_normal(norms[0], q), _normal(norms[1], k))
        elif norms is None:
            rope_(q, k, batch.positions, *self._rope_rows[layer.rope])
        else:
            weights = {"q_weight": norms[0].weight, "k_weight": norms[1].weight}
            kind = {"eps": norms[0].eps, "unit_offset": norms[0].unit_offset}  # all of a model's norms are alike in these
            rope_(q, k, batch.positions, *self._rope_rows[layer.rope], **weights, **kind)
        index = part.index
        found = backend.attend(q, k, v, kv.k[index], kv.v[index], batch.attention, part.params)
        return part.out(found.reshape(x.shape[0], -1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found, cap = self.head(hidden), self.config.logit_softcap
        return found.float() if cap is None else softcap(found, cap)

    def numerics_probe(self) -> tuple[bool, str]:
        """The model itself, on this device, once."""
        if self._probed is None:
            small = {"length": 5, "mates": 1} if INTERPRETED else {}  # the interpreter takes long
            self._probed = batch_probe(self, TritonAttention(self.device, invariant=True), **small)
        return self._probed


def _normal(norm: _Norm, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight, norm.eps, unit_offset=norm.unit_offset)


def _added(found: torch.Tensor, own: _Norm | None, stream: torch.Tensor, norm: _Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream with what a half layer found, normalised and as it is. own: that half's own norm."""
    kind = {"eps": norm.eps, "unit_offset": norm.unit_offset}
    if own is None:
        return add_rms_norm(found, stream, norm.weight, **kind)
    return norm_add_rms_norm(found, stream, own.weight, norm.weight, **kind)


def _mlp(mlp: _Mlp, x: torch.Tensor, activation: Literal["silu", "gelu_tanh"]) -> torch.Tensor:
    gate, up = mlp.gate_up(x).chunk(2, dim=-1)
    return mlp.down(gated(activation, gate, up))
