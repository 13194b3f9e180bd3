"""The Triton attention kernels behind the slot's contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from ..device import no_triton
from .attention import AttentionBackend, AttentionBatch, AttentionParams

if TYPE_CHECKING:
    import torch

    from ...kernels.triton.attention_plan import AttentionPlan, WorkKey
    from .attention import KVLayout


class TritonAttention(AttentionBackend):
    """See kernels/triton/attention.py. Caches of the activations' dtype and int8."""

    name: ClassVar[str] = "triton"
    quantized_kv: ClassVar[bool] = True
    capturable: ClassVar[bool] = True

    def __init__(self, device: torch.device, *, invariant: bool = True) -> None:
        """invariant: tiles and splits are the same for every batch. If not, nothing is promised. Imports Triton."""
        from ...kernels.triton.attention import AttentionPlan, paged_attention
        from ...kernels.triton.kv_write import write_kv

        self._plan, self._write, self._attend = AttentionPlan, write_kv, paged_attention
        self._device = device
        self._kinds: dict[int, dict[WorkKey, None]] = {}
        self.invariant = invariant

    @staticmethod
    def serves(layout: KVLayout) -> bool:
        return not TritonAttention.cannot_serve(layout)

    @staticmethod
    def cannot_serve(layout: KVLayout) -> str:
        """Why the kernels can't serve this layout here; empty when they can."""
        if reason := no_triton(layout.device.type):
            return f"{reason}; K and V are on {layout.device.type!r}"
        from ...kernels.triton.attention import DTYPES, MAX_HEAD_DIM

        if layout.looks_ahead:
            return "its kernels are causal, and the model's media attend in both directions"
        if layout.dtype not in DTYPES:
            return f"it has no kernels for {layout.dtype}"
        if max(layout.head_dim) > MAX_HEAD_DIM:
            return f"its kernels have a head_dim of at most {MAX_HEAD_DIM}; this model's is {max(layout.head_dim)}"
        return ""

    def prepare(self, batch: AttentionBatch) -> AttentionPlan:
        return self._plan(
            batch.query_start,
            batch.context_len,
            batch.block_tables,
            self._device,
            tables=batch.tables,
            table_rows=batch.table_rows,
            upload=batch.upload,
            kinds=self._kinds,
        )

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
        plan = cast("AttentionPlan", batch.prepared)
        self._write(k, v, k_cache, v_cache, batch.slots)
        return self._attend(
            q,
            k_cache,
            v_cache,
            plan,
            params.scale,
            params.window,
            params.softcap,
            invariant=self.invariant,
            longest=plan.longest,
        )
