"""What differs between a GPU and the CPU for whoever drives a step: pinned memory, copies that nobody waits for, events, graphs, memory.

On the CPU everything happens at once: copies are done when they return, events have happened, and a "graph" calls what it was made of
again. So the code that drives a GPU runs on the CPU too, which is how it is tested; the runner uses it there only when told to.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from ..kv.sizing import free_memory


class Event(ABC):
    """A place in the device's order of work."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would not wait. Raises nothing: what became of the device, `wait` says."""

    @abstractmethod
    def wait(self) -> None:
        """Until the device has come to it. Raises what went wrong there."""


class Graph(ABC):
    """Work that was recorded once, on tensors that stay where they are."""

    @abstractmethod
    def replay(self) -> None:
        """Do it again with what the tensors hold now. Not waited for."""


class Device(ABC):
    """One device, used from one thread: everything it is given it does in order."""

    device: torch.device
    asynchronous: bool
    """Steps are launched and collected apart; the staged inputs, resident tables and sampling kernels of this package are used."""
    graphs: bool
    """`capture` is worth something."""
    counts_memory: bool
    """`peak_bytes` says something, and memory is nobody else's: a pool may take nearly all that is free."""

    @abstractmethod
    def pinned(self, size: int) -> torch.Tensor:
        """uint8 [size] on the host, from which the device can copy by itself."""

    @abstractmethod
    def event(self) -> Event:
        """Behind everything given to the device so far."""

    @abstractmethod
    def capture(self, work: Callable[[], Any]) -> Graph:
        """Record `work`, which must run on the device alone: no copies to or from the host, no waiting, no shape that depends on data.
        It may or may not run meanwhile. Raises what it raises, and RuntimeError when it can't be recorded."""

    @abstractmethod
    def free_bytes(self) -> int:
        """What could still be allocated; 0 when nothing is known."""

    @abstractmethod
    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """Run `work`; how much memory it took at most, beside what was taken before."""

    @abstractmethod
    def release_cache(self) -> None:
        """Give back what the allocator keeps for later."""


class _Happened(Event):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _Again(Graph):
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work

    def replay(self) -> None:
        self._work()


class CpuDevice(Device):
    """asynchronous: take the ways of a GPU, for tests."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        self.device = torch.device("cpu")
        self.asynchronous = self.graphs = asynchronous
        self.counts_memory = False

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def event(self) -> Event:
        return _Happened()

    def capture(self, work: Callable[[], Any]) -> Graph:
        return _Again(work)

    def free_bytes(self) -> int:
        return free_memory()

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        work()
        return 0  # the system's allocator keeps no such count: what is free says enough

    def release_cache(self) -> None:
        pass


class _CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # whoever waits leaves its core to others
        self._event.record(stream)

    def done(self) -> bool:
        try:
            return self._event.query()
        except RuntimeError:  # the device broke: whoever polls must come to `wait`, and not end for it
            return True

    def wait(self) -> None:
        self._event.synchronize()


class _CudaGraph(Graph):
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice(Device):
    """All work goes to the current stream; graphs share one memory pool, which is safe as they are replayed one after the other. The pool
    is torch's for as long as one of them lives: graphs behind the last one's end need another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.asynchronous = self.graphs = self.counts_memory = True
        self._pool: Any = None
        self._graphs: weakref.WeakSet[_CudaGraph] = weakref.WeakSet()
        """Those in the pool."""

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.device))

    def capture(self, work: Callable[[], Any]) -> Graph:
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.device(self.device), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                work()
        except BaseException:
            torch.cuda.set_stream(stream)  # torch stays on the stream of a capture that it can't end
            raise
        made = _CudaGraph(graph)
        self._graphs.add(made)
        return made

    def free_bytes(self) -> int:
        self.release_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        torch.cuda.synchronize(self.device)
        self.release_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_reserved(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return max(0, torch.cuda.max_memory_reserved(self.device) - before)

    def release_cache(self) -> None:
        torch.cuda.empty_cache()


def make_device(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else CpuDevice()


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or by the CPU's allocator."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in ("DefaultCPUAllocator", "out of memory"))


BROKEN = (
    "illegal memory access", "misaligned address", "unspecified launch failure", "illegal instruction", "device-side assert",
    "invalid program counter", "hardware stack error", "uncorrectable", "launch timed out",
)  # fmt: skip
"""In what Triton's launcher says, in a RuntimeError, of errors that stay."""


def device_broke(error: BaseException) -> bool:
    """Whether the GPU's driver refuses everything from now on, in this process: after an illegal access, say."""
    if isinstance(error, torch.AcceleratorError):
        return not out_of_memory(error)
    text = str(error)
    return isinstance(error, RuntimeError) and "Triton Error [CUDA]" in text and any(words in text for words in BROKEN)
