"""How large the KV pool is: from what is free, or from a setting; as a table people can read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cgroups import CGROUP, SELF, ancestors, own_cgroups
from ..columns import columns
from ..config import CacheConfig
from ..errors import ConfigError

MIB = 1024 * 1024
MEMINFO = Path("/proc/meminfo")
CPU_FRACTION = 0.25
"""Of free memory, by default: others on the machine want some too."""
GPU_FRACTION = 0.9
"""Of what is free on a GPU beside weights and the largest step."""
UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number for "no limit"."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    weights_bytes: int
    free_bytes: int
    longest_request: int
    """Tokens of prompt plus output: what the model, the setting and this pool allow."""
    source: str
    """What decided the size."""

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        return self.capacity_tokens * self.kv_bytes_per_token

    @property
    def concurrency(self) -> float:
        """How many requests of `longest_request` tokens fit at the same time."""
        blocks_each = -(-self.longest_request // self.block_size)
        return self.num_blocks / blocks_each

    def rows(self) -> list[tuple[str, str]]:
        return [
            ("weights", _size(self.weights_bytes)),
            ("free memory", _size(self.free_bytes)),
            ("KV memory", f"{_size(self.kv_bytes)} ({self.source})"),
            ("KV per token", f"{self.kv_bytes_per_token:,} bytes"),
            ("KV pool", f"{self.num_blocks:,} blocks of {self.block_size} = {self.capacity_tokens:,} tokens"),
            ("longest request", f"{self.longest_request:,} tokens"),
            ("concurrency at that length", f"{self.concurrency:.1f}"),
        ]

    def table(self) -> str:
        """The rows as text, one a line."""
        return "\n".join(columns(self.rows()))


def plan(
    free_bytes: int,
    kv_bytes_per_token: int,
    weights_bytes: int,
    cache: CacheConfig,
    max_model_len: int,
    default_fraction: float = CPU_FRACTION,
) -> MemoryPlan:
    """The pool for `free_bytes` of memory that is free beside the weights. `num_blocks` wins over `kv_memory_mb` over the fraction.

    default_fraction: `kv_memory_fraction` where the setting is left out.

    A fraction never takes more than `max_model_len` tokens for each of 256 requests. ConfigError when not even one block fits, or when
    `num_blocks` or `kv_memory_mb` ask for more than is free (0 free bytes: nothing is known, and `num_blocks` is believed).
    """
    block_bytes = kv_bytes_per_token * cache.block_size
    if cache.num_blocks is not None:
        num_blocks, source = cache.num_blocks, "cache.num_blocks"
        if 0 < free_bytes < num_blocks * block_bytes:
            raise ConfigError(
                f"cache.num_blocks: {num_blocks:,} blocks take {_size(num_blocks * block_bytes)}; {_size(free_bytes)} are free beside the "
                f"weights, enough for {free_bytes // block_bytes:,}"
            )
    elif cache.kv_memory_mb is not None:
        wanted = cache.kv_memory_mb * MIB
        if wanted > free_bytes:
            raise ConfigError(f"cache.kv_memory_mb asks for {_size(wanted)}; {_size(free_bytes)} are free beside the weights")
        num_blocks, source = wanted // block_bytes, "cache.kv_memory_mb"
    else:
        fraction = default_fraction if cache.kv_memory_fraction is None else cache.kv_memory_fraction
        num_blocks = int(free_bytes * fraction) // block_bytes
        source = f"{fraction:.0%} of free memory"
        most = 256 * -(-max_model_len // cache.block_size)
        if num_blocks > most:
            num_blocks, source = most, "room for 256 of the longest requests"
    if num_blocks < 1:
        raise ConfigError(
            f"no room for K/V: one block of {cache.block_size} tokens needs {_size(block_bytes)}, {_size(free_bytes)} are free; "
            "free memory or raise cache.kv_memory_fraction / cache.kv_memory_mb"
        )
    return MemoryPlan(
        num_blocks=num_blocks,
        block_size=cache.block_size,
        kv_bytes_per_token=kv_bytes_per_token,
        weights_bytes=weights_bytes,
        free_bytes=free_bytes,
        longest_request=min(max_model_len, num_blocks * cache.block_size),
        source=source,
    )


def free_memory(*, meminfo: Path = MEMINFO, cgroup: Path = CGROUP, self_cgroup: Path = SELF) -> int:
    """Bytes this process could still take without swapping: the machine's available memory, or less where a cgroup (v2 or v1) limits us.

    Page cache that the kernel can drop counts as free. 0 when nothing can be read.
    """
    found = [value for value in (_available(meminfo), *_cgroup_rooms(cgroup, self_cgroup)) if value is not None]
    return max(0, min(found)) if found else 0


def _available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_rooms(root: Path, self_cgroup: Path) -> list[int | None]:
    """What is left in our cgroup and in each of its ancestors."""
    paths = own_cgroups(self_cgroup) or {"": "/"}
    rooms: list[int | None] = []
    if "" in paths:
        rooms += [_room(place, "memory.max", "memory.current") for place in ancestors(root, paths[""])]
    if "memory" in paths:
        folders = ancestors(root / "memory", paths["memory"])
        rooms += [_room(place, "memory.limit_in_bytes", "memory.usage_in_bytes") for place in folders]
    return rooms


def _room(folder: Path, limit_name: str, usage_name: str) -> int | None:
    limit = _number(folder / limit_name)
    usage = _number(folder / usage_name)
    if limit is None or usage is None or limit >= UNLIMITED:
        return None
    return limit - usage + _reclaimable(folder / "memory.stat")


def _reclaimable(stat: Path) -> int:
    """Bytes of page cache in a cgroup that the kernel drops first ("inactive_file"; v1: "total_inactive_file")."""
    try:
        values = dict(
            line.split(" ", 1) for line in stat.read_text(encoding="ascii", errors="replace").splitlines() if " " in line
        )
        return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii", errors="replace"))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes < 1024 * MIB else f"{num_bytes / MIB / 1024:,.2f} GiB"
