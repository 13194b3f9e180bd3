"""Which models the decoder on Triton kernels can run. Imports Triton only where it is installed and can run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..device import no_triton

if TYPE_CHECKING:
    import torch

    from .config import DecoderConfig


def unsupported(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> str:
    """Why this model can't run on the Triton kernels there; empty when it can."""
    if reason := no_triton(device.type):
        return reason
    from ...kernels.triton.attention import DTYPES, MAX_HEAD_DIM

    if dtype not in DTYPES:
        return f"they do not run {str(dtype).removeprefix('torch.')}"
    if config.head_dim > MAX_HEAD_DIM:
        return f"they have a head_dim of at most {MAX_HEAD_DIM}, and the model's is {config.head_dim}"
    return ""
