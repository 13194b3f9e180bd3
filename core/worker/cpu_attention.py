"""The C++ attention kernel behind the slot's contract. A CpuDecoder that is given it runs the whole step in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch

from ...kernels.cpu import lib
from ...kernels.cpu.attention import FlatBatch, attend
from .attention import AttentionBackend, AttentionBatch, AttentionParams

if TYPE_CHECKING:
    from .attention import KVLayout


class CpuAttention(AttentionBackend):
    """See kernels/cpu/src/attention.h. float32, bfloat16 and int8 caches on the CPU."""

    name: ClassVar[str] = "cpu"
    invariant = True
    quantized_kv: ClassVar[bool] = True

    def __init__(self) -> None:
        """Takes torch's thread count. Raises RuntimeError when there is no library."""
        lib.set_threads(torch.get_num_threads())

    @staticmethod
    def serves(layout: KVLayout) -> bool:
        if layout.looks_ahead:
            return False
        known = layout.dtype in (torch.float32, torch.bfloat16) and layout.stored != "fp8"
        return layout.device.type == "cpu" and known and lib.load() is not None

    def prepare(self, batch: AttentionBatch) -> FlatBatch:
        return FlatBatch(batch.query_start, batch.context_len, batch.block_tables, batch.slots)

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
        flat = cast("FlatBatch", batch.prepared)
        return attend(q, k, v, k_cache, v_cache, flat, params.scale, params.window, params.softcap)
