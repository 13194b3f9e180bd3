"""Compiles the kernels of the matrix products for sm_90 (Hopper), with the stored sizes, and prints what came of it as JSON.

With `--all`, of every kind; otherwise of those that differ most. It needs no GPU. A process of its own, as the tests beside it run in
Triton's interpreter."""

from __future__ import annotations

import json
import sys

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tokenbus.kernels.triton.block_fp8_matmul import block_fp8_kernel
from tokenbus.kernels.triton.configs import config_for
from tokenbus.kernels.triton.matmul import matmul_kernel
from tokenbus.kernels.triton.quantized_matmul import quantize_kernel, w8a8_kernel
from tokenbus.kernels.triton.weight_only_matmul import int4_weight_kernel, int8_weight_kernel

SOME = (
    "matmul_invariant bf16", "matmul_invariant fp32", "matmul m=1 bf16", "matmul tail bf16", "fp8_matmul m=4096", "int8_weight m=1 bf16",
    "int4_weight m=1 group=128 fp16", "quantize fp8e4nv",
)  # fmt: skip
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "i8": 8, "fp8e4nv": 8}
PLAIN = {"HAS_BIAS": True, "EVEN_K": True, "WIDEN": False}


def product(kernel, name, pointers, constants, m, x_type):
    shape = {"n": 4096, "k": 4096, "bits": BITS[x_type]} | ({} if name.endswith("_invariant") else {"m": m})
    return kernel, pointers, constants | config_for("", name, **shape)


def specs():
    for x in ("bf16", "fp16", "fp32"):
        pointers = {"x_ptr": x, "weight_ptr": x, "bias_ptr": x, "y_ptr": x}
        yield f"matmul_invariant {x}", product(matmul_kernel, "matmul_invariant", pointers, PLAIN, 1, x)
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), "bf16")
    for m in (1, 4096):
        yield f"matmul m={m} bf16", product(matmul_kernel, "matmul", pointers, PLAIN, m, "bf16")
    yield "matmul tail bf16", product(matmul_kernel, "matmul_invariant", pointers, PLAIN | {"EVEN_K": False}, 1, "bf16")
    for x, name in (("i8", "int8_matmul"), ("fp8e4nv", "fp8_matmul")):
        pointers = {
            "x_ptr": x,
            "weight_ptr": x,
            "x_scale_ptr": "fp32",
            "weight_scale_ptr": "fp32",
            "bias_ptr": "bf16",
            "y_ptr": "bf16",
        }
        constants = {"HAS_BIAS": True, "INTEGER": x == "i8", "EVEN_K": True}
        for m in (1, 4096):
            yield f"{name} m={m}", product(w8a8_kernel, name, pointers, constants, m, x)
    for x in ("bf16", "fp32"):
        pointers = {"x_ptr": x, "weight_ptr": "i8", "scale_ptr": "fp32", "bias_ptr": x, "y_ptr": x}
        yield f"int8_weight m=1 {x}", product(int8_weight_kernel, "int8_weight_matmul", pointers, PLAIN, 1, x)
    pointers = {"x_ptr": "bf16", "weight_ptr": "i8", "scale_ptr": "fp32", "bias_ptr": "bf16", "y_ptr": "bf16"}
    yield "int8_weight m=4096 bf16", product(int8_weight_kernel, "int8_weight_matmul", pointers, PLAIN, 4096, "bf16")
    for x, m, size in (("fp16", 1, 128), ("bf16", 4096, 128), ("bf16", 1, 32), ("fp32", 1, 32)):
        pointers = {"x_ptr": x, "weight_ptr": "u8", "scale_ptr": "fp16", "zero_ptr": "u8", "bias_ptr": x, "y_ptr": x}
        constants = PLAIN | {"HAS_ZEROS": True, "GROUP_SIZE": size}
        yield (
            f"int4_weight m={m} group={size} {x}",
            product(int4_weight_kernel, "int4_weight_matmul", pointers, constants, m, x),
        )
    pointers = dict.fromkeys(("x_ptr", "weight_ptr"), "fp8e4nv") | dict.fromkeys(("x_scale_ptr", "weight_scale_ptr"), "fp32")
    pointers |= {"bias_ptr": "bf16", "y_ptr": "bf16"}
    constants = {"HAS_BIAS": True, "BLOCK_ROWS": 128, "BLOCK_COLUMNS": 128}
    for m in (1, 4096):
        yield f"block_fp8 m={m}", product(block_fp8_kernel, "fp8_matmul", pointers, constants, m, "fp8e4nv")
    for q in ("i8", "fp8e4nv"):
        constants = {"LIMIT": 127.0 if q == "i8" else 448.0, "INTEGER": q == "i8"}
        constants |= config_for("", "quantize_activations", k=4096)
        yield f"quantize {q}", (quantize_kernel, {"x_ptr": "bf16", "q_ptr": q, "scale_ptr": "fp32"}, constants)


def compiled(kernel, pointers, constants):
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")} | {
        "enable_fp_fusion": kernel is not quantize_kernel
    }
    signature = {
        name: "constexpr" if name in constants else "*" + pointers[name] if name in pointers else "i32"
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in pointers or name.endswith("_stride") or name in {"inputs", "outputs"}
    }
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def main():
    if "nvidia" not in backends:
        print(json.dumps({"reason": "this Triton has no backend for NVIDIA GPUs"}))
        return
    found = {}
    for name, (kernel, pointers, constants) in specs():
        if name not in SOME and "--all" not in sys.argv:
            continue
        binary = compiled(kernel, pointers, dict(constants))
        found[name] = {"ptx": binary.asm["ptx"], "cubin": len(binary.asm["cubin"]), "shared": binary.metadata.shared}
    print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main())
