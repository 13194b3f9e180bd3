"""Which cgroups this process is in: memory and CPU limits are read from each of them and of those above."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def own_cgroups(listing: Path = SELF) -> dict[str, str]:
    """This process's path in each hierarchy: {"": path} for version 2, {"cpu": path, ...} for version 1. Empty when it can't be read."""
    try:
        lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def ancestors(root: Path, path: str) -> list[Path]:
    """The folder of a cgroup and of all above it, the root's included (inside a container only that one may exist)."""
    folder = root / path.lstrip("/")
    return [folder, *(p for p in folder.parents if p == root or root in p.parents)]
