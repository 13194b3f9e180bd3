"""Mixture of experts: a router picks `top_k` gated MLPs for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.torch_ops.elementwise import gelu_tanh_mul, silu_mul
from ...kernels.torch_ops.linear import TiledLinear

if TYPE_CHECKING:
    from .config import DecoderConfig, MoeConfig
    from .linears import Weights

TILE = 32
"""Rows that are routed together, padded: softmax and top-k of a fixed shape give a row the same bits wherever it stands."""


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
        gate, down, up = ("w1", "w2", "w3") if config.family == "mixtral" else ("gate_proj", "down_proj", "up_proj")
        gate_up, downs = [], []
        for e in range(moe.num_experts):
            one = f"{block}.experts.{e}"
            gate_up.append(TiledLinear.fuse([tensors.get(f"{one}.{part}.weight") for part in (gate, up)]))
            downs.append(TiledLinear(tensors.get(f"{one}.{down}.weight")))
        return cls(TiledLinear(tensors.get(f"{block}.gate.weight")), gate_up, downs, moe, config.activation)

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
