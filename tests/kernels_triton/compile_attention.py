"""Compiles the attention kernels for a Hopper GPU, which need not be there; run by test_compile_attention.py without TRITON_INTERPRET.

Prints a JSON object: {"skip": reason} or, by case and kernel:

    shared      bytes of shared memory                      cubin     bytes of machine code
    products    "wgmma", "mma" or ""                        copies    sizes of asynchronous copies into shared memory, in bytes
    loads       bits of the loads from global memory        slow      conversions that take the slow unit (F2F, I2F)
    spills      loads from local memory in each loop (from a backward branch's target to it); null where there is no disassembler"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from tokenbus.kernels.triton import attention, kv_write
from tokenbus.kernels.triton.attention import AttentionPlan, Tiling
from tokenbus.kernels.triton.launch import Launch

TARGET = GPUTarget("cuda", 90, 32)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
DECODE, DRAFTS, PROMPT = ({"invariant": False, "longest": longest} for longest in (1, 6, None))
CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16},
    "decode, fp8": {"heads": 64, "kv_heads": 8, "dim": 128, "dtype": BF16, "cache_dtype": FP8, "tiling": DECODE},
}
MORE: dict[str, dict[str, Any]] = {
    "decode": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16, "tiling": DECODE},
    "prompt": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16, "tiling": PROMPT},
    "int8": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16, "cache_dtype": torch.int8},
    "float16, window, soft-cap": {
        "heads": 8,
        "kv_heads": 8,
        "dim": 80,
        "dtype": F16,
        "window": 100,
        "softcap": 50.0,
        "block_size": 128,
    },
    "fp8, wide": {"heads": 8, "kv_heads": 1, "dim": 256, "dtype": BF16, "cache_dtype": FP8},
    "float32": {"heads": 9, "kv_heads": 3, "dim": 64, "dtype": F32},
    "drafts, int8": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": F16, "cache_dtype": torch.int8, "tiling": DRAFTS},
    "prompt, fp8": {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": BF16, "cache_dtype": FP8, "tiling": PROMPT},
    "prompt, wide": {"heads": 8, "kv_heads": 4, "dim": 256, "dtype": BF16, "softcap": 50.0, "tiling": PROMPT},
    "decode, wide": {"heads": 8, "kv_heads": 4, "dim": 256, "dtype": BF16, "window": 4096, "tiling": DECODE},
}
"""With `--more`."""
WHOLE = ("bfloat16", "int8", "fp8, wide", "float32")
"""Of these, all kernels; of the others, attention."""


def compile_launch(launch: Launch) -> dict[str, Any]:
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
    ptx = made.asm["ptx"]
    lines = machine_code(made.asm["cubin"])
    return {
        "shared": made.metadata.shared,
        "cubin": len(made.asm["cubin"]),
        "products": next((name for name in ("wgmma", "mma") if f"{name}." in ptx), ""),
        "copies": sorted({int(size, 16) for size in re.findall(r"cp\.async\.c\S+ \[[^]]*\], \[[^]]*\], (0x\w+)", ptx)}),
        "loads": sorted({int(n or 1) * int(bits) for n, bits in re.findall(r"ld\.global(?:\.v(\d))?\.b(\d+)", ptx)}),
        "slow": sum(op.startswith(("F2F.", "I2F")) for _, op, _ in lines or ()),
        "spills": lines and [sum(op == "LDL" for at, op, _ in lines if to <= at <= end) for to, end in loops(lines)],
    }


def machine_code(cubin: bytes) -> list[tuple[int, str, str]] | None:
    """(address, instruction, operands); None without a disassembler (Triton's wheels carry one)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return None
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?(\S+)\s*(.*?);", text, re.MULTILINE)
    return [(int(at, 16), op, rest) for at, op, rest in found]


def loops(lines: list[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """(first, last address) of the innermost ones."""
    back = [(int(to[1], 16), at) for at, op, rest in lines if op == "BRA" and (to := re.search(r"(0x[0-9a-f]+)", rest))]
    back = [(to, at) for to, at in back if to < at]
    return [(to, at) for to, at in back if not any(to <= a and b < at for a, b in back if (a, b) != (to, at))]


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
    tiling = Tiling.choose(dim, heads // kv_heads, dtype, one_byte=cache_dtype is not None, **options.get("tiling", {}))
    window, softcap = options.get("window"), options.get("softcap")
    found = attention.launches(torch.empty_like(q), q, *caches, plan, 1.0, window, softcap, tiling)
    return [*found, kv_write.writing(k, k, *caches, torch.zeros(1, dtype=torch.int64))]


def main() -> None:
    assert not attention.INTERPRETED
    if "nvidia" not in backends:
        print(json.dumps({"skip": "this build of triton has no compiler for NVIDIA's GPUs"}))
        return
    found = {}
    for name, options in (MORE if "--more" in sys.argv else CASES).items():
        for launch in case(**options)[: None if name in WHOLE else 1]:
            found[f"{name}: {launch.kernel.__name__}"] = compile_launch(launch)
            print(name, launch.kernel.__name__, file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
