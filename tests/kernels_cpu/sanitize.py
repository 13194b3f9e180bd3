"""Runs this folder's tests with the kernels built under one of g++'s sanitizers: out of bounds, undefined, or a race ends the run.

    python tests/kernels_cpu/sanitize.py [address|undefined|thread] [pytest's arguments]

The tests' tensors come from malloc, which the address sanitizer watches; packed weights lie in mappings of their own, which it doesn't.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tokenbus.kernels.cpu import build, lib

HERE = Path(__file__).parent
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # the interpreter's own
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0",  # test_pool.py forks
}


def main(kind: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libtokenbus_cpu.so"
        build.build(library, extra=(f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-g", "-O1", "-fno-omit-frame-pointer"))
        command = build.compiler() or ["g++"]
        runtime = subprocess.run([*command, f"-print-file-name={RUNTIMES[kind]}"], capture_output=True, text=True, check=True)
        environment = {**os.environ, **OPTIONS, "LD_PRELOAD": runtime.stdout.strip()}
        inner = [sys.executable, str(Path(__file__).resolve()), "--library", str(library), *arguments]
        return subprocess.run(inner, env=environment, check=False).returncode


def run_tests(library: str, arguments: list[str]) -> int:
    lib._Loading.library, lib._Loading.done = lib._open(Path(library)), True
    return pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--timeout=1200", *(arguments or [str(HERE)])])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--library"]:
        sys.exit(run_tests(sys.argv[2], sys.argv[3:]))
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "address", sys.argv[2:]))
