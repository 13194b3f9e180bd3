"""`attention.cpu`: the C++ kernel. Where it can't serve (no compiler, another device) it declines, and core's torch kernel runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.worker.attention import AttentionBackend, KVLayout


class CpuAttention(Plugin):
    info = PluginInfo(
        name="attention.cpu",
        summary="paged attention in C++ for CPUs, bit-invariant; lets the decoder run a whole step in one call",
        scope="step",
        lossless=False,  # another kernel set than core's: the same contract, other bits
        slot="attention",
        default=True,
        devices=("cpu",),
    )

    @hookimpl
    def attention_backend(self, layout: KVLayout) -> AttentionBackend | None:
        from ...core.worker.cpu_attention import CpuAttention as Backend

        return Backend() if Backend.serves(layout) else None
