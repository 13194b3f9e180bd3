"""The decoder on the C++ kernels: a whole step in one call; layer by layer when another attention backend holds the slot, or
when batches may hold media."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ...kernels.cpu import lib
from ...kernels.cpu.decoder import FusedDecoder, FusedLayer, FusedShape
from ..worker.cpu_attention import CpuAttention
from .base import ForwardBatch, KVCache
from .cpu_linears import CpuLinears, GateUp
from .decoder import Decoder, HeadRows, Table

if TYPE_CHECKING:
    from ...kernels.cpu.attention import FlatBatch
    from ...kernels.cpu.linear import CpuLinear
    from ..worker.attention import AttentionBackend
    from .config import DecoderConfig
    from .decoder import _Layer, _Mlp, _Norm
    from .linears import Linears, Weights


def unsupported(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why this model can't run on the C++ kernels here; empty when it can."""
    if any(layer.moe for layer in config.layers):
        return "it is a mixture of experts"
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return f"they do not run {str(dtype).removeprefix('torch.')} on {device.type}"
    return "" if lib.load() else lib.unavailable_reason()


class CpuDecoder(Decoder):
    """`unsupported` must be empty for it, and `linears` make fused products. Takes torch's thread count."""

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
        lib.set_threads(torch.get_num_threads())
        super().__init__(config, tensors, dtype, device, linears or CpuLinears(dtype), invariant=invariant)
        self._ropes = list(self._tables)
        self._fused = FusedDecoder(
            FusedShape(
                dtype=dtype,
                hidden=config.hidden_size,
                intermediate=config.intermediate_size,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                activation=config.activation,
                norm_eps=config.norm_eps,
                attention_scale=config.attention_scale,
                attention_softcap=config.attention_softcap,
                logit_softcap=config.logit_softcap,
                embed_scale=None if self.embed_scale is None else float(self.embed_scale),
            ),
            [self._layer(layer) for layer in self.layers],
            self._embedding_table(),
            _weight(self.norm),
            cast("CpuLinear", self.head),
        )

    def _embedding_table(self) -> torch.Tensor | None:
        """None: the head's rows. ValueError when there are fewer than the vocabulary has tokens."""
        if isinstance(self.embedding, HeadRows):
            self._check_vocabulary(self.embedding.head.out_features)
            return None
        if not isinstance(self.embedding, Table):
            raise TypeError(
                f"the fused decoder takes its embedding from a Table or HeadRows, not {type(self.embedding).__name__}"
            )
        self._check_vocabulary(len(self.embedding.weight))
        self.embedding.weight = self.embedding.weight.contiguous()
        return self.embedding.weight

    def _check_vocabulary(self, rows: int) -> None:
        if rows < self.config.vocab_size:
            raise ValueError(f"the embedding has {rows} rows, and the vocabulary {self.config.vocab_size} tokens")

    def _layer(self, layer: _Layer) -> FusedLayer:
        attention, mlp = layer.attention, cast("_Mlp", layer.mlp)
        gate_up = cast("GateUp", mlp.gate_up)
        return FusedLayer(
            qkv=cast("CpuLinear", attention.qkv),
            out=cast("CpuLinear", attention.out),
            gate=gate_up.gate,
            up=gate_up.up,
            down=cast("CpuLinear", mlp.down),
            before_attention=_weight(layer.before_attention),
            before_mlp=_weight(layer.before_mlp),
            after_attention=layer.after_attention and _weight(layer.after_attention),
            after_mlp=layer.after_mlp and _weight(layer.after_mlp),
            q_norm=attention.q_norm and _weight(attention.q_norm),
            k_norm=attention.k_norm and _weight(attention.k_norm),
            window=attention.params.window,
            rope=layer.rope and self._ropes.index(layer.rope),
        )

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        if self.takes_media or not isinstance(attention.inner, CpuAttention):
            return super().forward(batch, kv, attention)
        if batch.attention.prepared is None:
            batch.attention.prepared = attention.prepare(batch.attention)
        length = max(batch.attention.context_len)
        angles = [self._tables[rope].table(length) for rope in self._ropes]
        flat = cast("FlatBatch", batch.attention.prepared)
        return self._fused.step(batch.token_ids, batch.positions, flat, kv.k, kv.v, angles)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._fused.logits(hidden)

    def numerics_probe(self) -> tuple[bool, str]:
        """Both kernel sets: the attention slot may be switched to torch's while we run."""
        from ...kernels.cpu.probe import numerics_probe

        found = numerics_probe(self.dtype)
        return found if not found[0] else super().numerics_probe()


def _weight(norm: _Norm) -> torch.Tensor:
    """float32, contiguous, with the family's 1 added."""
    weight = norm.weight.float().contiguous()
    return 1.0 + weight if norm.unit_offset else weight
