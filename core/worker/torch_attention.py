"""Core's own attention: the torch kernels behind the slot's contract. Used when no attention plugin is on."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from ...kernels.torch_ops.attention import RaggedPlan, Scratch, paged_attention, write_kv
from .attention import AttentionBackend, AttentionBatch, AttentionParams

if TYPE_CHECKING:
    import torch


class TorchAttention(AttentionBackend):
    """See kernels/torch_ops/attention.py. Any layout, float32, bfloat16 and int8 caches."""

    name: ClassVar[str] = "torch"
    invariant: ClassVar[bool] = True
    quantized_kv: ClassVar[bool] = True
    looks_ahead: ClassVar[bool] = True

    def __init__(self) -> None:
        self._scratch = Scratch()

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
