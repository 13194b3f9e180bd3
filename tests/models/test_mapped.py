from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tokenbus.core.models import mapped
from tokenbus.core.models.loader import Checkpoint
from tokenbus.core.models.mapped import release_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are dropped on Linux only")


def resident(path) -> int:
    """Bytes of the file that are mapped into this process and in memory."""
    here, total = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line.partition(" ")[0].endswith(":"):
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@linux
def test_released_pages_leave_memory_and_come_back_with_the_same_bytes(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    weight = torch.randn(1024, 1024)
    save_file({"weight": weight, "kept": torch.arange(5.0)}, path)
    checkpoint = Checkpoint([path], "model", torch.float32, torch.device("cpu"))
    mapped, kept = checkpoint.get("weight"), checkpoint.get("kept")
    assert torch.equal(mapped, weight)
    assert resident(path) >= weight.nbytes
    assert release_pages(checkpoint.files) >= weight.nbytes
    assert resident(path) == 0
    assert torch.equal(kept, torch.arange(5.0))
    assert torch.equal(mapped, weight)


def test_a_file_that_is_not_mapped(tmp_path):
    assert release_pages([tmp_path / "none"]) == 0


def test_paths_are_found_whatever_stands_in_them(tmp_path, monkeypatch):
    odd, other = "/a folder/b\u2028c d", "/e\x85"
    lines = [f"10-2f r--p 00000000 fe:00 7      {odd}", "30-3f rw-p 00000000 00:00 0", f"40-4f r--p 0 0:0 7 {other}"]
    (tmp_path / "maps").write_text("\n".join([*lines, ""]), encoding="utf-8")
    monkeypatch.setattr(mapped, "MAPS", tmp_path / "maps")
    assert list(mapped._mappings({odd})) == [(0x10, 0x2F)]
    assert list(mapped._mappings({"0"})) == []
