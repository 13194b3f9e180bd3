"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

from .threads import CGROUP, ancestors, own_cgroups


def free_bytes() -> int:
    """Bytes that could be allocated now: the smaller of the machine's available memory and what the cgroups leave, caches not counted
    as used."""
    return max(0, min([_available(), *cgroup_free(CGROUP, own_cgroups())]))


def cgroup_free(root: Path, paths: dict[str, str]) -> list[int]:
    """What each limited level of the cgroup hierarchy leaves."""
    free = []
    for folder in ancestors(root, paths.get("", "/")):
        limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if limit is not None and used is not None:
            free.append(limit - used + _stat(folder / "memory.stat", "inactive_file"))
    for folder in ancestors(root / "memory", paths.get("memory", "/")):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(limit - used + _stat(folder / "memory.stat", "total_inactive_file"))
    return free


def _available() -> int:
    return _stat(Path("/proc/meminfo"), "MemAvailable:") * 1024


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            words = line.split()
            if words and words[0] == name:
                return int(words[1])
    except OSError:
        pass
    return 0
