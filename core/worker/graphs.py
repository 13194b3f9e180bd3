"""CUDA graphs of decode steps and small mixed batches: a step's kernels are started with one call instead of hundreds.

    bucket    tokens, rounded up, and what attention needs buffers for (Replayable.bucket): one graph serves all steps of a bucket
    1st time  the step runs as it is: kernels are compiled, attention learns what it is asked for
    2nd       it runs in the bucket's buffers, padded, and is then recorded
    after     its numbers are written into the buffers, and the graph is replayed

Rows that pad a batch have position 0, token 0 and slot -1: their K/V goes nowhere, no query holds them, and nobody reads what comes out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import structlog
import torch

from ..errors import WorkerError
from .attention import Replayable
from .device import Device, Graph, out_of_memory

if TYPE_CHECKING:
    from .attention import AttentionBackend
    from .device_steps import StagedStep

log = structlog.get_logger(__name__)

MOST_TOKENS = 512
"""Steps with more are busy enough for their kernels to be started one by one."""
MOST_GRAPHS = 64
"""The graph that was not used for longest goes for a new one."""
MOST_SEEN = 4096
"""Buckets whose number of steps is remembered."""

Forward = Callable[[torch.Tensor, Replayable], torch.Tensor]
"""(int64 [4, T] as in StagedStep, what goes into `AttentionBatch.prepared`): hidden states [T, hidden_size]. May be recorded."""


def bucket_of(tokens: int) -> int:
    """Tokens of the graph that serves so many: few enough graphs, at most a third more rows (those below 8 aside)."""
    if tokens <= 8:
        return 1 << (tokens - 1).bit_length()
    step = 8 if tokens <= 64 else 16 if tokens <= 256 else 32
    return -(-tokens // step) * step


class _Recorded:
    """A graph and the tensors that it reads and writes."""

    def __init__(self, numbers: torch.Tensor, plan: Replayable, forward: Forward) -> None:
        self.numbers = numbers
        self.plan = plan
        self.hidden: torch.Tensor | None = None
        self.graph: Graph | None = None
        self._forward = forward

    def run(self) -> None:
        self.hidden = self._forward(self.numbers, self.plan)


class Graphs:
    """insist: a graph that can't be recorded is an error (model.cuda_graphs is "on"), not a reason to do without."""

    def __init__(self, device: Device, *, insist: bool = False) -> None:
        self._device = device
        self._insist = insist
        self._seen: dict[Hashable, int] = {}
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()
        self._generation = -1
        self._backend: AttentionBackend | None = None
        self.off = ""
        """Why none are used any more."""
        self.replays = 0
        """Steps that a graph served."""

    def __len__(self) -> int:
        return len(self._recorded)

    def clear(self) -> None:
        """Forget all graphs, which frees their memory; waits for steps that use them."""
        if self._recorded:
            self._device.event().wait()
            self._recorded.clear()

    def run(self, step: StagedStep, forward: Forward) -> torch.Tensor | None:
        """Hidden states of the step, at least its rows, from a graph; None when it must run as it is. They stand until the next step."""
        if self.off or step.tokens > MOST_TOKENS:
            return None
        if step.generation != self._generation or step.backend is not self._backend:
            self.clear()  # they read tables that are gone, or are another backend's
            self._seen.clear()
            self._generation, self._backend = step.generation, step.backend
        bucket = step.plan.bucket()
        if bucket is None:
            return None
        key = bucket_of(step.tokens), bucket
        if (recorded := self._recorded.get(key)) is not None:
            self._recorded.move_to_end(key)
            step.write(recorded.numbers)
            step.plan.fill(recorded.plan)
            assert recorded.graph is not None
            recorded.graph.replay()
            self.replays += 1
            return recorded.hidden
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen[key] = seen = self._seen.get(key, 0) + 1
        return self._record(key, step, forward) if seen > 1 else None

    def _record(self, key: tuple[int, Hashable], step: StagedStep, forward: Forward) -> torch.Tensor | None:
        size = key[0]
        numbers = torch.empty((4, size), dtype=torch.int64, device=self._device.device)
        step.write(numbers)
        recorded = _Recorded(numbers, step.plan.padded(size), forward)
        hidden = None
        try:
            recorded.run()  # compiles what is new about these sizes, and is this step's result
            hidden = recorded.hidden
            recorded.graph = self._device.capture(recorded.run)
        except Exception as error:
            if out_of_memory(error):
                log.warning("cuda_graph_no_memory", tokens=size, graphs=len(self._recorded))
                self.clear()
                self._device.release_cache()
                self.off = "the device had no memory for one"
            elif self._insist:
                raise WorkerError(f"model.cuda_graphs is on, and a step of {size} tokens can't be recorded: {error}") from error
            else:
                log.exception("cuda_graph_failed", tokens=size, hint="steps run without graphs from now on")
                self.off = f"{type(error).__name__}: {error}"
            return hidden
        if len(self._recorded) >= MOST_GRAPHS:
            self._device.event().wait()
            self._recorded.popitem(last=False)
        self._recorded[key] = recorded
        return hidden
