"""The kernels as Triton compiles them for Hopper: whether it does, and with which instructions. It needs no GPU; it measures nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MMA = r"(?:wgmma|mma)\.\S*"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """{name: {"ptx": text, "cubin": bytes, "shared": bytes}} of every spec in compile_matmul.py."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compile_matmul.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=env, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "reason" in found:
        pytest.skip(found["reason"])
    return found


@pytest.mark.slow
def test_all_compile_for_hopper(kernels):
    assert len(kernels) == 21
    for name, kernel in kernels.items():
        assert ".target sm_90a" in kernel["ptx"], name
        assert kernel["cubin"] > 1000, name
        assert kernel["shared"] <= 227 * 1024, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "instruction"),
    [
        ("matmul_invariant bf16", r"f32\.bf16\.bf16"),
        ("matmul_invariant fp16", r"f32\.f16\.f16"),
        ("matmul m=1 bf16", r"f32\.bf16\.bf16"),
        ("matmul tail bf16", r"f32\.bf16\.bf16"),
        ("int8_matmul m=4096", r"s32\.s8\.s8"),
        ("fp8_matmul m=4096", r"f32\.e4m3\.e4m3"),
        ("block_fp8 m=4096", r"f32\.e4m3\.e4m3"),
        ("int8_weight m=1 bf16", r"f32\.bf16\.bf16"),
        ("int4_weight m=1 group=128 fp16", r"f32\.f16\.f16"),
        ("int4_weight m=1 group=32 bf16", r"f32\.bf16\.bf16"),
    ],
)
def test_products_run_on_tensor_cores_and_are_summed_in_full(kernels, kernel, instruction):
    assert re.search(MMA + instruction, kernels[kernel]["ptx"])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["matmul_invariant fp32", "int8_weight m=1 fp32", "int4_weight m=1 group=32 fp32"])
def test_float32_never_becomes_tf32(kernels, kernel):
    assert "tf32" not in kernels[kernel]["ptx"]
    assert re.search(r"fma\.rn\.f32", kernels[kernel]["ptx"])


@pytest.mark.slow
def test_the_tail_of_k_is_the_same_product(kernels):
    """A row's sum must not depend on which of the two was compiled."""
    even, tail = (
        set(re.findall(MMA + r"bf16\.bf16", kernels[name]["ptx"])) for name in ("matmul_invariant bf16", "matmul tail bf16")
    )
    assert even == tail
    assert len(even) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["quantize i8", "quantize fp8e4nv"])
def test_activations_are_scaled_before_they_are_rounded(kernels, kernel):
    assert "fma." not in kernels[kernel]["ptx"]
