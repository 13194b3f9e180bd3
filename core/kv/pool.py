"""The KV block pool: which block belongs to whom. Ids only; the tensors live in the worker.

Every block is in exactly one of three places:

    free        refs == 0, contents meaningless; handed out first (last freed, first used: it is warm)
    retained    refs == 0, but a plugin asked to keep the contents; handed out when nothing is free, least recently used first
    used        refs >= 1

    free + retained + used == num_blocks        (check_integrity)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Reference-counted blocks of `block_size` tokens. A plain object: one owner, no locks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda _block: None
        """Called with a retained block's id just before it is handed out anew."""
        self.allocation_failures = 0
        """Times that `allocate` had to refuse."""
        self._refs = [0] * num_blocks
        self._keep = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._retained: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now: free and retained."""
        return len(self._free) + len(self._retained)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    def allocate(self, n: int) -> list[int] | None:
        """n blocks with one reference each, or None (and nothing changed) when there are not enough."""
        if n > len(self._free) + len(self._retained):
            self.allocation_failures += 1
            return None
        taken = []
        for _ in range(n):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._retained.popitem(last=False)
                self._keep[block] = 0
                self.on_evict(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference on each; a retained block comes back into use."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._retained[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each. Given in table order; the end of the table becomes evictable before its beginning."""
        for block in reversed(blocks):
            refs = self._refs[block]
            if refs <= 0:
                raise RuntimeError(f"block {block} released once too often")
            self._refs[block] = refs - 1
            if refs == 1:
                if self._keep[block]:
                    self._retained[block] = None
                else:
                    self._free.append(block)

    def retain(self, block: int) -> None:
        """Keep the contents of a used block after its last release, until the space is needed (`on_evict`) or `forget` is called."""
        if self._refs[block] == 0:
            raise RuntimeError(f"block {block} is not in use")
        self._keep[block] = 1

    def forget(self, block: int) -> None:
        """Undo `retain`; no `on_evict`."""
        if self._keep[block]:
            self._keep[block] = 0
            if self._refs[block] == 0:
                del self._retained[block]
                self._free.append(block)

    def is_retained(self, block: int) -> bool:
        return bool(self._keep[block])

    def refs(self, block: int) -> int:
        return self._refs[block]

    def census(self, parts: int) -> list[tuple[int, int, int]]:
        """The pool cut into at most `parts` equal ranges of block ids: how many blocks are used, retained and free in each."""
        size = max(1, -(-self.num_blocks // parts))
        retained = [0] * -(-self.num_blocks // size)
        for block in self._retained:
            retained[block // size] += 1
        found = []
        for part, kept in enumerate(retained):
            refs = self._refs[part * size : (part + 1) * size]
            idle = refs.count(0)
            found.append((len(refs) - idle, kept, idle - kept))
        return found

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise RuntimeError unless every block is in exactly one place; with all block tables given, unless the counts fit them."""
        used = {b for b, refs in enumerate(self._refs) if refs > 0}
        free = set(self._free)
        retained = set(self._retained)
        problems = []
        if any(refs < 0 for refs in self._refs):
            problems.append("a reference count is negative")
        if len(free) != len(self._free):
            problems.append("a block is twice in the free list")
        if used & free or used & retained or free & retained:
            problems.append("a block is in two places")
        if len(used) + len(free) + len(retained) != self.num_blocks:
            problems.append("a block is nowhere")
        if any(not self._keep[b] for b in retained):
            problems.append("a retained block is not marked")
        if tables is not None:
            counts = [0] * self.num_blocks
            for table in tables:
                for block in table:
                    counts[block] += 1
            if counts != self._refs:
                problems.append("reference counts differ from the block tables")
        if problems:
            raise RuntimeError("KV pool: " + "; ".join(problems))
