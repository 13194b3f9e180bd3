"""A step on a device, from staged inputs to sampled ids that the host reads later.

    stage      block tables and [4, T] numbers to the device, from pinned memory                   (staging.py)
    forward    from a graph, or kernel by kernel                                                   (graphs.py)
    sample     tokens of requests whose plugins a kernel can stand for; they stay on the device, where the next step finds them
    Later      a copy of them on its way to the host, and an event behind it

The kernel draws the same token as core/sampler.py (kernels/triton/sampling.py). Masks, penalties, logprobs and other filters go through
the host. Drafts are sampled behind on the device, too, and compared with what was sampled on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...kernels.triton import sampling as kernel
from ..errors import WorkerError
from ..models.base import CausalModel, ForwardBatch, KVCache
from . import batch
from .attention import AttentionBackend, AttentionBatch, KVLayout, Replayable
from .device import Device, Event
from .graphs import Forward, Graphs
from .staging import Resident, Staging
from .state import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..models.media import MediaRows
    from .batch import Run
    from .encoder import WorkerMedia
    from .state import WorkerRequestState

LOW = (1 << 64) - 1
"""The bits of a seed that the kernel reads."""


@dataclass(slots=True)
class StagedStep:
    """One step's batch on the host, its block tables on the device."""

    numbers: np.ndarray
    """int64 [4, T]: token ids (UNKNOWN: what the row in `sources` sampled last), positions, slots, sources."""
    attention: AttentionBatch
    """`slots` is empty until `uploaded` is there: a backend that can be recorded does not look at it in `prepare`."""
    backend: AttentionBackend
    generation: int
    """Of the resident tables."""
    staging: Staging
    uploaded: torch.Tensor | None
    """`numbers` on the device; None until it is known whether a graph's buffer takes them."""
    media: MediaRows | None = None
    """Rows that take an encoder's."""

    @property
    def tokens(self) -> int:
        return self.numbers.shape[1]

    @property
    def plan(self) -> Replayable:
        return self.attention.prepared

    def write(self, to: torch.Tensor) -> None:
        """Into a buffer [4, at least T] on the device; the rest is padding."""
        padded = np.zeros(to.shape, dtype=np.int64)
        padded[2] = -1
        padded[:, : self.tokens] = self.numbers
        self.staging.put(padded, to)


@dataclass(slots=True)
class Drawn:
    """What was sampled for one request."""

    request: WorkerRequestState
    place: int
    """Where in `request.tokens` the first token belongs; UNKNOWN, or drafts, stand there until then."""
    drafts: int
    tokens: list[int]
    """At the drafts' places, and one behind; only the first where another one could not be sampled."""
    error: WorkerError | None
    """Why there is not even that."""


class Later:
    """Tokens of a step that the device has been told to sample; `wait` gives them."""

    def __init__(self, host: torch.Tensor, runs: list[tuple[WorkerRequestState, int, int]], event: Event) -> None:
        """host: int64 [2, n], pinned: tokens and the kernel's states, once the event has happened. runs: request, place, drafts."""
        self._host = host
        self._runs = runs
        self._event = event

    def done(self) -> bool:
        return self._event.done()

    def wait(self) -> list[Drawn]:
        self._event.wait()
        tokens, states = self._host.tolist()
        drawn, row = [], 0
        for request, place, drafts in self._runs:
            end = row + drafts + 1
            error = None if states[row] == kernel.OK else _problem(states[row], place)
            whole = all(state == kernel.OK for state in states[row:end])  # else a row behind a wrong draft, maybe
            drawn.append(Drawn(request, place, drafts, tokens[row : end if whole else row + 1], error))
            row = end
        return drawn


def _problem(state: int, position: int) -> WorkerError:
    what = "no finite logit" if state == kernel.NOTHING_FINITE else "a logit that is NaN or infinite"
    return WorkerError(f"the model gave {what} at position {position}")


