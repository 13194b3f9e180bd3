"""What a step takes beside weights and cache: found by running the largest one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...kernels.triton import sampling as kernel
from ..config import SchedulerConfig
from ..models.base import CausalModel
from .attention import AttentionBackend, KVLayout
from .batch import Piece, ragged
from .device import Device
from .graphs import MOST_GRAPHS, MOST_TOKENS
from .paged import make_cache
from .sampling import DEVICE_TILE

GRAPH_BYTES = 2 * 1024 * 1024
"""What a recorded graph takes beside its tensors; an estimate, not yet measured. Each keeps its hidden states; the rest they share."""


def reserve(
    device: Device, model: CausalModel, layout: KVLayout, attention: AttentionBackend, limits: SchedulerConfig, *, graphs: bool
) -> int:
    """Bytes to leave free beside weights and cache: a step of `token_budget` tokens over `max_running` requests, its logits and sampling,
    and, with graphs, the largest step that one is made of."""
    needed = device.peak_bytes(_step(model, layout, attention, limits.token_budget, limits.max_running))
    if graphs:
        tokens = min(MOST_TOKENS, limits.token_budget)
        needed += device.peak_bytes(_step(model, layout, attention, tokens, tokens))
        needed += MOST_GRAPHS * (GRAPH_BYTES + tokens * model.spec.hidden_size * layout.dtype.itemsize)
    device.release_cache()
    return needed


def _step(model: CausalModel, layout: KVLayout, attention: AttentionBackend, tokens: int, requests: int) -> Callable[[], None]:
    """Runs prompts that share out the tokens, each in blocks of its own; the cache for them is made here, before."""
    pieces = _share_out(tokens, requests, model.spec.max_model_len, layout.block_size)
    kv = make_cache(layout, pieces[-1].blocks[-1] + 1)

    def run() -> None:
        with torch.inference_mode():
            where = ragged(pieces, layout)
            where.attention.prepared = attention.prepare(where.attention)
            hidden = model.forward(where, kv, attention)
            last = [end - 1 for end in where.attention.query_start[1:]]
            logits = model.logits(hidden[(last * DEVICE_TILE)[:DEVICE_TILE]])
            # one row: the kernel takes no memory, but long to compile, which is not for the first request to wait for
            kernel.sample(logits[:1], kernel.SamplingRows.make([1.0], [0], [0], device=logits.device))

    return run


def _share_out(tokens: int, requests: int, longest: int, block_size: int) -> list[Piece]:
    """At least so many requests, more where they would be longer than `longest`."""
    requests = max(min(requests, tokens), -(-tokens // longest))
    pieces: list[Piece] = []
    used = 0
    for i in range(requests):
        count = tokens // requests + (i < tokens % requests)
        blocks = -(-count // block_size)
        pieces.append(Piece([0] * count, 0, list(range(used, used + blocks))))
        used += blocks
    return pieces
