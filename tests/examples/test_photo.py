"""The example with a photo runs as it stands, and the model sees the photo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLE = Path(__file__).parents[2] / "examples" / "photo" / "photo.py"


def run(*words):
    """The two lines that it prints at the end, without the picture's name."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if " prompt tokens, " in line)
    return lines[start].split(": ")[1], lines[start + 1]


@pytest.mark.timeout(240)
def test_a_photo_is_asked_about(tmp_path):
    Image.new("RGB", (300, 200), "teal").save(tmp_path / "teal.png")
    photo, other = run(), run(tmp_path / "teal.png")
    assert photo[0] == other[0] == "78 prompt tokens, 8x8 of them the picture's"  # 64 and 14 letters
    assert photo[1].startswith("the model says: ")
    assert photo[1] != other[1]
