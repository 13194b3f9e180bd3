"""Memory and processor time of a server's processes, from /proc."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def tree(root: int) -> list[int]:
    """The process and all that descend from it, those in other sessions included."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


@dataclass(frozen=True, order=True)
class Memory:
    """Proportional set size in bytes."""

    total: int = 0
    front: int = 0
    """Of the first process."""
    file: int = 0
    """Pages of files: libraries, mapped weights."""

    @classmethod
    def of(cls, root: int) -> Memory:
        """Summed over the tree."""
        found = {pid: _rollup(pid) for pid in tree(root)}
        total, file = (sum(one.get(name, 0) for one in found.values()) for name in ("Pss", "Pss_File"))
        return cls(total, found[root].get("Pss", 0), file)


def _rollup(pid: int) -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines()[1:]]
        return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines}
    return {}


def cpu_seconds(pid: int) -> float:
    """Processor time of the threads that live: in ns where the kernel counts so, else in its ticks of 10 ms."""
    try:
        tasks = list((PROC / str(pid) / "task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError, IndexError):
        pass
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100


class Watch:
    """What a server used while something ran: `with Watch(pid).watching() as used`, then the attributes."""

    def __init__(self, root: int, *, memory_every: float | None = None) -> None:
        self._root = root
        self._every = memory_every
        self._done = threading.Event()
        self.front_cpu = 0.0
        """Seconds of the server's first process: for Tokenbus and vLLM the one that speaks HTTP."""
        self.other_cpu = 0.0
        """Of its descendants."""
        self.peak = Memory()
        """The largest total; sampled every `memory_every` seconds, not at all without."""

    def _cpu(self) -> tuple[float, float]:
        return cpu_seconds(self._root), sum(cpu_seconds(pid) for pid in tree(self._root) if pid != self._root)

    def _sample(self) -> None:
        while not self._done.wait(self._every):
            self.peak = max(self.peak, Memory.of(self._root))

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        front, other = self._cpu()
        sampler = threading.Thread(target=self._sample, daemon=True) if self._every else None
        if sampler is not None:
            sampler.start()
        try:
            yield self
        finally:
            self._done.set()
            if sampler is not None:
                sampler.join()
                self.peak = max(self.peak, Memory.of(self._root))
            after = self._cpu()
            self.front_cpu, self.other_cpu = after[0] - front, after[1] - other
