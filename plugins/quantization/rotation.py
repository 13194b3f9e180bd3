"""An orthogonal rotation of the residual stream, folded into the weights: the model computes the same, without outliers in its activations.

A few channels of the hidden states are far larger than the rest (15 to 20 times the root mean square in SmolLM2), and an int8 scale for a
whole row then leaves little for the others. RMSNorm does not change under a rotation once its weight is moved into the matrices that
follow (Ashkboos et al. 2024, QuaRot and SliceGPT), so that with an orthogonal R

    embedding E R      Q, K, V, gate, up, head: W diag(norm) R      output, down: R' W (and R' b)      norms: 1

give the same logits. R is made of Hadamard matrices of up to 64, a cosine transform for the odd factor of the width, and fixed signs;
it depends on the width alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...core.models.config import DecoderConfig
    from ...core.models.linears import PackedMatrix, Weights

LARGEST = 64
EMBEDDING = "model.embed_tokens.weight"
NORM_BEFORE = {
    "q_proj": "input_layernorm", "k_proj": "input_layernorm", "v_proj": "input_layernorm", "qkv_proj": "input_layernorm",
    "gate_proj": "post_attention_layernorm", "up_proj": "post_attention_layernorm", "gate_up_proj": "post_attention_layernorm",
}  # fmt: skip
WRITES = {"o_proj", "down_proj"}
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}


def can_rotate(config: DecoderConfig) -> bool:
    """Not with a norm between a block's output and the residual stream: its weight has no matrix to move into."""
    return not config.sandwich_norm


class Rotation:
    """x [..., n] -> x R."""

    def __init__(self, n: int) -> None:
        odd = n
        while odd % 2 == 0:
            odd //= 2
        power, sizes = n // odd, []
        while power > 1:
            sizes.append(min(power, LARGEST))
            power //= sizes[-1]
        self._factors = [_cosine(odd)] * (odd > 1) + [_hadamard(size) for size in sizes]
        self._signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n)).float() * 2 - 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Float32, a new tensor."""
        shape, done = x.shape, x.float() * self._signs.to(x.device)
        right = shape[-1]
        for factor in self._factors:
            right //= len(factor)
            done = torch.einsum("ajb,kj->akb", done.reshape(-1, len(factor), right), factor.to(x.device))
        return done.reshape(shape)


class RotatedWeights:
    """A checkpoint seen through a rotation; matrices come as float32."""

    def __init__(self, weights: Weights, config: DecoderConfig) -> None:
        self._weights = weights
        self._rotate = Rotation(config.hidden_size)
        self._offset = config.unit_offset_norm

    def embedding(self) -> torch.Tensor:
        plain = self._weights.get(EMBEDDING)
        return self._rotate(plain).to(plain.dtype)

    def get(self, name: str) -> torch.Tensor:
        """`EMBEDDING` is the matrix of a tied LM head."""
        tensor = self._weights.get(name)
        stem, kind = name.rsplit(".", 1)
        part = stem.rsplit(".", 1)[-1]
        if part in NORMS:
            return torch.full_like(tensor, 0.0 if self._offset else 1.0)
        if part in WRITES:
            return self._rotate(tensor.T).T if kind == "weight" else self._rotate(tensor)
        if kind == "weight" and part in NORM_BEFORE:
            return self._after(f"{stem.rsplit('.', 2)[0]}.{NORM_BEFORE[part]}", tensor)
        if name in {EMBEDDING, "lm_head.weight"}:
            return self._after("model.norm", tensor)
        return tensor

    def packed(self, name: str) -> PackedMatrix:
        return self._weights.packed(name)

    def raw(self, name: str) -> torch.Tensor | None:
        """As the file has it: not rotated."""
        return self._weights.raw(name)

    def _after(self, norm: str, matrix: torch.Tensor) -> torch.Tensor:
        scale = self._weights.get(f"{norm}.weight").float()
        return self._rotate(matrix.float() * (1.0 + scale if self._offset else scale))


def _hadamard(n: int) -> torch.Tensor:
    """Sylvester's, n a power of 2, orthogonal."""
    made = torch.ones(1, 1)
    while len(made) < n:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / math.sqrt(n)


def _cosine(n: int) -> torch.Tensor:
    """The orthogonal DCT-II."""
    i = torch.arange(n, dtype=torch.float64)
    made = torch.cos(math.pi / n * (i + 0.5) * i[:, None]) * math.sqrt(2 / n)
    made[0] /= math.sqrt(2)
    return made.float()
