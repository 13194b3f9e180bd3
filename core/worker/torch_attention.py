"""Core's own attention: the torch kernels behind the slot's contract. Used when no attention plugin is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from ...kernels.torch_ops.attention import RaggedPlan, Scratch, paged_attention, write_kv
from ...kernels.torch_ops.probe import attention_probe
from .attention import AttentionBackend, AttentionBatch, AttentionParams

if TYPE_CHECKING:
    import torch

    from .attention import KVLayout


class TorchAttention(AttentionBackend):
    """See kernels/torch_ops/attention.py. Any layout; caches of the activations' dtype, int8 and fp8."""

    name: ClassVar[str] = "torch"
    quantized_kv: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True

    def __init__(self, layout: KVLayout | None = None) -> None:
        """layout: what it is to serve. On a GPU the libraries' products are looked at there and then; on the CPU the model's own self test
        does it (kernels/torch_ops/probe.py)."""
        self._scratch = Scratch()
        self.invariant = True
        if layout is not None and layout.device.type != "cpu":
            self.invariant = layout.invariant and attention_probe(layout.device)

    def prepare(self, batch: AttentionBatch) -> RaggedPlan:
        return RaggedPlan(batch.query_start, batch.context_len, batch.block_tables, batch.slots, self._scratch, batch.reach)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        if batch.prepared is None:
            batch.prepared = self.prepare(batch)
        plan = cast("RaggedPlan", batch.prepared)
        write_kv(k, v, k_cache, v_cache, plan)
        return paged_attention(q, k_cache, v_cache, plan, params.scale, params.window, params.softcap)
