"""scripts/gpu pack, and scripts/gpu on a machine that has only what was packed."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gpu import pack

ROOT = Path(__file__).parents[2]


def names(requirements):
    return {pack.canonical(pack._name(requirement)) for requirement in requirements}


def make_wheel(folder, name, version, files):
    """A wheel of these files that pip installs."""
    info = f"{name}-{version}.dist-info"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}")
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return wheel


@pytest.fixture
def elsewhere(tmp_path):
    """A tree with the script and the suite, a package of two files, and a packed folder; without .venv."""
    root = tmp_path / "tree"
    shutil.copytree(ROOT / "bench" / "gpu", root / "bench" / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu", root / "scripts" / "gpu")
    shutil.copy(ROOT / "pyproject.toml", root / "pyproject.toml")
    for top in ("core", "kernels", "plugins", "testing"):
        (root / top).mkdir()
    (root / "__init__.py").write_text("MARK = 'from the wheel'\n", encoding="utf-8")
    (root / "core" / "one.py").write_text("ONE = 1\n", encoding="utf-8")
    (root / ".gpu").mkdir()
    files = {"tokenbus/__init__.py": "MARK = 'from the wheel'\n", "tokenbus/core/one.py": "ONE = 1\n"}
    make_wheel(root / ".gpu", "tokenbus", "0.1.0", files)
    return root


def run(root, *words, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        ["scripts/gpu", *words], cwd=root, capture_output=True, text=True, check=False, timeout=110,
        env={**kept, "PYTHON": sys.executable, **environment},
    )  # fmt: skip


def test_what_is_packed_is_ours_and_the_tests_tools_and_nothing_large():
    packed = names(pack.requirements())
    assert {"msgspec", "structlog", "gguf", "llguidance", "pytest", "hypothesis"} <= packed
    assert not packed & pack.LARGE
    declared = names(pack.tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    assert declared <= packed | pack.LARGE
    assert declared >= pack.LARGE, "nothing is left out that isn't asked for"


def test_a_packed_folder_is_used_where_there_is_no_venv_and_leaves_nothing(elsewhere, tmp_path):
    (elsewhere / "bench" / "gpu" / "suite.py").write_text(
        "import tokenbus, sys\ndef main():\n    print(tokenbus.MARK, tokenbus.__file__)\n    return 7\n", encoding="utf-8"
    )
    (tmp_path / "temporary").mkdir()
    done = run(elsewhere, "copy", TMPDIR=str(tmp_path / "temporary"))
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith(f"from the wheel {tmp_path / 'temporary'}")
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("change", ["other", "new", "gone"])
def test_a_tree_that_has_changed_since_is_refused(elsewhere, change):
    path = elsewhere / "core" / "one.py"
    if change == "other":
        path.write_text("ONE = 2\n", encoding="utf-8")
    elif change == "new":
        (elsewhere / "plugins" / "two.py").write_text("", encoding="utf-8")
    else:
        path.unlink()
    done = run(elsewhere, "copy")
    assert done.returncode == 2
    assert "run scripts/gpu pack again" in done.stderr
    assert ("plugins/two.py" if change == "new" else "core/one.py") in done.stderr


def test_a_folder_without_our_wheel_is_refused(elsewhere):
    for wheel in (elsewhere / ".gpu").glob("*.whl"):
        wheel.unlink()
    done = run(elsewhere, "copy")
    assert done.returncode == 2
    assert "0 wheels of Tokenbus" in done.stderr


def test_only_what_is_missing_or_too_old_is_installed(tmp_path, monkeypatch):
    own = make_wheel(tmp_path, "tokenbus", "0.1.0", {})
    made = {
        name: make_wheel(tmp_path, name, "9.0", {}) for name in ("msgspec", "structlog", "prometheus_client", "something_else")
    }
    there = {"msgspec": "0.23.0", "structlog": "1.0", "prometheus-client": "0.21"}

    def version(name):
        if name not in there:
            raise pack.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(pack.metadata, "version", version)
    assert set(pack.missing(tmp_path)) == {own, made["structlog"], made["something_else"]}


def test_a_pack_that_is_too_large_is_refused(tmp_path, monkeypatch):
    def download(wheels, python, machine):
        (wheels / "big-1.0-py3-none-any.whl").write_bytes(bytes(2000))

    monkeypatch.setattr(pack, "download", download)
    monkeypatch.setattr(pack, "build", lambda tree, wheels: None)
    monkeypatch.setattr(pack, "MOST_BYTES", 1000)
    with pytest.raises(pack.PackError, match="the largest is big-"):
        pack.pack(tmp_path / "packed", "3.12", "x86_64")
    assert not (tmp_path / "packed").exists()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_pack_holds_a_wheel_of_this_tree_with_its_entry_points(tmp_path):
    folder = tmp_path / "packed"
    assert pack.main(["--dir", str(folder)]) == 0
    wheel = pack.wheel_of_tree(folder)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert pack.changed(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        entry_points = next(n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "attention.triton" in archive.read(entry_points).decode()
    found = {pack.canonical(path.name.split("-")[0]) for path in folder.glob("*.whl")}
    assert names(pack.requirements()) <= found
    assert not found & pack.LARGE
    assert sum(path.stat().st_size for path in folder.iterdir()) < pack.MOST_BYTES
    assert all("cp312" in p.name or "abi3" in p.name or "none-any" in p.name for p in folder.glob("*.whl"))
