"""A start-up self test: do this machine's libraries keep the promises that `linear`, `elementwise` and `attention` rest on?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .attention import RaggedPlan, paged_attention
from .elementwise import gelu_tanh_mul, rms_norm, silu_mul
from .linear import TILE_ROWS, TiledLinear, packed_available

DTYPES = (torch.bfloat16, torch.float32)
ROWS = (1, 3, TILE_ROWS + 1, 128)
SHAPES = ((576, 192), (1536, 72), (1536, 576))
"""(inputs, outputs): below and above the 1024 inputs at which oneDNN divides them otherwise; outputs that no vector length divides;
what AMX's kernel cuts by the number of rows."""


CPU = torch.device("cpu")


def numerics_probe() -> tuple[bool, str]:
    """(True, "") or (False, which operation's rows depend on their batch). About 50 ms on two cores; keeps torch's thread count."""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    checks: list[tuple[str, Callable[[], bool]]] = [
        ("an elementwise function", lambda: _elementwise(generator, threads)),
        ("attention's batched product", lambda: _attention(generator, threads, CPU)),
    ]
    for dtype in DTYPES:
        if packed_available(dtype):
            checks += [(f"the {dtype} linear layer", lambda dtype=dtype: _linear(generator, threads, dtype))]
    try:
        with torch.inference_mode():
            for name, check in checks:
                if not check():
                    return False, f"on this machine a row's result of {name} depends on the other rows or the thread count"
    except RuntimeError as error:
        return False, f"the self test of the kernels failed: {error}"
    finally:
        torch.set_num_threads(threads)
    return True, ""


def attention_probe(device: torch.device) -> bool:
    """Whether attention on that device gives a token the same bits in a prompt and by itself. Keeps torch's thread count."""
    threads = torch.get_num_threads()
    try:
        with torch.inference_mode():
            return _attention(torch.Generator().manual_seed(0), threads, device)
    finally:
        torch.set_num_threads(threads)


def _linear(generator: torch.Generator, threads: int, dtype: torch.dtype) -> bool:
    for inputs, outputs in SHAPES:
        layer = TiledLinear(torch.randn(outputs, inputs, generator=generator).to(dtype))
        x = torch.randn(ROWS[-1], inputs, generator=generator).to(dtype)
        torch.set_num_threads(1)
        whole = layer(x)
        torch.set_num_threads(threads)
        if not all(torch.equal(layer(x[-n:]), whole[-n:]) for n in ROWS):
            return False
    return True


def _elementwise(generator: torch.Generator, threads: int) -> bool:
    width = 12 * 64 + 24  # a rest beside any vector length
    x = torch.randn(ROWS[-1], width, generator=generator)
    weight = torch.randn(width, generator=generator)
    calls: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda rows: rms_norm(rows, weight, 1e-6),
        lambda rows: silu_mul(rows, rows),
        lambda rows: gelu_tanh_mul(rows, rows),
        torch.exp,
        torch.tanh,
    )
    for call in calls:
        torch.set_num_threads(1)
        whole = call(x)
        torch.set_num_threads(threads)
        if not all(torch.equal(call(x[-n:].clone()), whole[-n:]) for n in ROWS):
            return False
    return True


def _attention(generator: torch.Generator, threads: int, device: torch.device) -> bool:
    """A prompt at once against its last tokens one by one."""
    return all(_attention_of(generator, threads, dim, device) for dim in (64, 256))


def _attention_of(generator: torch.Generator, threads: int, dim: int, device: torch.device) -> bool:
    length, block = 150, 16
    q, k, v = (torch.randn(-(-length // block), block, heads, dim, generator=generator).to(device) for heads in (6, 2, 2))
    q, table = q.flatten(0, 1)[:length], list(range(len(k)))
    slots = torch.arange(length, device=device)
    torch.set_num_threads(1)
    whole = paged_attention(q, k, v, RaggedPlan([0, length], [length], [table], slots), 0.125)
    torch.set_num_threads(threads)
    for end in (1, 128, 129, length):
        alone = paged_attention(q[end - 1 : end], k, v, RaggedPlan([0, 1], [end], [table], slots[end - 1 : end]), 0.125)
        if not torch.equal(alone[0], whole[end - 1]):
            return False
    return True
