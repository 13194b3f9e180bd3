"""The attention kernels compile for a GPU of compute capability 9.0 (sm_90), without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SHARED = 227 * 1024
"""Bytes of shared memory that a program can have there."""


def compiled(folder: Path, *more: str) -> dict[str, dict[str, Any]]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_attention.py")), *more],
        env={**env, "TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=500 if more else 110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if "skip" in found:
        pytest.skip(found["skip"])
    kernels = {name.split(": ")[1] for name in found}
    assert kernels == {"attention_kernel", "merge_kernel", "kv_write_kernel"}
    for name, made in found.items():
        assert made["cubin"] > 0, name
        assert made["shared"] <= SHARED, name
        assert not any(made["spills"] or ()), f"{name} spills registers in a loop"
    return found


def check(found: dict[str, dict[str, Any]], *names: str) -> None:
    for name in names:
        made = found[f"{name}: attention_kernel"]
        assert made["products"] == ("mma" if name.startswith("decode") else "wgmma"), name
        assert set(made["copies"]) == {4, 16}, f"{name}: K and V in 16 bytes, block tables and scales in 4"
        assert 128 in made["loads"], f"{name}: queries"
        assert made["slow"] == 0, name


def test_what_the_compiler_makes_of_it_for_sm_90(tmp_path):
    found = compiled(tmp_path)
    check(found, "bfloat16", "decode, fp8")
    assert 128 in found["bfloat16: merge_kernel"]["loads"]
    assert found["bfloat16: kv_write_kernel"]["loads"][-1] == 128


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_other_kind_compiles_for_sm_90(tmp_path):
    found = compiled(tmp_path, "--more")
    check(found, "decode", "prompt")
    assert found["int8: attention_kernel"]["slow"] == 0
    assert found["float32: attention_kernel"]["products"] == ""
    assert found["prompt, fp8: attention_kernel"]["products"] == found["prompt, wide: attention_kernel"]["products"] == "wgmma"
