"""Packages in folders of their own, and Python that sees them."""

from __future__ import annotations

import os
import subprocess
import sys


def path_of(folder):
    """PYTHONPATH with a folder of installed packages before what is there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def run(folder, *words, cwd=None):
    environment = os.environ | {"PYTHONPATH": path_of(folder)}
    return subprocess.run(
        [sys.executable, "-m", *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=110, check=False
    )


def install(sources, target):
    """As `pip install` does, into a folder of its own; what is needed to build is there already."""
    words = ["pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    done = run(target, *words, *map(str, sources))
    assert done.returncode == 0, done.stdout + done.stderr
