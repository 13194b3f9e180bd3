"""Compiles src/*.cpp into one shared library with the system's C++ compiler. Standard library only: setup.py loads it by its path.

A file's name says for which instruction set it is compiled (`linear_avx2.cpp`; see ISA_FLAGS and src/dispatch.h); those files are left
out on other processors than x86-64."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fno-exceptions", "-fno-rtti", "-fno-math-errno",
    "-ffp-contract=off",  # a multiplication and an addition become one operation only where the source says so
    "-Wall", "-Wextra",
    "-Wno-maybe-uninitialized",  # g++ 12 means its own intrinsics headers
)  # fmt: skip

_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mprefer-vector-width=512")
_AVX512BF16 = (*_AVX512, "-mavx512vnni", "-mavx512bf16")
AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
ISA_FLAGS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512bf16": _AVX512BF16,
    "amx": (*_AVX512BF16, *AMX_FLAGS),
}
"""Compilers that don't know AMX_FLAGS (g++ before 11) compile those files without them; the library then has no level `amx`."""


NO_COMPILER = "no C++ compiler: neither $CXX nor g++, clang++ or c++ was found"


class BuildError(Exception):
    """There is no compiler, or it refused; the text is its own."""


def compiler() -> list[str] | None:
    """The command of the C++ compiler: $CXX, else g++, else clang++, else c++; None when there is none."""
    if own := os.environ.get("CXX"):
        command = shlex.split(own)
        return command if command and shutil.which(command[0]) else None
    return next(([path] for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)


def units(sources: Path = SOURCES) -> list[tuple[Path, tuple[str, ...]]]:
    """What is compiled on this machine: (file, its flags), by name."""
    found = []
    for path in sorted(sources.glob("*.cpp")):
        isa = path.stem.rpartition("_")[2]
        if isa not in ISA_FLAGS:
            found.append((path, FLAGS))
        elif platform.machine().lower() in ("x86_64", "amd64"):
            found.append((path, (*FLAGS, *ISA_FLAGS[isa])))
    return found


def source_key(sources: Path = SOURCES) -> str:
    """16 hexadecimal digits that stand for the sources, the flags and the kind of processor."""
    digest = hashlib.sha256(platform.machine().encode())
    for path, flags in units(sources):
        digest.update(f"\n{path.name} {' '.join(flags)}\n".encode())
    for path in sorted(p for p in sources.iterdir() if p.suffix in (".cpp", ".h")):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler_key(command: list[str]) -> str:
    """8 hexadecimal digits that stand for the compiler and its version. Raises BuildError when it cannot say its version."""
    return hashlib.sha256(_checked([*command, "--version"]).encode()).hexdigest()[:8]


def file_name(key: str) -> str:
    return f"libtokenbus_cpu.{key}.so"


def build(target: Path, sources: Path = SOURCES, extra: tuple[str, ...] = ()) -> str:
    """Compile to `target`, whose folder exists; returns the compiler's warnings. Raises BuildError.

    extra: flags for compiling and linking, after the usual ones (sanitizers)."""
    command = compiler()
    if command is None:
        raise BuildError(NO_COMPILER)
    with tempfile.TemporaryDirectory(prefix="tokenbus-build-") as folder:
        unknown = () if _accepts(command, AMX_FLAGS, folder) else AMX_FLAGS

        def one(unit: tuple[Path, tuple[str, ...]]) -> tuple[str, str]:
            path, flags = unit
            flags = tuple(flag for flag in flags if flag not in unknown)
            made = f"{folder}/{path.stem}.o"
            return made, _checked([*command, *flags, *extra, "-c", str(path), "-o", made])

        with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as workers:
            results = list(workers.map(one, units(sources)))
        objects, said = [made for made, _ in results], "".join(text for _, text in results)
        return said + _checked([*command, "-shared", "-pthread", *extra, *objects, "-o", str(target)])


def _accepts(command: list[str], flags: tuple[str, ...], folder: str) -> bool:
    """Whether the compiler knows them."""
    empty = Path(folder, "empty.cpp")
    empty.write_text("", encoding="utf-8")
    try:
        _checked([*command, *flags, "-c", str(empty), "-o", f"{folder}/empty.o"])
    except BuildError:
        return False
    return True


def _checked(command: list[str]) -> str:
    """Run it; returns what it printed. Raises BuildError with the end of that when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout + done.stderr
