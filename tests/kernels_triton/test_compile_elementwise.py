"""The elementwise, sampling and verification kernels compile for a GPU: Triton needs none for that. And one binary serves every batch.

In processes of their own: here Triton interprets, and it decides when a kernel is defined."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SKIP = 77
PROGRAM = """
import sys

ALL = sys.argv[1:] == ["all"]
from triton.backends import backends
from triton.backends.compiler import GPUTarget

if "nvidia" not in backends:
    print("this Triton has no backend for NVIDIA GPUs")
    sys.exit(77)

import torch
import triton
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.runtime.jit import create_function_from_signature


def compiled(kernel, types, constants, warps):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert ".target sm_90" in done.asm["ptx"], kernel
    assert len(done.asm["cubin"]) > 0, kernel
    print(kernel.__name__, constants)


def one_binary(kernel, **arguments):
    # the same for the first of all arguments' values as for the second ones
    bind = create_function_from_signature(kernel.signature, kernel.params, CUDABackend(GPUTarget("cuda", 90, 32)))
    others = dict.fromkeys(kernel.signature.parameters, 0)
    found = [bind(**others | {name: of[i] for name, of in arguments.items()})[1] for i in (0, 1)]
    assert found[0] == found[1], kernel


NUMBERS = torch.zeros(4, 3, dtype=torch.int64)
ANYWHERE = NUMBERS[0], NUMBERS[1]
assert [numbers.data_ptr() % 16 for numbers in ANYWHERE] == [0, 8]
WORD = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16"}
"""
PARTS = {
    "elementwise": """
        from tokenbus.kernels.triton import elementwise as e, kv_write

        one_binary(e.rope_kernel, positions=ANYWHERE)
        for kernel in (e.rms_norm_kernel, e.norm_add_norm_kernel, kv_write.kv_write_kernel):
            one_binary(kernel, rows=(1, 16))
        for dtype, pointer in WORD.items() if ALL else (("bf16", "*bf16"),):
            names = ("x", "residual", "out", "total", "q", "k", "gate", "up", "table", "inner_weight", "q_weight", "k_weight")
            some = {name: pointer for name in names}
            norm = some | {"weight": "*fp32" if dtype == "bf16" else pointer, "eps": "fp32"}
            rope = some | {"positions": "*i64", "cos": "*fp32", "sin": "*fp32", "eps": "fp32"}
            for residual, weight, unit, one in ((1, 1, 0, 1), (1, 1, 1, 0), (0, 1, 1, 1), (0, 0, 0, 1))[: 4 if ALL else 1]:
                constants = {"n": 4000, "HAS_RESIDUAL": bool(residual), "HAS_WEIGHT": bool(weight), "UNIT_OFFSET": bool(unit)}
                sizes = {"ONE_TILE": bool(one), "ROWS": 1 if one else 4, "BLOCK": 4096 if one else 256}
                compiled(e.rms_norm_kernel, norm, constants | sizes, 4)
            compiled(e.norm_add_norm_kernel, norm, {"n": 4000, "UNIT_OFFSET": ALL, "ROWS": 1, "BLOCK": 4096}, 8)
            heads = {"HEADS": 8, "HALF": 64}
            for turned, norm, rest in ((False, False, 0), (False, True, 0), (True, True, 32))[: 3 if ALL else 2]:
                kind = {"INTERLEAVED": turned, "NORM": norm, "REST": rest, "UNIT_OFFSET": ALL}
                compiled(e.rope_kernel, rope, heads | kind, 4)
            for code in range(3 if ALL else 1):
                compiled(e.gated_kernel, some, {"ACTIVATION": code, "BLOCK": 1024}, 4)
            compiled(e.embed_kernel, some | {"ids": "*i64", "scale": "fp32"}, {"SCALED": True, "BLOCK": 1024}, 4)
            compiled(e.softcap_kernel, some | {"out": "*fp32", "cap": "fp32"}, {"BLOCK": 1024}, 4)
    """,
    "sampling": """
        from tokenbus.kernels.triton import philox, sampling_kernels as s, verify as v

        numbers = ("temperatures", "top_ps", "min_ps", "top_ks", "seeds", "positions", "choices")
        one_binary(s.sample_kernel, **dict.fromkeys(numbers, ANYWHERE))
        one_binary(s.filter_kernel, **dict.fromkeys(numbers[:4], ANYWHERE))
        rows = {n: "*fp64" for n in numbers[:3]}
        rows |= {n: "*i64" for n in ("top_ks", "seeds", "positions", "choices", "tokens")}
        rows |= {"logprobs": "*fp32", "states": "*i32", "out": "*fp32"}
        for mode, dtype in ((2, "fp32"), (0, "bf16"), (1, "fp32"))[: 3 if ALL else 1]:
            compiled(s.sample_kernel, rows | {"logits": WORD[dtype]}, {"size": 128256, "LOGPROBS": mode, "BLOCK": 2048}, 16)
        if ALL:
            compiled(s.filter_kernel, rows | {"logits": "*fp32"}, {"size": 50257, "BLOCK": 2048}, 16)
        compiled(philox.words_kernel, rows | {"out": "*i64"}, {"BLOCK": 1024}, 4)
        for ids in ("*i32", "*i64")[0 if ALL else 1 :]:
            types = {n: ids for n in ("drafts", "sampled", "last", "tokens")} | {"draft_start": "*i32", "accepted": "*i32"}
            compiled(v.verify_kernel, types, {"BLOCK": 32}, 1)
    """,
}


@pytest.mark.parametrize("kinds", ["some", pytest.param("all", marks=[pytest.mark.long, pytest.mark.timeout(600)])])
@pytest.mark.parametrize("part", PARTS)
def test_kernels_compile_for_sm_90(part, kinds, tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    program = PROGRAM + textwrap.dedent(PARTS[part])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, kinds],
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110 if kinds == "some" else 500,
        check=False,
    )
    if done.returncode == SKIP:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    assert "_kernel" in done.stdout
