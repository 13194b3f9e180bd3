"""`python -m gpu.device`: what there is to measure, as JSON. Asked in a process of its own, so that the suite itself holds no device."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any


def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def driver() -> str:
    """As nvidia-smi says; "" where it can't be asked."""
    if shutil.which("nvidia-smi") is None:
        return ""
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


def describe() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "card": "",
        "driver": driver(),
        "versions": {"Python": platform.python_version(), "torch": torch.__version__}
        | {name: version_of(name) for name in ("triton", "transformers")},
    }
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        facts |= {
            "card": card.name,
            "memory": card.total_memory,
            "processors": card.multi_processor_count,
            "l2": card.L2_cache_size,
            "capability": f"{card.major}.{card.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


if __name__ == "__main__":
    print(json.dumps(describe()))
