from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenbus.kernels.cpu import build, lib

TINY = 'extern "C" int answer(void) { return 42; }\n'


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(TINY, encoding="utf-8")
    return folder


@pytest.fixture
def fresh(monkeypatch, tmp_path, sources):
    """`lib` as in a new process, with an empty cache and sources that compile in no time."""
    monkeypatch.setenv("TOKENBUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lib._Loading, "done", False)
    monkeypatch.setattr(lib._Loading, "library", None)
    monkeypatch.setattr(lib._Loading, "reason", "")
    for name in ("source_key", "build"):
        original = getattr(build, name)
        monkeypatch.setattr(build, name, lambda *a, of=original, **k: of(*a, sources=sources, **k))
    monkeypatch.setattr(lib, "SIGNATURES", {"answer": ((), ctypes.c_int)})
    return sources


def compiled(monkeypatch):
    """Counts the builds from here on."""
    calls = []
    original = build.build
    monkeypatch.setattr(build, "build", lambda target: (calls.append(target), original(target))[1])
    return calls


def test_compiles_once_and_again_when_the_sources_change(fresh, monkeypatch, tmp_path):
    calls = compiled(monkeypatch)
    first = lib.find_or_build()
    assert ctypes.CDLL(str(first)).answer() == 42
    assert first.parent == tmp_path / "cache" / "kernels"
    assert lib.find_or_build() == first
    assert len(calls) == 1
    (fresh / "tiny.cpp").write_text(TINY.replace("42", "43"), encoding="utf-8")
    second = lib.find_or_build()
    assert ctypes.CDLL(str(second)).answer() == 43
    assert len(calls) == 2
    assert [p for p in first.parent.iterdir() if not p.name.startswith(".")] in ([first, second], [second, first])


def test_load_is_decided_once(fresh, monkeypatch):
    calls = compiled(monkeypatch)
    library = lib.load()
    assert library is not None
    assert library.c.answer() == 42
    assert lib.load() is library
    assert lib.unavailable_reason() == ""
    assert len(calls) == 1


def test_no_compiler_is_a_reason(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert lib.load() is None
    assert "no C++ compiler" in lib.unavailable_reason()
    with pytest.raises(RuntimeError, match="not available: no C\\+\\+ compiler"):
        lib.isa()


def test_a_compiler_that_fails_is_a_reason(fresh, monkeypatch, tmp_path):
    (fresh / "tiny.cpp").write_text("this is no C++\n", encoding="utf-8")
    assert lib.load() is None
    assert "tiny.o failed" in lib.unavailable_reason()
    assert "error" in lib.unavailable_reason()
    assert [p for p in (tmp_path / "cache" / "kernels").iterdir() if p.suffix == ".so"] == []


def test_a_library_that_cannot_be_loaded_is_a_reason(fresh):
    path = lib.find_or_build()
    path.write_bytes(b"no library")
    assert lib.load() is None
    assert path.name in lib.unavailable_reason()


def test_the_installed_library_comes_first(fresh, monkeypatch, tmp_path):
    """And needs no compiler; one of other sources is not taken."""
    package = tmp_path / "installed"
    package.mkdir()
    monkeypatch.setattr(lib, "__file__", str(package / "lib.py"))
    (package / build.file_name("0123456789abcdef")).write_bytes(b"of other sources")
    assert lib.find_or_build().parent != package
    installed = package / build.file_name(build.source_key())
    build.build(installed)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert lib.find_or_build() == installed


def test_keys(sources):
    key = build.source_key(sources)
    assert len(key) == 16
    assert build.source_key(sources) == key
    (sources / "tiny.h").write_text("// a header\n", encoding="utf-8")
    assert build.source_key(sources) != key
    command = build.compiler()
    assert command is not None
    assert len(build.compiler_key(command)) == 8
    with pytest.raises(build.BuildError):
        build.compiler_key(["no-such-compiler"])


def test_flags_follow_the_file_name(sources, monkeypatch):
    for name in ("linear_avx2.cpp", "linear_avx512bf16.cpp", "linear_scalar.cpp", "notes.txt"):
        (sources / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    flags = {path.name: flags for path, flags in build.units(sources)}
    assert list(flags) == ["linear_avx2.cpp", "linear_avx512bf16.cpp", "linear_scalar.cpp", "tiny.cpp"]
    assert flags["tiny.cpp"] == flags["linear_scalar.cpp"] == build.FLAGS
    assert flags["linear_avx2.cpp"] == (*build.FLAGS, "-mavx2", "-mfma", "-mf16c")
    assert "-mavx512bf16" in flags["linear_avx512bf16.cpp"]
    monkeypatch.setattr(build.platform, "machine", lambda: "aarch64")
    assert [path.name for path, _ in build.units(sources)] == ["linear_scalar.cpp", "tiny.cpp"]


def test_a_compiler_without_amx_leaves_it_out(sources, tmp_path, monkeypatch):
    """g++ before 11 refuses its flags: those files are compiled without them, and the library says so."""
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "AMX_FLAGS", ("-mno-such-thing",))
    monkeypatch.setitem(build.ISA_FLAGS, "amx", (*build.ISA_FLAGS["avx512bf16"], "-mno-such-thing"))
    for name in ("cpuid.cpp", "linear_amx.cpp", "dispatch.h", "linear_kernels.h", "linear.h", "memory.h"):
        (sources / name).write_bytes((build.SOURCES / name).read_bytes())
    build.build(tmp_path / "tiny.so", sources)
    made = ctypes.CDLL(str(tmp_path / "tiny.so"))
    assert ctypes.c_int.in_dll(made, "tb_amx_compiled").value == 0
    assert made.tb_isa_best() < lib.ISAS.index("amx")


def test_loading_imports_neither_torch_nor_numpy():
    code = "import sys, tokenbus.kernels.cpu.lib as lib; lib.load(); print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"CXX": "no"}
    )
    assert done.stdout.strip() == "[]"


def test_the_sources_travel_with_the_package():
    root = Path(lib.__file__).parents[2]
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    assert '"tokenbus.kernels.cpu" = ["src/*.cpp", "src/*.h"]' in text
    assert {p.suffix for p in build.SOURCES.iterdir()} == {".cpp", ".h"}


def test_instruction_sets(library):
    names = lib.available_isas()
    assert names == lib.ISAS[: len(names)]
    assert lib.isa() in names
    with pytest.raises(ValueError, match="none of this machine's"):
        lib.use_isa("mmx")
    assert library.c.tb_use_isa(-1) == -1
    assert library.c.tb_use_isa(len(lib.ISAS)) == -1
