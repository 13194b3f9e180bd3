"""Attention kernels as plugins of the slot "attention": exactly one is active.

`attention.torch` is the same kernel as core's default, held by a plugin: the pattern for others, and a name to switch back to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.worker.attention import AttentionBackend, KVLayout


class TorchAttention(Plugin):
    info = PluginInfo(
        name="attention.torch",
        summary="paged attention in plain torch, bit-invariant; any device and model",
        scope="step",
        lossless=True,
        slot="attention",
        default=False,
    )

    @hookimpl
    def attention_backend(self, layout: KVLayout) -> AttentionBackend | None:
        from ...core.worker.torch_attention import TorchAttention as Backend

        return Backend(layout) if layout.dtype.is_floating_point else None
