"""A start-up self test of the C++ kernels on the machine, instruction set and thread count in use."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import lib
from .attention import FlatBatch, attend
from .elementwise import gated, rms_norm
from .linear import CpuLinear
from .quantized import GgufMatrix, QuantLinear

ROWS = (1, 2, 5, 33)
LENGTH = 330


def numerics_probe(dtype: torch.dtype) -> tuple[bool, str]:
    """(True, "") or (False, which operation's rows depend on their batch or the thread count). About 10 ms; keeps the thread count."""
    generator = torch.Generator().manual_seed(0)
    threads = lib.threads()
    checks = (
        ("linear layer", _linear),
        ("quantised linear layer", _quantised),
        ("row functions", _rows),
        ("attention", _attention),
    )
    try:
        for name, check in checks:
            if not check(dtype, generator, threads):
                return (
                    False,
                    f"on this machine a row's result of the {lib.isa()} {name} depends on other rows or the thread count",
                )
    finally:
        lib.set_threads(threads)
    return True, ""


def _alone_and_together(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, threads: int) -> bool:
    lib.set_threads(1)
    whole = call(x)
    lib.set_threads(threads)
    return all(torch.equal(call(x[-n:]), whole[-n:]) for n in ROWS)


def _linear(dtype: torch.dtype, generator: torch.Generator, threads: int) -> bool:
    for inputs, outputs in ((576, 200), (1536, 72)):
        layer = CpuLinear(torch.randn(outputs, inputs, generator=generator).to(dtype))
        if not _alone_and_together(layer, torch.randn(ROWS[-1], inputs, generator=generator).to(dtype), threads):
            return False
    return True


def _quantised(dtype: torch.dtype, generator: torch.Generator, threads: int) -> bool:
    """int8 rows, and the two block layouts that differ most: 8 bits with a scale, 4 bits with super-blocks of scales and minima."""
    weight = torch.randn(72, 512, generator=generator)
    layers = [QuantLinear.int8([weight], dtype=dtype)]
    for name, scales in (("Q8_0", (0,)), ("Q4_K", (0, 2))):
        size = lib.gguf_row_bytes(name, 256)
        blocks = torch.randint(0, 256, (72 * 512 // 256, size), dtype=torch.uint8, generator=generator)
        for at in scales if name == "Q4_K" else range(0, size, 34):
            blocks[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
        layers.append(QuantLinear.gguf([GgufMatrix(blocks.view(72, -1), name, 512)], dtype=dtype))
    x = torch.randn(ROWS[-1], 512, generator=generator).to(dtype)
    return all(_alone_and_together(layer, x, threads) for layer in layers)


def _rows(dtype: torch.dtype, generator: torch.Generator, threads: int) -> bool:
    x, weight = torch.randn(ROWS[-1], 1543, generator=generator), torch.randn(1543, generator=generator)
    return _alone_and_together(lambda rows: rms_norm(rows.to(dtype), weight, 1e-6), x, threads) and all(
        _alone_and_together(lambda rows, name=name: gated(name, rows, rows, dtype), x, threads)
        for name in ("silu", "gelu_tanh")
    )


def _attention(dtype: torch.dtype, generator: torch.Generator, threads: int) -> bool:
    """A prompt at once against its beginning followed by single tokens."""
    q, k, v = (torch.randn(LENGTH, heads, 64, generator=generator).to(dtype) for heads in (6, 2, 2))
    table = list(range(-(-LENGTH // 16)))
    found = []
    for count, sizes in ((1, (LENGTH,)), (threads, (LENGTH - 3, 1, 2))):
        lib.set_threads(count)
        caches = [torch.zeros(len(table), 16, 2, 64, dtype=dtype) for _ in range(2)]
        end, rows = 0, []
        for size in sizes:
            part, end = slice(end, end + size), end + size
            batch = FlatBatch([0, size], [end], [table], torch.arange(part.start, end))
            rows.append(attend(q[part], k[part], v[part], caches[0], caches[1], batch, 0.125))
        found.append(torch.cat(rows))
    return torch.equal(*found)
