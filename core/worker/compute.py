"""One step, computed: forward, logits, sampling, what plugins propose (runner.py shows the order)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog
import torch

from ..errors import StepMemoryError, plain_text
from ..models.base import CausalModel, KVCache
from ..plan import StepResult
from . import after, batch, sampling
from .attention import AttentionBackend, KVLayout
from .batch import Run
from .device import Device, out_of_memory
from .pending import InFlight, Pending
from .requests import Requests, withdraw
from .side import Ran, StepRan

if TYPE_CHECKING:
    from .device_steps import DeviceSteps

log = structlog.get_logger(__name__)


class StepComputer:
    """steps: None computes on the CPU, where the model is. max_drafts: of one request in a step."""

    def __init__(
        self,
        model: CausalModel,
        layout: KVLayout,
        kv: KVCache,
        device: Device,
        steps: DeviceSteps | None,
        book: Requests,
        in_flight: InFlight,
        max_drafts: int,
    ) -> None:
        self._model, self._layout, self._kv = model, layout, kv
        self._device, self._steps = device, steps
        self._book, self._in_flight = book, in_flight
        self._max_drafts = max_drafts

    def run(self, runs: list[Run], pending: Pending, attention: AttentionBackend, began: float) -> None:
        """Compute a step of at least one run. Its result is complete, or `pending.later` will complete it. began: when the order came."""
        if self._steps is None:
            self._run(runs, pending, attention, began)
            return
        self._steps.begin()
        try:
            self._run(runs, pending, attention, began)
        finally:
            self._steps.end()

    def _run(self, runs: list[Run], pending: Pending, attention: AttentionBackend, began: float) -> None:
        result = pending.result
        model, layout, plugins, fail = self._model, self._layout, self._book.plugins, self._book.fail
        hidden, starts, prepared = self._forward(runs, attention)
        ran = time.perf_counter()
        prompt_rows, head_calls = sampling.prompt_logprobs(runs, starts, hidden, result, plugins, self._head, fail)
        prompted = time.perf_counter()
        fused = [] if self._steps is None else sampling.tiles(runs, fused=True)
        tiles = sampling.tiles(runs, fused=None if self._steps is None else False)
        result.flops = batch.flops(runs, layout, model.spec, prompt_rows + sum(run.rows for run in runs))
        result.bytes_moved = batch.bytes_moved(runs, layout, model.spec, head_calls + len(tiles) + len(fused))
        firsts = [run.request.computed for run in runs]
        rows_of = [range(end - run.drafts - 1, end) for run, end in zip(runs, starts[1:], strict=True)]
        for request, n, _ in runs:
            request.computed += n
            if request.media is not None:
                request.media.release(request.computed)
        in_head = self._sample_on_device(fused, runs, rows_of, hidden)
        if tiles:
            self._in_flight.settle()  # plugins look at all tokens before theirs
        for some in tiles:
            head_started = time.perf_counter()
            rows = [row for i in some for row in rows_of[i]]
            if self._steps is None:
                logits = self._head(hidden if len(rows) == len(hidden) else hidden[rows])
            else:
                logits = self._head(self._steps.rows(hidden, rows))
            in_head += time.perf_counter() - head_started
            sampling.sample(logits, [runs[i] for i in some], result, plugins, layout.block_size, fail)
        propose = any(run.request.hooks.drafts_after_step for run in runs)
        if self._steps is not None:
            self._in_flight.add(pending, self._steps.later())
            if tiles or propose or any(run.drafts for run in runs):
                self._in_flight.settle()  # where the host samples, the device has come to the step's end anyway
        self._shrunk(runs)
        result.phases = {
            "prepare": prepared - began,
            "forward": ran - prepared,
            "logits": in_head,
            "sample": time.perf_counter() - prompted - in_head,
        }
        if prompt_rows:
            result.phases["prompt_logprobs"] = prompted - ran
        if propose:
            sampled = time.perf_counter()
            self._propose(runs, firsts, starts, hidden, result, sampled - began)
            result.phases["draft"] = time.perf_counter() - sampled

    def _sample_on_device(
        self, tiles: list[list[int]], runs: list[Run], rows_of: Sequence[range], hidden: torch.Tensor
    ) -> float:
        """Seconds in the LM head."""
        in_head = 0.0
        for some in tiles:
            assert self._steps is not None
            started = time.perf_counter()
            logits = self._logits(self._steps.rows(hidden, [row for i in some for row in rows_of[i]]))
            in_head += time.perf_counter() - started
            self._steps.sample(logits, [runs[i] for i in some])
        return in_head

    def _forward(self, runs: list[Run], attention: AttentionBackend) -> tuple[torch.Tensor, list[int], float]:
        """Hidden states, at least a row for each token; where each run's begin, then their end; when the inputs were ready. Changes
        nothing but K/V, so it is tried again when memory was missing that others have given back."""
        try:
            return self._try_forward(runs, attention)
        except Exception as error:
            if not out_of_memory(error):
                raise
            log.warning("step_out_of_memory", requests=len(runs), error=plain_text(error))
        if self._steps is not None and self._steps.graphs is not None:
            self._steps.graphs.clear()
        self._device.release_cache()
        try:
            return self._try_forward(runs, attention)
        except Exception as error:
            if not out_of_memory(error):
                raise
            problem = f"there is no memory for a step of {sum(run.n for run in runs)} tokens: {plain_text(error)}"
        withdraw(runs)
        raise StepMemoryError(problem)

    def _try_forward(self, runs: list[Run], attention: AttentionBackend) -> tuple[torch.Tensor, list[int], float]:
        if self._steps is not None:
            step = self._steps.stage(runs, attention, self._book.media)
            prepared = time.perf_counter()
            return self._steps.forward(step), step.attention.query_start, prepared
        forward = batch.build(runs, self._layout)
        if self._book.media is not None:
            self._book.media.attach(forward, runs)
        forward.attention.prepared = attention.prepare(forward.attention)
        prepared = time.perf_counter()
        return self._model.forward(forward, self._kv, attention), forward.attention.query_start, prepared

    def _shrunk(self, runs: list[Run]) -> None:
        if self._steps is not None:
            for run in runs:
                if run.drafts:
                    self._steps.resident.shrunk(run.request)

    def _propose(
        self, runs: list[Run], firsts: list[int], starts: list[int], hidden: torch.Tensor, result: StepResult, seconds: float
    ) -> None:
        """Fill `result.drafts`. firsts: what each request had computed before the step."""
        ran = []
        for run, first, begin in zip(runs, firsts, starts, strict=False):
            request = run.request
            if request.request_id in result.errors:
                continue
            rows = hidden[begin : begin + request.computed - first]
            ran.append(Ran(request, first, rows, run.drafts, len(result.sampled.get(request.request_id, ()))))
        step = StepRan(
            runs=ran,
            most=self._max_drafts,
            num_requests=len(runs),
            num_tokens=starts[-1],
            decode_only=all(first >= run.request.num_prompt_tokens for run, first in zip(runs, firsts, strict=True)),
            seconds=seconds,
        )
        result.drafts, errors = after.propose(step, self._book.plugins.order)
        for request_id, error in errors.items():
            result.sampled.pop(request_id, None)
            result.logprobs.pop(request_id, None)
            self._book.fail(request_id, error, result)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `host_logits`."""
        return _on_host(self._logits(hidden))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size] where the model is; tried again when memory was missing that others have given back."""
        try:
            return self._model.logits(hidden)
        except Exception as error:
            if not out_of_memory(error):
                raise
        self._device.release_cache()
        return self._model.logits(hidden)


def host_logits(model: CausalModel, hidden: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocab_size], contiguous, on the CPU, the caller's to change."""
    return _on_host(model.logits(hidden))


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    plain = logits.device.type == "cpu" and logits.dtype is torch.float32 and logits.is_contiguous()
    return logits if plain else logits.to("cpu", torch.float32).contiguous()
