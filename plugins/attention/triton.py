"""`attention.triton`: the Triton kernels, for GPUs. Where they can't serve, the reason is logged, and core's own attention runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.worker.attention import AttentionBackend, KVLayout

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
        from ...core.worker.triton_attention import TritonAttention as Backend

        if reason := Backend.cannot_serve(layout):
            log.warning("attention_triton_cannot_serve", reason=reason)
            return None
        if layout.device.type != "cuda":
            log.warning("attention_triton_interpreted", hint="TRITON_INTERPRET=1 is for tests: kernels run slowly, on the CPU")
        return Backend(layout.device, invariant=layout.invariant)
