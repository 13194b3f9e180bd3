"""The machine's limits, to compare kernels with: read bandwidth, and bf16 rates of a register-only loop and of torch's matmul.

    python bench/cpu_limits.py [--threads N] [--json]

or `Limits.measure` in the same process and minute as what is compared."""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenbus.core.worker.threads import available_cores
from tokenbus.kernels.cpu import build

MATMULS = ((2048, 3072, 576), (2048, 1536, 576), (2048, 4096, 4096))
"""[M, K] x [K, N] as (M, N, K): the best of these counts as torch's rate."""


@dataclass(frozen=True)
class Limits:
    read: float
    """Bytes per second: the best of all passes over `buffer`."""
    loop: float
    """FLOP/s of multiply-adds on registers: bf16 tiles (AMX) or pairs where the processor has them, else float32."""
    matmul: float
    """FLOP/s of torch's best bf16 matmul (oneDNN)."""

    @classmethod
    def measure(cls, threads: int, repeats: int = 12) -> Limits:
        library = _compile()
        buffer = _huge(256 << 20)
        read = min(library.limit_read(buffer.data_ptr(), buffer.nbytes, threads) for _ in range(repeats))
        loop = max(library.limit_multiply(2_000_000, threads) for _ in range(repeats))
        return cls(buffer.nbytes / read, loop, max(_matmul(*shape, threads, repeats) for shape in MATMULS))

    def best(self, other: Limits) -> Limits:
        return Limits(max(self.read, other.read), max(self.loop, other.loop), max(self.matmul, other.matmul))

    def __str__(self) -> str:
        return (
            f"read {self.read / 1e9:.1f} GB/s, register loop {self.loop / 1e12:.3f} TFLOP/s, "
            f"torch bf16 matmul {self.matmul / 1e12:.3f} TFLOP/s"
        )


def clock(threads: int) -> Callable[[], float]:
    """Wall time; for one thread its own processor time, which other processes on the machine disturb little."""
    return time.thread_time if threads == 1 else time.perf_counter


def fastest(work: Callable[[], object], repeats: int, threads: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    now, times = clock(threads), []
    for _ in range(repeats):
        begin = now()
        work()
        times.append(now() - begin)
    return min(times)


def _huge(size: int) -> torch.Tensor:
    """Touched memory in huge pages, as the packed weights have."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory would get small pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).fill_(1)


def _matmul(m: int, n: int, k: int, threads: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    x, w = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    return 2 * m * n * k / fastest(lambda: x @ w, repeats, threads)


def _compile() -> ctypes.CDLL:
    command = build.compiler()
    if command is None:
        raise build.BuildError(build.NO_COMPILER)
    with tempfile.TemporaryDirectory() as folder:
        made = f"{folder}/limits.so"
        source = str(Path(__file__).with_name("cpu_limits.cpp"))
        subprocess.run(
            [*command, "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread", source, "-o", made], check=True
        )
        library = ctypes.CDLL(made)
    library.limit_read.argtypes, library.limit_read.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_double
    library.limit_multiply.argtypes, library.limit_multiply.restype = [ctypes.c_int64, ctypes.c_int], ctypes.c_double
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limits = Limits.measure(options.threads)
    print(json.dumps(vars(limits)) if options.json else limits)


if __name__ == "__main__":
    main()
