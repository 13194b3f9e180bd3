"""What the plugins here ask first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...core.models.linears import ModelToLoad, Refusal
    from ...core.worker.attention import KVLayout

SCALE_BYTES = 4


def no_kernels(model: ModelToLoad) -> str:
    """Why there is nothing to multiply quantised weights with; empty when there is."""
    if model.triton:
        return model.no_cpu_kernels if model.config is None else ""
    return f"it needs the C++ kernels, and {model.no_cpu_kernels}" if model.no_cpu_kernels else ""


def stored_as(layout: KVLayout, stored: Literal["int8", "fp8"]) -> KVLayout | Refusal:
    """The layout with K/V of one byte a value and a scale for each token and head."""
    if odd := [dim for dim in layout.head_dim if dim % SCALE_BYTES]:
        from ...core.models.linears import Refusal

        return Refusal(f"a head of {odd[0]} values, no multiple of {SCALE_BYTES}, leaves no room for an aligned scale")
    return dataclasses.replace(layout, stored=stored)
