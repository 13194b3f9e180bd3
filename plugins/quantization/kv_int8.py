"""`quantization.kv_int8`: K and V are stored as int8, with a scale for each token and head of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .checks import stored_as

if TYPE_CHECKING:
    from ...core.models.linears import Refusal
    from ...core.worker.attention import KVLayout


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
        return stored_as(layout, "int8")
