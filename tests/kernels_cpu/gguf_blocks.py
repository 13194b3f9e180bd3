"""Random GGUF matrices of every packed type, and a float64 reference of products with int8 activations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tokenbus.kernels.cpu.quantized import GgufMatrix

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where a block's fp16 numbers are: the scale, and that of minima."""


class Matrix(NamedTuple):
    packed: GgufMatrix
    weight: torch.Tensor
    """float32 [n, k], dequantised by the gguf package."""


def block_size(name: str) -> int:
    return GGML_QUANT_SIZES[GGMLQuantizationType[name]][0]


def matrix(name: str, n: int, k: int, seed: int = 0, *, halves: tuple[float, ...] | None = None) -> Matrix:
    """Random bytes, but the fp16 numbers: of both signs and around 1e-3, or drawn from `halves`."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (n, k // block, size), dtype=np.uint8)
    for at in HALVES[name]:
        drawn = random.standard_normal((n, k // block, 1)) * 1e-3
        if halves is not None:
            drawn = random.choice(np.array(halves), drawn.shape)
        data[..., at : at + 2] = drawn.astype(np.float16).view(np.uint8)
    return from_bytes(name, data.reshape(n, -1), k)


def from_bytes(name: str, data: np.ndarray, k: int) -> Matrix:
    weight = dequantize(data, GGMLQuantizationType[name]).astype(np.float32)
    return Matrix(GgufMatrix(data, name, k), torch.from_numpy(weight))


def activations(x: torch.Tensor, block: int) -> torch.Tensor:
    """What int8 with a scale for `block` values keeps of float32 x [M, K], as float64."""
    parts = x.float().reshape(x.shape[0], -1, block)
    most = parts.abs().amax(-1, keepdim=True)
    inverse = torch.tensor(127.0) / most  # a Python number would become a reciprocal and a product: two roundings
    q = torch.where(most < 2.0**-96, 0.0, (parts * inverse).round())
    scale = torch.where(most < 2.0**-96, 0.0, most / 127)
    return (q.double() * scale.double()).reshape(x.shape)
