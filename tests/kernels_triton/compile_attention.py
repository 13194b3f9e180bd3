"""Compiles the attention kernels for a Hopper GPU, which need not be there; run by test_compile_attention.py without TRITON_INTERPRET.

Prints a JSON object: {"skip": reason} or, by case, {"shared": bytes of shared memory, "cubin": bytes of machine code}."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from tokenbus.kernels.triton import attention, kv_write
from tokenbus.kernels.triton.attention import AttentionPlan, Launch, Tiling

TARGET = GPUTarget("cuda", 90, 32)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"heads": 32, "kv_heads": 4, "dim": 128, "dtype": BF16},
    "float16, window, soft-cap": {
        "heads": 8,
        "kv_heads": 8,
        "dim": 80,
        "dtype": F16,
        "window": 100,
        "softcap": 50.0,
        "block_size": 128,
    },
    "int8": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16, "cache_dtype": torch.int8},
    "fp8, wide": {"heads": 8, "kv_heads": 1, "dim": 256, "dtype": BF16, "cache_dtype": torch.float8_e4m3fn},
    "float32": {"heads": 9, "kv_heads": 3, "dim": 64, "dtype": F32},
}


def compile_launch(launch: Launch) -> dict[str, int]:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else mangle_type(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif kind.startswith("*") or (isinstance(value, int) and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    made = triton.compile(source, target=TARGET, options=dict(launch.options))
    return {"shared": made.metadata.shared, "cubin": len(made.asm["cubin"])}


def case(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    **options: Any,
) -> list[Launch]:
    row = dim if cache_dtype is None else dim + attention.SCALE_BYTES
    caches = [torch.zeros(64, block_size, kv_heads, row, dtype=cache_dtype or dtype) for _ in "kv"]
    q, k = torch.zeros(1, heads, dim, dtype=dtype), torch.zeros(1, kv_heads, dim, dtype=dtype)
    plan = AttentionPlan([0, 1], [1024], [list(range(64))], torch.device("cpu"))
    tiling = Tiling.choose(dim, heads // kv_heads, dtype, one_byte=cache_dtype is not None)
    window, softcap = options.get("window"), options.get("softcap")
    found = attention.launches(torch.empty_like(q), q, *caches, plan, 1.0, window, softcap, tiling)
    return [*found, kv_write.launch(k, k, *caches, torch.zeros(1, dtype=torch.int64))]


def main() -> None:
    assert not attention.INTERPRETED
    if "nvidia" not in backends:
        print(json.dumps({"skip": "this build of triton has no compiler for NVIDIA's GPUs"}))
        return
    found = {}
    for name, options in CASES.items():
        for launch in case(**options):
            found[f"{name}: {launch.kernel.__name__}"] = compile_launch(launch)
            print(name, launch.kernel.__name__, file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
