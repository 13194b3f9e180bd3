"""`attention.triton`: the Triton kernels, for GPUs. Where they can't serve, the reason is logged, and core's torch kernel runs."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, cast

import structlog

from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.worker.attention import AttentionBackend, AttentionBatch, AttentionParams

if TYPE_CHECKING:
    import torch

    from ...core.worker.attention import KVLayout
    from ...kernels.triton.attention import AttentionPlan

log = structlog.get_logger(__name__)


class TritonAttention(Plugin):
    info = PluginInfo(
        name="attention.triton",
        summary="paged attention in Triton for GPUs, bit-invariant in Triton's interpreter, not yet measured on a device",
        scope="step",
        lossless=False,  # another kernel set than core's: the same contract, other bits
        slot="attention",
        default=False,
    )

    @hookimpl
    def attention_backend(self, layout: KVLayout) -> AttentionBackend | None:
        reason = cannot_serve(layout)
        if reason is not None:
            log.warning("attention_triton_cannot_serve", reason=reason)
            return None
        if layout.device.type != "cuda":
            log.warning("attention_triton_interpreted", hint="TRITON_INTERPRET=1 is for tests: kernels run slowly, on the CPU")
        return TritonBackend(layout.device)


def cannot_serve(layout: KVLayout) -> str | None:
    """Why the kernels can't serve this layout, or None when they can."""
    if layout.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels run on GPUs, K and V are on {layout.device.type!r}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    from ...kernels.triton.attention import DTYPES, MAX_HEAD_DIM

    if layout.looks_ahead:
        return "its kernels are causal, and the model's media attend in both directions"
    if layout.dtype not in DTYPES:
        return f"it has no kernels for {layout.dtype}"
    if max(layout.head_dim) > MAX_HEAD_DIM:
        return f"its kernels have a head_dim of at most {MAX_HEAD_DIM}; this model's is {max(layout.head_dim)}"
    return None


class TritonBackend(AttentionBackend):
    """See kernels/triton/attention.py. Caches of the activations' dtype and int8."""

    name: ClassVar[str] = "triton"
    invariant: ClassVar[bool] = True
    quantized_kv: ClassVar[bool] = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def prepare(self, batch: AttentionBatch) -> AttentionPlan:
        from ...kernels.triton.attention import AttentionPlan

        return AttentionPlan(batch.query_start, batch.context_len, batch.block_tables, self._device)

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
        from ...kernels.triton.attention import paged_attention
        from ...kernels.triton.kv_write import write_kv

        if batch.prepared is None:
            batch.prepared = self.prepare(batch)
        plan = cast("AttentionPlan", batch.prepared)
        write_kv(k, v, k_cache, v_cache, batch.slots)
        return paged_attention(q, k_cache, v_cache, plan, params.scale, params.window, params.softcap)
