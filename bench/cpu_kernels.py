"""Matrix products of SmolLM2-135M on the CPU kernels, beside the machine's limits of the same minutes.

    python bench/cpu_kernels.py [--rows 1,2,4,...] [--dtype bf16|f32] [--isa NAME] [--threads N] [--rounds 6] [--json FILE]

All 30 layers have memory of their own (QKV, output, gate and up, down), and so has the head; with more than 64 rows, as in a prompt, the
head computes one. Every round measures the limits and then each number of rows in turn; the table shows the fastest pass of all rounds
(and the median), rates as shares of the best limits. Bytes are the weights' only. With --threads 1 everything is measured in processor
time, which is what a busy machine can still tell.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cpu_limits import Limits, clock

from tokenbus.core.worker.threads import available_cores
from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = (49152, 576)
HEAD_ROWS = 64
ROWS = "1,2,4,8,16,32,64,128,512,2048"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


class Model:
    """All linear layers, and buffers for their inputs and outputs."""

    def __init__(self, dtype: torch.dtype, rows: int) -> None:
        begin = time.perf_counter()
        weights = {shape: torch.randn(shape).to(dtype) for shape in (*SHAPES, HEAD)}
        self.layers = [CpuLinear(weights[shape]) for shape in (*SHAPES * LAYERS, HEAD)]
        self.packing = time.perf_counter() - begin
        self.x = torch.randn(rows, max(k for _, k in SHAPES)).to(dtype)
        self.y = torch.empty(max(rows * SHAPES[2][0], HEAD_ROWS * HEAD[0]), dtype=dtype)
        self.code = lib.DTYPES["bfloat16" if dtype == torch.bfloat16 else "float32"]
        self.nbytes = sum(layer.nbytes for layer in self.layers)

    def head_rows(self, rows: int) -> int:
        return rows if rows <= HEAD_ROWS else 1

    def flops(self, rows: int) -> int:
        per_row = 2 * LAYERS * sum(n * k for n, k in SHAPES)
        return rows * per_row + 2 * self.head_rows(rows) * HEAD[0] * HEAD[1]

    def run(self, rows: int, now: Callable[[], float]) -> float:
        """Seconds of one pass."""
        x, y = self.x.data_ptr(), self.y.data_ptr()
        counts = [rows] * (len(self.layers) - 1) + [self.head_rows(rows)]
        begin = now()
        for layer, m in zip(self.layers, counts, strict=True):
            layer._c.tb_linear(layer.handle, x, layer.in_features, y, layer.out_features, m, self.code, 0)
        return now() - begin


def main() -> None:
    arguments = parse()
    if lib.load() is None:
        raise SystemExit(f"no CPU kernels: {lib.unavailable_reason()}")
    if arguments.isa:
        lib.use_isa(arguments.isa)
    lib.set_threads(arguments.threads)
    rows = [int(r) for r in arguments.rows.split(",")]
    model = Model(DTYPES[arguments.dtype], max(rows))
    print(f"{lib.isa()}, {arguments.dtype}, {arguments.threads} threads, {model.nbytes / 1e6:.0f} MB of weights")
    times: dict[int, list[float]] = {r: [] for r in rows}
    limits = Limits(0, 0, 0)
    loads = []
    for _ in range(arguments.rounds):
        limits = limits.best(Limits.measure(arguments.threads, repeats=6))
        loads.append(os.getloadavg()[0])
        for r in rows:
            times[r] += [model.run(r, clock(arguments.threads)) for _ in range(8 if r <= 64 else 2)]
    print(f"{limits}; load average {min(loads):.1f} ... {max(loads):.1f}")
    results = [line(model, r, times[r], limits) for r in rows]
    if arguments.json:
        report = {"limits": vars(limits), "isa": lib.isa(), "loads": loads, "rows": results}
        Path(arguments.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


def line(model: Model, rows: int, times: list[float], limits: Limits) -> dict[str, float]:
    best, median = min(times), statistics.median(times)
    read, rate = model.nbytes / best, model.flops(rows) / best
    print(
        f"M={rows:<5} {best * 1e3:9.2f} ms (median {median * 1e3:9.2f})  {read / 1e9:5.1f} GB/s = {read / limits.read:4.0%} of read  "
        f"{rate / 1e12:6.3f} TFLOP/s = {rate / limits.loop:4.0%} of loop, {rate / limits.matmul:4.0%} of matmul"
    )
    return {"rows": rows, "best_s": best, "median_s": median, "bytes_per_s": read, "flops_per_s": rate}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--isa", choices=lib.ISAS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
