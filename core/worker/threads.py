"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ..cgroups import CGROUP, ancestors, own_cgroups

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
