"""Wheels for a machine with a GPU and without internet, which has torch, triton and transformers, and lacks what is ours alone.

    scripts/gpu pack [--dir .gpu] [--python 3.12]      here: downloads the wheels, and makes one of this tree
    scripts/gpu ...                                    there: installs those that are missing into a temporary folder

The folder holds what pyproject.toml asks for beyond LARGE, the tests' tools, what these need themselves, and pack.json. Nothing that the
other machine has is replaced: a wheel is used only where the package is missing or too old. The wheel of this tree brings the entry points
by which plugins are found; it has no C++ kernels, which a GPU does not need. A tree that has changed since is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ".gpu"
MANIFEST = "pack.json"
MOST_BYTES = 40 * 2**20
LARGE = frozenset(
    {"torch", "triton", "transformers", "tokenizers", "huggingface-hub", "safetensors", "numpy", "tqdm", "jinja2"}
)
"""What every machine that runs models has."""
TOOLS = ("pytest", "pytest-timeout", "hypothesis")
GLIBC = 35
"""The other machine has at least this one (2.35), so wheels for newer ones are left alone; pip takes only platforms that it is told."""
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(GLIBC, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", FOLDER, "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "*.so", "recordings"
)


class PackError(Exception):
    """The text says what to do."""


def canonical(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements() -> list[str]:
    """What is downloaded, with the versions that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dev = project["optional-dependencies"]["dev"]
    tools = [r for r in dev if canonical(_name(r)) in TOOLS]
    return [r for r in project["dependencies"] if canonical(_name(r)) not in LARGE] + tools


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None
    return found[0]


def pack(folder: Path, python: str, machine: str) -> None:
    """Fill the folder anew. Raises PackError."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-pack-") as temporary:
        wheels, tree = Path(temporary, "wheels"), Path(temporary, "tree")
        wheels.mkdir()
        download(wheels, python, machine)
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        build(tree, wheels)
        files = sorted(wheels.iterdir())
        total = sum(path.stat().st_size for path in files)
        if total > MOST_BYTES:
            large = max(files, key=lambda path: path.stat().st_size)
            raise PackError(f"the wheels have {total / 2**20:.0f} MiB, over {MOST_BYTES >> 20}; the largest is {large.name}")
        from .suite import commit

        manifest = {"commit": commit(), "python": python, "wheels": [path.name for path in files]}
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.whl"), folder / MANIFEST):
            old.unlink(missing_ok=True)
        for path in files:
            shutil.copy(path, folder / path.name)
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    print(f"{folder}: {len(files)} wheels, {total / 2**20:.1f} MiB, for Python {python} on {machine}")


def download(wheels: Path, python: str, machine: str) -> None:
    """What is asked for, with what that needs, except LARGE; pip decides about versions."""
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS]
    words = ["download", "--quiet", "--disable-pip-version-check", "--only-binary=:all:", f"--python-version={python}"]
    words += ["--implementation=cp", *platforms, f"--dest={wheels}"]
    everything = set(requirements())
    alone = {r for r in everything if canonical(_name(r)) == "gguf"}  # it needs nothing but numpy, tqdm and yaml
    for some, more in ((sorted(everything - alone), []), (sorted(alone), ["--no-deps"])):
        done = subprocess.run([sys.executable, "-m", "pip", *words, *more, *some], capture_output=True, text=True, check=False)
        if done.returncode:
            raise PackError(f"pip could not download the wheels:\n{done.stderr.strip()}")
    for path in wheels.glob("*.whl"):
        if canonical(path.name.split("-")[0]) in LARGE:
            path.unlink()


def build(tree: Path, wheels: Path) -> None:
    """A wheel of a copy of the tree, without C++ kernels: then it is for every machine."""
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        f"--wheel-dir={wheels}",
        ".",
    ]
    environment = {**os.environ, "CXX": "no-compiler-for-this-wheel"}
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise PackError(f"pip could not make a wheel of this tree:\n{done.stderr.strip()}")


def wheel_of_tree(folder: Path) -> Path:
    """Raises PackError when there is none, or several."""
    found = sorted(folder.glob("tokenbus-*.whl"))
    if len(found) != 1:
        raise PackError(f"{folder} holds {len(found)} wheels of Tokenbus; run scripts/gpu pack")
    return found[0]


def changed(wheel: Path, root: Path = ROOT) -> list[str]:
    """Files of the package that are not the tree's, and modules of the tree that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {n.removeprefix("tokenbus/"): archive.read(n) for n in archive.namelist() if n.startswith("tokenbus/")}
    different = [n for n, content in packed.items() if not (root / n).is_file() or (root / n).read_bytes() != content]
    real = {
        str(path.relative_to(root)) for top in ("core", "kernels", "plugins", "testing") for path in (root / top).rglob("*.py")
    }
    return sorted({*different, *(real - packed.keys())})


def check_tree(folder: Path) -> None:
    """Raises PackError unless the folder's wheel is of this tree."""
    if different := changed(wheel_of_tree(folder)):
        raise PackError(f"the wheel of Tokenbus is of another tree (see {different[0]}): run scripts/gpu pack again")


def missing(folder: Path) -> Iterator[Path]:
    """The wheels whose packages this interpreter lacks, or has in a version that pyproject.toml does not allow; and that of the tree."""
    from pip._vendor.packaging.requirements import Requirement

    bounds = {canonical(r.name): r.specifier for r in map(Requirement, requirements())}
    own = wheel_of_tree(folder)
    for path in sorted(folder.glob("*.whl")):
        name = canonical(path.name.split("-")[0])
        if path == own:
            yield path
            continue
        try:
            there = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield path
            continue
        if name in bounds and not bounds[name].contains(there, prereleases=True):
            yield path


def manifest() -> dict[str, Any]:
    path = ROOT / FOLDER / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def packed_commit() -> str:
    """Of the tree that was packed; "unknown" without a pack."""
    return manifest().get("commit", "unknown")


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / FOLDER, help=f"default: {FOLDER} in this tree, where scripts/gpu looks"
    )
    parser.add_argument("--python", default="3.12", help="of the other machine")
    parser.add_argument("--machine", default="x86_64", help="its processor")
    parser.add_argument("--missing", action="store_true", help="list the wheels to install here, instead of packing")
    options = parser.parse_args(words)
    try:
        if options.missing:
            check_tree(options.dir)
            print("\n".join(map(str, missing(options.dir))))
        else:
            pack(options.dir, options.python, options.machine)
    except PackError as error:
        print(f"scripts/gpu pack: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
