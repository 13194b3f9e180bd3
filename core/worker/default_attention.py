"""Core's own attention for a layout: what runs when no plugin holds the slot."""

from __future__ import annotations

from .attention import AttentionBackend, KVLayout


def default_attention(layout: KVLayout) -> AttentionBackend:
    """Triton's on a GPU where its kernels serve the layout (they look at no later position), else torch's."""
    if layout.device.type == "cuda":
        from .triton_attention import TritonAttention

        if TritonAttention.serves(layout):
            return TritonAttention(layout.device, invariant=layout.invariant)
    from .torch_attention import TorchAttention

    return TorchAttention(layout)
