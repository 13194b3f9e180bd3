"""`quantization.kv_int8`: K and V are stored as int8, with a scale for each token and head of its own."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ...core.models.linears import Refusal
    from ...core.worker.attention import KVLayout

SCALE_BYTES = 4


class KvInt8(Plugin):
    info = PluginInfo(
        name="quantization.kv_int8",
        summary="K/V in int8 with a scale per token and head: half the memory of bfloat16",
        scope="engine",
        lossless=False,
        conflicts={"quantization.kv_fp8"},
    )

    @hookimpl
    def kv_layout(self, layout: KVLayout) -> KVLayout | Refusal:
        if odd := [dim for dim in layout.head_dim if dim % SCALE_BYTES]:
            from ...core.models.linears import Refusal

            return Refusal(f"a head of {odd[0]} values, no multiple of {SCALE_BYTES}, leaves no room for an aligned scale")
        return dataclasses.replace(layout, stored="int8")
