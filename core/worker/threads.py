"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
SPINS = "1000"
"""How often an OpenMP thread looks before it sleeps. Measured on two cores, demo model, 8 streams: with the default a step takes over
10 times as long as soon as one other process wants a core; with 1000 about 2 times, and alone 1.4 times what endless spinning takes."""


def available_cores() -> int:
    """The smaller of the affinity mask and the cgroup's CPU quota (rounded up); at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(CGROUP, own_cgroups())
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def calm_openmp() -> None:
    """Before torch is imported: let its threads sleep when there is nothing to do for long, unless the user decided otherwise."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def own_cgroups() -> dict[str, str]:
    """This process's path in each hierarchy: {"": path} for version 2, {"cpu": path, ...} for version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def ancestors(root: Path, path: str) -> list[Path]:
    """The folder of a cgroup and of all above it, the root's included (inside a container only that one may exist)."""
    folder = root / path.lstrip("/")
    return [folder, *(p for p in folder.parents if p == root or root in p.parents)]


def cgroup_quota(root: Path, paths: dict[str, str]) -> float | None:
    """Cores that the CPU quota is worth, the tightest of all levels; None when there is no quota."""
    quotas = []
    for folder in ancestors(root, paths.get("", "/")):
        match _read(folder / "cpu.max").split():
            case [quota, period] if quota != "max":
                quotas.append(int(quota) / int(period))
    for folder in ancestors(root / "cpu", paths.get("cpu", "/")):
        quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota and period and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
