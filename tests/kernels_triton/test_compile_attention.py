"""The attention kernels compile for a GPU of compute capability 9.0 (sm_90), without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = 227 * 1024
"""Bytes of shared memory that a program can have there."""


def test_every_kernel_compiles_for_sm_90(tmp_path):
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_attention.py"))],
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
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
