"""What both holders of the slot ask first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.models.linears import ModelToLoad


def no_kernels(model: ModelToLoad) -> str:
    """Why there is nothing to multiply quantised weights with; empty when there is."""
    if model.triton:
        return model.no_cpu_kernels if model.config is None else ""
    return f"it needs the C++ kernels, and {model.no_cpu_kernels}" if model.no_cpu_kernels else ""
