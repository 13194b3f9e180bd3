"""Which cores this process may use, and how many."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..cgroups import CGROUP, ancestors, own_cgroups
from ..errors import ConfigError

SPINS = "1000"
"""How often an OpenMP thread looks before it sleeps. Measured on two cores, demo model, 8 streams: with the default a step takes over
10 times as long as soon as one other process wants a core; with 1000 about 2 times, and alone 1.4 times what endless spinning takes."""


TOPOLOGY = Path("/sys/devices/system/cpu")


def cores_in_order() -> list[int]:
    """CPUs of the affinity mask, those of one package and one physical core beside each other: parts of the list share as little as can be.

    Empty where the system has no such mask."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return sorted(os.sched_getaffinity(0), key=lambda cpu: (*_place(cpu), cpu))


def _place(cpu: int) -> tuple[int, int]:
    """Package and physical core; zeros where that can't be read."""
    texts = (_read(TOPOLOGY / f"cpu{cpu}" / "topology" / name).strip() for name in ("physical_package_id", "core_id"))
    package, core = (int(text) if text.lstrip("-").isdigit() else 0 for text in texts)
    return package, core


def parse_cores(text: str) -> list[int]:
    """The CPUs in "0-3,8". ConfigError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        low, high = (
            int(end) if end.isascii() and end.isdigit() and len(end) < 6 else -1 for end in (first, last if dash else first)
        )
        if not 0 <= low <= high:
            raise ConfigError(f'model.cores: {text!r} is no list of CPUs such as "0-3,8"')
        found += range(low, high + 1)
    return sorted(set(found))


def format_cores(cores: Iterable[int]) -> str:
    """What `parse_cores` reads."""
    return ",".join(map(str, cores))


def keep_to(cores: str | None) -> None:
    """Have all threads of this process, and those it will have, run on these CPUs only. ConfigError when they can't."""
    if cores is None:
        return
    wanted = parse_cores(cores)
    try:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), wanted)
    except (OSError, AttributeError, OverflowError) as error:
        raise ConfigError(f"model.cores: can't run on the CPUs {cores}: {error}") from None


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
