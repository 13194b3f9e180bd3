"""The kernels as Triton compiles them for Hopper: whether it does, and with which instructions. It needs no GPU; it measures nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MMA = r"(?:wgmma|mma)\.\S*"


def compiled(folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    """{name: {"ptx": text, "cubin": bytes, "shared": bytes}} of specs in compile_matmul.py."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(folder)
    script = Path(__file__).with_name("compile_matmul.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *more],
        env=env,
        capture_output=True,
        text=True,
        timeout=500 if more else 110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "reason" in found:
        pytest.skip(found["reason"])
    for name, kernel in found.items():
        assert ".target sm_90a" in kernel["ptx"], name
        assert kernel["cubin"] > 1000, name
        assert kernel["shared"] <= 227 * 1024, name
        if not name.startswith("quantize"):
            copies = set(re.findall(r"cp\.async\.c\S+ \[[^]]*\], \[[^]]*\], (0x\w+)", kernel["ptx"]))
            least = 4 if "group=32" in name else 8 if "_weight" in name else 16
            assert all(int(copy, 16) >= least for copy in copies), name
    return found


def runs_on_tensor_cores(kernel: dict[str, Any], instruction: str) -> bool:
    return re.search(MMA + instruction, kernel["ptx"]) is not None


def stays_float32(kernel: dict[str, Any]) -> bool:
    return "tf32" not in kernel["ptx"] and re.search(r"fma\.rn\.f32", kernel["ptx"]) is not None


def test_some_of_each_kind_compile_for_hopper(tmp_path):
    """With the instructions that they are for. Operands come in 16 bytes at a time, weights that are widened in registers in 8."""
    found = compiled(tmp_path)
    assert len(found) == 8
    for name, instruction in (
        ("matmul_invariant bf16", r"f32\.bf16\.bf16"),
        ("matmul m=1 bf16", r"f32\.bf16\.bf16"),
        ("fp8_matmul m=4096", r"f32\.e4m3\.e4m3"),
        ("int8_weight m=1 bf16", r"f32\.bf16\.bf16"),
        ("int4_weight m=1 group=128 fp16", r"f32\.f16\.f16"),
    ):
        assert runs_on_tensor_cores(found[name], instruction), name
    assert stays_float32(found["matmul_invariant fp32"])
    assert "fma." not in found["quantize fp8e4nv"]["ptx"], "activations are scaled before they are rounded"
    even, tail = (
        set(re.findall(MMA + r"bf16\.bf16", found[name]["ptx"])) for name in ("matmul_invariant bf16", "matmul tail bf16")
    )
    assert even == tail, "the tail of K is the same product: a row's sum must not depend on which of the two was compiled"
    assert len(even) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_all_compile_for_hopper(tmp_path):
    found = compiled(tmp_path, "--all")
    assert len(found) == 21
    for name, instruction in (
        ("block_fp8 m=4096", r"f32\.e4m3\.e4m3"),
        ("matmul_invariant fp16", r"f32\.f16\.f16"),
        ("int8_matmul m=4096", r"s32\.s8\.s8"),
        ("int4_weight m=1 group=32 bf16", r"f32\.bf16\.bf16"),
        ("fp8_matmul m=1", r"f32\.f16\.f16"),
    ):
        assert runs_on_tensor_cores(found[name], instruction), name
    for name in ("int8_weight m=1 fp32", "int4_weight m=1 group=32 fp32"):
        assert stays_float32(found[name]), name
    assert "fma." not in found["quantize i8"]["ptx"]
