"""`quantization.kv_fp8`: K and V are stored as float8 e4m3, with a scale for each token and head of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .checks import stored_as

if TYPE_CHECKING:
    from ...core.models.linears import Refusal
    from ...core.worker.attention import KVLayout


class KvFp8(Plugin):
    info = PluginInfo(
        name="quantization.kv_fp8",
        summary="K/V in float8 (e4m3) with a scale per token and head: half the memory of bfloat16; on CPUs by core's torch attention",
        scope="engine",
        lossless=False,
        conflicts={"quantization.kv_int8"},
    )

    @hookimpl
    def kv_layout(self, layout: KVLayout) -> KVLayout | Refusal:
        return stored_as(layout, "fp8")
