"""How a step's numbers reach the device without anybody waiting: pinned arenas in turn, block tables and last ids that stay there.

arena      host memory that the device copies from by itself. Each step has one; it is written again `ARENAS` steps later, once an event
           says that its copies are done
tables     int32 [rows, width]: a row for each request, its blocks in order. Only blocks that are new go there
last_ids   int64 [rows]: the token that a request's row sampled last. The next step takes it from there, before the host knows it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from .device import Device, Event

if TYPE_CHECKING:
    from .state import WorkerRequestState

ARENAS = 3
"""Two steps may be in flight while a third is made."""
ALIGNMENT = 16
FIRST_ARENA = 64 * 1024
"""Bytes of a new arena; one that is too small doubles."""
FIRST_ROWS, FIRST_WIDTH = 256, 1024
"""Of the tables at first, 1 MiB; they double when they are too small, and graphs that read them are recorded anew."""
TORCH_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


class _Arena:
    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = device.pinned(FIRST_ARENA)
        self._old: list[torch.Tensor] = []
        """Smaller ones that the device may still read."""
        self._used = 0
        self.copied: Event | None = None

    def begin(self) -> None:
        if self.copied is not None:
            self.copied.wait()
        self._used, self.copied = 0, None
        self._old.clear()

    def room(self, size: int) -> torch.Tensor:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + size > len(self._memory):
            self._old.append(self._memory)
            self._memory = self._device.pinned(max(2 * len(self._memory), 1 << (size - 1).bit_length()))
            start = 0
        self._used = start + size
        return self._memory[start : start + size]


class Staging:
    """Use: `begin`, any number of `put`, `end`; the device reads what was put, in the order in which it is given work."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arenas = [_Arena(device) for _ in range(ARENAS)]
        self._at = 0

    def begin(self) -> None:
        """A step's first: waits only if the device is more than ARENAS - 1 steps behind."""
        self._at = (self._at + 1) % ARENAS
        self._arenas[self._at].begin()

    def put(self, numbers: np.ndarray, to: torch.Tensor | None = None) -> torch.Tensor:
        """A copy of int32, int64 or float64 numbers on the device, in `to` if given (of that shape and dtype, contiguous).

        Without `to`, each row of a matrix begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not."""
        dtype = TORCH_TYPES[numbers.dtype.name]
        *outer, count = numbers.shape
        unit = ALIGNMENT // numbers.itemsize if to is None and outer else 1
        shape = (*outer, -(-count // unit) * unit)
        whole = torch.empty(shape, dtype=dtype, device=self._device.device) if to is None else to
        if numbers.size:
            pinned = self._arenas[self._at].room(math.prod(shape) * numbers.itemsize).view(dtype).view(shape)
            pinned.numpy()[..., :count] = numbers
            whole.copy_(pinned, non_blocking=True)
        return whole[..., :count]

    def end(self) -> None:
        """A step's last: everything was put."""
        self._arenas[self._at].copied = self._device.event()


class Resident:
    """Block tables and last ids on the device, with a row for each request that has run."""

    def __init__(self, device: Device, staging: Staging, max_width: int) -> None:
        """max_width: blocks of the longest request."""
        self._device, self._staging = device, staging
        self._max_width = max_width
        self._free: list[int] = []
        self._rows: dict[WorkerRequestState, tuple[int, int]] = {}
        """Row, and how many of its blocks are in it."""
        self.generation = 0
        """Another number: `tables` and `last_ids` are other tensors than before."""
        self._make(FIRST_ROWS, min(FIRST_WIDTH, max_width))

    def _make(self, rows: int, width: int) -> None:
        where = self._device.device
        tables = torch.zeros((rows, width), dtype=torch.int32, device=where)
        self.last_ids = torch.zeros(rows, dtype=torch.int64, device=where)
        self.tables = tables
        self._free = list(range(rows - 1, -1, -1))

    def _grow(self, rows: int, width: int) -> None:
        tables, ids, taken = self.tables, self.last_ids, {row for row, _ in self._rows.values()}
        self._make(rows, width)
        self.tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self.last_ids[: len(ids)].copy_(ids)
        self._free = [row for row in self._free if row not in taken]
        self.generation += 1

    def row(self, request: WorkerRequestState) -> int:
        """The request's row; a new one when it has none."""
        found = self._rows.get(request)
        if found is not None:
            return found[0]
        if not self._free:
            self._grow(2 * self.tables.shape[0], self.tables.shape[1])
        row = self._free.pop()
        self._rows[request] = row, 0
        return row

    def drop(self, request: WorkerRequestState) -> None:
        """Its row is free. Steps given to the device before may still read it: those given later come later there, too."""
        if (found := self._rows.pop(request, None)) is not None:
            self._free.append(found[0])

    def shrunk(self, request: WorkerRequestState) -> None:
        """Blocks were taken from its table's end: others may come in their places."""
        if (found := self._rows.get(request)) is not None:
            self._rows[request] = found[0], min(found[1], len(request.blocks))

    def sync(self, requests: Sequence[WorkerRequestState]) -> list[int]:
        """Bring the requests' blocks to the device; their rows. Within a step, between `begin` and `end` of the staging."""
        widest = max(len(request.blocks) for request in requests)
        if widest > self.tables.shape[1]:
            width = max(widest, min(self._max_width, 1 << math.ceil(math.log2(widest))))
            self._grow(self.tables.shape[0], width)
        rows = [self.row(request) for request in requests]
        places: list[int] = []
        blocks: list[int] = []
        width = self.tables.shape[1]
        for request, row in zip(requests, rows, strict=True):
            known, there = self._rows[request][1], len(request.blocks)
            if known < there:
                places.extend(range(row * width + known, row * width + there))
                blocks.extend(request.blocks[known:])
        if places:
            to = self._staging.put(np.asarray(places, dtype=np.int64))
            self.tables.view(-1).index_copy_(0, to, self._staging.put(np.asarray(blocks, dtype=np.int32)))
        for request, row in zip(requests, rows, strict=True):
            self._rows[request] = row, len(request.blocks)
        return rows
