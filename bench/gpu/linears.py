"""The four matrix products of a layer of an 8B Llama, as one decode step runs them, by kind of weight.

A call is all four, one after the other, over weights of their own: several times the L2 in all. "of copy" compares the bytes of the weights
as they are stored, over time, with the measured copy bandwidth. Eight-bit activations are quantised inside the call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from tokenbus.kernels.triton.int4_weight import quantize_int4
from tokenbus.kernels.triton.matmul import matmul
from tokenbus.kernels.triton.quantized_matmul import quantize_activations, quantize_weight, w8a8_matmul
from tokenbus.kernels.triton.weight_only_matmul import int4_matmul, int8_weight_matmul

from .record import Record, finish, make_record, part_options
from .shapes import SHAPES, products
from .timing import copies_for, measure
from .warm import compile_beforehand

BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
ROWS = (1, 32)
Product = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[torch.Tensor], tuple[Product, int]]
"""From a bf16 weight to its product and the bytes that it is stored in."""


def dense(weight: torch.Tensor) -> tuple[Product, int]:
    return lambda x: F.linear(x, weight), weight.nbytes


def triton(*, invariant: bool) -> Maker:
    return lambda weight: (lambda x: matmul(x, weight, invariant=invariant), weight.nbytes)


def w8a8(kept: torch.dtype, *, invariant: bool) -> Maker:
    def make(weight: torch.Tensor) -> tuple[Product, int]:
        q, scales = quantize_weight(weight, kept)

        def product(x: torch.Tensor) -> torch.Tensor:
            return w8a8_matmul(*quantize_activations(x, kept), q, scales, dtype=x.dtype, invariant=invariant)

        return product, q.nbytes + scales.nbytes

    return make


def w8a16(*, invariant: bool) -> Maker:
    def make(weight: torch.Tensor) -> tuple[Product, int]:
        q, scales = quantize_weight(weight)
        return lambda x: int8_weight_matmul(x, q, scales, invariant=invariant), q.nbytes + scales.nbytes

    return make


def w4a16(*, invariant: bool) -> Maker:
    def make(weight: torch.Tensor) -> tuple[Product, int]:
        packed = quantize_int4(weight)
        return lambda x: int4_matmul(x, packed, invariant=invariant), packed.nbytes

    return make


def kinds() -> Iterator[tuple[str, Maker]]:
    yield "bf16, torch (cuBLAS)", dense
    for invariant in (False, True):
        how = "invariant" if invariant else "free"
        yield f"bf16, Triton, {how}", triton(invariant=invariant)
        yield f"W4A16, {how}", w4a16(invariant=invariant)
        yield f"W8A8 fp8, {how}", w8a8(FP8, invariant=invariant)
        yield f"W8A16 int8, {how}", w8a16(invariant=invariant)
        if not invariant:  # integers are summed exactly: there is one kernel for both
            yield "W8A8 int8", w8a8(INT8, invariant=invariant)


def run(record: Record, name: str, make: Maker, shapes: list[tuple[int, int]], device: str = "cuda") -> None:
    weights = [torch.randn(shape, device=device).to(BF16) for shape in shapes]
    sets = [[make(weight) for weight in weights]]
    nbytes = sum(size for _, size in sets[0])
    sets += [[make(weight) for weight in weights] for _ in range(copies_for(nbytes) - 1)]
    del weights
    cells = {"weights": name, "MB": f"{nbytes / 1e6:.0f}"}
    for rows in ROWS:
        inputs = [torch.randn(rows, k, device=device).to(BF16) for _, k in shapes]

        def layer(i: int, inputs: list[torch.Tensor] = inputs) -> None:
            for x, (product, _) in zip(inputs, sets[i], strict=True):
                product(x)

        times = measure(layer, len(sets))
        rate = nbytes / times.median
        share = rate / record.known.get("limit.copy", float("nan"))
        cells[f"M = {rows}, us"] = times.shown()
        cells[f"M = {rows}, of copy"] = f"{share:.1%}"
        record.figure(f"linears.{name}.{rows}.seconds", times.median)
    record.row("The four products of a layer, 8B", **cells)


def warm(name: str, device: str = "cuda") -> None:
    """Compile what a kind of weight will run."""
    make = dict(kinds())[name]
    for n, k in products(SHAPES["8B"]):
        product, _ = make(torch.randn(n, k, device=device).to(BF16))
        for rows in ROWS:
            product(torch.randn(rows, k, device=device).to(BF16))


def main() -> None:
    record = make_record(part_options(__doc__).parse_args())
    compile_beforehand(record, warm, [name for name, make in kinds() if make is not dense])
    torch.manual_seed(0)
    for name, make in kinds():
        record.attempt(name, lambda name=name, make=make: run(record, name, make, products(SHAPES["8B"])), needs=4)
    finish(record)


if __name__ == "__main__":
    main()
