"""Mixture of experts: a router picks `top_k` gated MLPs for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.torch_ops.elementwise import gelu_tanh_mul, silu_mul
from ...kernels.torch_ops.linear import TiledLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .config import DecoderConfig, MoeConfig
    from .linears import Weights

TILE = 32
"""Rows that are routed together, padded: softmax and top-k of a fixed shape give a row the same bits wherever it stands."""
STACKED = {"qwen3_vl_moe_text"}
"""Families whose checkpoints may hold all experts of a layer in two tensors."""


class Experts:
    """Each token's chosen experts are weighted and added in float32, the best first: an order that depends on that token alone."""

    def __init__(
        self, router: TiledLinear, gate_up: list[TiledLinear], down: list[TiledLinear], moe: MoeConfig, activation: str
    ) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.moe = moe
        self.activate = silu_mul if activation == "silu" else gelu_tanh_mul

    @classmethod
    def load(cls, tensors: Weights, layer: str, config: DecoderConfig, moe: MoeConfig) -> Experts:
        block = f"{layer}.block_sparse_moe" if config.family == "mixtral" else f"{layer}.mlp"
        stacked = config.family in STACKED and tensors.raw(f"{block}.experts.gate_up_proj") is not None
        found = (_stacked if stacked else _apart)(tensors, block, config, moe)
        gate_up, down = zip(*((TiledLinear(wide), TiledLinear(narrow)) for wide, narrow in found), strict=True)
        return cls(TiledLinear(tensors.get(f"{block}.gate.weight")), list(gate_up), list(down), moe, config.activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden_size]; the same shape and dtype back."""
        weights, chosen = self.route(x)
        parts = torch.zeros(x.shape[0], self.moe.top_k, x.shape[1], dtype=torch.float32, device=x.device)
        for e in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == e)
            gate, up = self.gate_up[e](x[rows]).chunk(2, dim=-1)
            found = self.down[e](self.activate(gate, up))
            parts[rows, places] = found.float() * weights[rows, places, None]
        total = parts[:, 0]
        for place in range(1, self.moe.top_k):
            total = total + parts[:, place]
        return total.to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 weights and int64 experts, [T, top_k] each."""
        logits = self.router(x).float()
        rows = logits.shape[0]
        padded = torch.cat([logits, logits.new_zeros(-rows % TILE, logits.shape[1])])
        tiles = [self._route_tile(tile) for tile in padded.split(TILE)]
        weights, chosen = (torch.cat(parts)[:rows] for parts in zip(*tiles, strict=True))
        return weights, chosen

    def _route_tile(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = torch.topk(torch.softmax(logits, dim=-1), self.moe.top_k, dim=-1)
        if self.moe.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen


def _apart(tensors: Weights, block: str, config: DecoderConfig, moe: MoeConfig) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each expert's gate, then up [2 * intermediate_size, hidden_size], and its down [hidden_size, intermediate_size], from tensors of its
    own."""
    gate, down, up = ("w1", "w2", "w3") if config.family == "mixtral" else ("gate_proj", "down_proj", "up_proj")
    for e in range(moe.num_experts):
        one = f"{block}.experts.{e}"
        gate_up = torch.cat([tensors.get(f"{one}.{part}.weight") for part in (gate, up)])
        yield gate_up, tensors.get(f"{one}.{down}.weight")


def _stacked(
    tensors: Weights, block: str, config: DecoderConfig, moe: MoeConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same from two tensors of all experts: [experts, outputs, inputs], or, as Qwen's own checkpoints have them, [experts, inputs,
    outputs]. Raises ValueError for other shapes."""
    names = [f"{block}.experts.{part}" for part in ("gate_up_proj", "down_proj")]
    found = [tensors.get(name) for name in names]
    count, hidden, wide = moe.num_experts, config.hidden_size, moe.intermediate_size
    wanted = [(count, 2 * wide, hidden), (count, hidden, wide)]
    if [tuple(t.transpose(1, 2).shape) for t in found if t.dim() == 3] == wanted:
        found = [t.transpose(1, 2) for t in found]
    if [tuple(t.shape) for t in found] != wanted:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in zip(names, found, strict=True))
        raise ValueError(f"{shapes}: its config says {list(wanted[0])} and {list(wanted[1])}, or their last two turned round")
    for gate_up, down in zip(*found, strict=True):
        yield gate_up.contiguous(), down.contiguous()