class DeviceSteps:
    """num_blocks: of the pool. graphs: as in the settings."""

    def __init__(
        self, device: Device, model: CausalModel, layout: KVLayout, kv: KVCache, num_blocks: int, graphs: str = "auto"
    ) -> None:
        self._device, self._model, self._layout, self._kv = device, model, layout, kv
        self.graphs = Graphs(device, insist=graphs == "on") if device.graphs and graphs != "off" else None
        self.staging = Staging(device)
        longest = -(-model.spec.max_model_len // layout.block_size)
        self.resident = Resident(device, self.staging, min(longest, num_blocks))
        self._sampled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runs: list[tuple[WorkerRequestState, int, int]] = []

    def begin(self) -> None:
        self.staging.begin()
        self._sampled, self._runs = [], []

    def later(self) -> Later | None:
        """What the device samples in this step; None: nothing. Once, behind the last `sample`."""
        if not self._runs:
            return None
        host = self._device.pinned(16 * sum(len(tokens) for tokens, _ in self._sampled)).view(torch.int64).view(2, -1)
        start = 0
        for tokens, states in self._sampled:
            end = start + len(tokens)
            host[0, start:end].copy_(tokens, non_blocking=True)
            host[1, start:end].copy_(states.to(torch.int64), non_blocking=True)
            start = end
        return Later(host, self._runs, self._device.event())

    def end(self) -> None:
        """Everything of the step was given to the device, or it failed."""
        self.staging.end()

    def stage(self, runs: Sequence[Run], backend: AttentionBackend, media: WorkerMedia | None = None) -> StagedStep:
        """media: of a model that takes them, and so can't be recorded."""
        flat = batch.flatten(batch.pieces_of(runs), self._layout.block_size)
        rows = self.resident.sync([run.request for run in runs])
        counts = [run.n for run in runs]
        numbers = np.concatenate([flat.numbers, np.repeat(np.asarray(rows, dtype=np.int64), counts)[None]])
        where = AttentionBatch(
            flat.query_start,
            flat.context_len,
            flat.tables,
            slots=torch.empty(0, dtype=torch.int64, device=self._layout.device),
            tables=self.resident.tables,
            table_rows=rows,
            upload=self.staging.put,
        )
        uploaded = None if self._recordable(backend) else self.staging.put(numbers)
        rows_of_media = None
        if uploaded is not None:
            where.slots = uploaded[2]
            if media is not None:
                forward = ForwardBatch(uploaded[0], uploaded[1], where)
                media.attach(forward, runs)
                rows_of_media = forward.media
        where.prepared = backend.prepare(where)
        return StagedStep(numbers, where, backend, self.resident.generation, self.staging, uploaded, rows_of_media)

    def _recordable(self, backend: AttentionBackend) -> bool:
        return self.graphs is not None and backend.capturable and self._model.capturable

    def forward(self, step: StagedStep) -> torch.Tensor:
        """Hidden states, at least [T, hidden_size]; those behind T are padding. They stand until the next step."""
        if self.graphs is not None and step.uploaded is None:
            found = self.graphs.run(step, self._on_buffers(step.backend))
            if found is not None:
                return found
        numbers = self.staging.put(step.numbers) if step.uploaded is None else step.uploaded
        return self._run(numbers, step.attention, step.backend, step.media)

    def _on_buffers(self, backend: AttentionBackend) -> Forward:
        longest = self._model.spec.max_model_len
        tables = self.resident.tables

        def forward(numbers: torch.Tensor, plan: Replayable) -> torch.Tensor:
            size = numbers.shape[1]
            where = AttentionBatch([0, size], [longest], [[]], numbers[2], plan, tables=tables, table_rows=[0])
            return self._run(numbers, where, backend)

        return forward

    def _run(
        self, numbers: torch.Tensor, where: AttentionBatch, backend: AttentionBackend, media: MediaRows | None = None
    ) -> torch.Tensor:
        ids, positions, where.slots, sources = numbers.unbind(0)
        ids = torch.where(ids < 0, self.resident.last_ids.index_select(0, sources), ids)
        return self._model.forward(ForwardBatch(ids, positions, where, media), self._kv, backend)

    def rows(self, of: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """Those rows of a tensor, chosen on the device."""
        if rows == list(range(len(rows))):
            return of[: len(rows)]
        return of.index_select(0, self.staging.put(np.asarray(rows, dtype=np.int64)))

    def sample(self, logits: torch.Tensor, runs: Sequence[Run]) -> None:
        """A token for each run's rows of logits: behind its last known token, and behind each draft. A request without drafts gets UNKNOWN
        at the end of its tokens; what became of drafts, the host must know before the request's next step."""
        floats: list[tuple[float, float, float]] = []
        integers: list[tuple[int, int, int, int]] = []
        for run in runs:
            request, drafts = run.request, run.drafts
            known = len(request.tokens) - drafts
            fused = request.fused
            assert fused is not None
            floats.append((request.temperature, fused.top_p, fused.min_p))
            integers.append((fused.top_k, request.seed & LOW, known, request.choice & LOW))
            if drafts:
                floats += floats[-1:] * drafts
                top_k, seed, _, choice = integers[-1]
                integers += [(top_k, seed, known + 1 + i, choice) for i in range(drafts)]
            self._runs.append((request, known, drafts))
        temperature, top_p, min_p = self.staging.put(np.array(floats, dtype=np.float64).T).unbind(0)
        words = np.array(integers, dtype=np.uint64).view(np.int64)
        top_k, seed, position, choice = self.staging.put(words.T).unbind(0)
        found = kernel.sample(logits, kernel.SamplingRows(temperature, top_k, top_p, min_p, seed, position, choice))
        self._sampled.append((found.tokens, found.states))
        self._keep(found.tokens, runs)

    def _keep(self, tokens: torch.Tensor, runs: Sequence[Run]) -> None:
        """The tokens of runs without drafts, for the step after this one."""
        places, rows, row = [], [], 0
        for run in runs:
            if not run.drafts:
                places.append(row)
                rows.append(self.resident.row(run.request))
                run.request.tokens.append(UNKNOWN)
            row += run.drafts + 1
        if rows:
            last = self.rows(tokens, places).clamp(min=0)  # -1: the request will fail; its next step must not
            self.resident.last_ids.index_copy_(0, self.staging.put(np.asarray(rows, dtype=np.int64)), last)
