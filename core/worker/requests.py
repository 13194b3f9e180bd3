"""The requests that the worker knows: a step's order is applied to them, and says what of it can be run."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ..contexts import WorkerContext
from ..errors import ErrorInfo, TokenbusError, WorkerError
from ..plan import StepInput, StepResult, WorkerRequest
from ..sampler import MIN_TEMPERATURE
from .batch import Run
from .encoder import WorkerMedia, media_of
from .plugins import WorkerPlugins
from .state import FusedFilters, WorkerRequestState

log = structlog.get_logger(__name__)


class Requests:
    """fuse: find out which requests' tokens a device can sample. dropped: told of each that goes."""

    def __init__(
        self,
        plugins: WorkerPlugins,
        context: WorkerContext,
        *,
        fuse: bool = False,
        dropped: Callable[[WorkerRequestState], None] = lambda _: None,
    ) -> None:
        self.plugins = plugins
        self.known: dict[str, WorkerRequestState] = {}
        self.failed: dict[str, ErrorInfo] = {}
        """Requests that failed and are not dropped yet: the engine may have planned them again before it knew."""
        self.fuse = fuse
        self.dropped = dropped
        self.media: WorkerMedia | None = None
        """What encodes the model's media; None for one that reads text only."""
        self._context = context

    def apply(self, order: StepInput, result: StepResult, block_size: int) -> None:
        for request_id in order.dropped:
            gone = self.known.pop(request_id, None)
            if gone is not None:
                self.dropped(gone)
            self.failed.pop(request_id, None)
            self.plugins.removed(request_id)
        self.plugins.configure(order.settings)
        for new in order.new:
            self._add(new, result, block_size)
        for request_id, blocks in order.new_blocks.items():
            if request_id in self.known:
                self.known[request_id].blocks.extend(blocks)
                self._handed_out(blocks)
        if order.features is not None:
            self._switch(order.features, result)
        self.plugins.release()

    def _handed_out(self, blocks: list[int]) -> None:
        for side in self.plugins.sides:
            side.handed_out(blocks)

    def _add(self, new: WorkerRequest, result: StepResult, block_size: int) -> None:
        try:
            request = WorkerRequestState(new, self.plugins.added(new))
            if (before := self.known.get(new.request_id)) is not None:
                self.dropped(before)
            self.known[new.request_id] = request
            if new.media:
                request.media = media_of(new, self.media)
            self._handed_out(request.blocks[new.num_computed // block_size :])
            for impl in request.hooks.worker_request_added:
                impl(request=request, worker=self._context)
            self._find_fused(request)
        except TokenbusError as error:
            self.fail(new.request_id, error, result)

    def _switch(self, features: tuple[str, ...], result: StepResult) -> None:
        """A plugin that can't be loaded here fails the step: the engine then switches it off again."""
        before = self.plugins.switch(features)
        if before == self.plugins.features:
            return
        for request in self.known.values():
            if request.request_id in self.failed:
                continue
            try:
                for impl in self.plugins.move(request, before):
                    impl(request=request, worker=self._context)
                self._find_fused(request)
            except TokenbusError as error:
                self.fail(request.request_id, error, result)

    def _find_fused(self, request: WorkerRequestState) -> None:
        if self.fuse:
            request.fused = fused_filters(request)

    def fail(self, request_id: str, error: TokenbusError, result: StepResult) -> None:
        error.request_id = request_id
        log.warning(
            "request_failed_on_worker", request_id=request_id, error=error.message, plugin=error.plugin, hook=error.hook
        )
        self.failed[request_id] = result.errors[request_id] = error.to_wire()

    def runs(self, order: StepInput, result: StepResult, block_size: int, vocab_size: int) -> list[Run]:
        """What can be run of the order, drafts appended to their requests' tokens; the rest are errors of their requests."""
        runs = []
        for request_id, count in order.num_tokens.items():
            if request_id in self.failed:
                result.errors[request_id] = self.failed[request_id]
                continue
            request = self.known.get(request_id)
            drafts = order.drafts.get(request_id, [])
            end = count if request is None else request.computed + count
            if request is None:
                problem = "is unknown to the worker"
            elif count < 1 or (end != len(request.tokens) + len(drafts) if drafts else end > len(request.tokens)):
                problem = f"can't run {count} tokens: {request.computed} of {len(request.tokens)} are computed"
            elif end > len(request.blocks) * block_size:
                problem = f"has blocks for {len(request.blocks) * block_size} tokens, but {end} are to be written"
            elif drafts and max(drafts) >= vocab_size:
                problem = f"has a draft {max(drafts)} beyond the vocabulary of {vocab_size} tokens"
            else:
                request.tokens.extend(drafts)
                runs.append(Run(request, count, len(drafts)))
                continue
            self.fail(request_id, WorkerError(f"request {request_id} {problem}"), result)
        return runs

    def encode(self, runs: list[Run], result: StepResult) -> list[Run]:
        """Have ready what the runs need of the encoder; the rest are errors of their requests."""
        if self.media is None:
            return runs
        ready = []
        for run in runs:
            try:
                self.media.load(run)
            except TokenbusError as error:
                self.fail(run.request.request_id, error, result)
                continue
            ready.append(run)
        self.media.count(result.counters)
        return ready


def withdraw(runs: list[Run]) -> None:
    """Before anything of a step was computed for good: take its drafts back from the requests. Blocks that they needed stay."""
    for request, _, drafts in runs:
        if drafts:
            del request.tokens[len(request.tokens) - drafts :]


def fused_filters(request: WorkerRequestState) -> FusedFilters | None:
    """What a sampling kernel needs to know of the request's plugins; None when one of them does what it can't. Raises what they raise."""
    hooks, nothing = request.hooks, FusedFilters()
    if hooks.token_logprobs:
        return None
    adjust = {impl.plugin for impl in hooks.adjust_logits}
    filters = set() if request.temperature < MIN_TEMPERATURE else {impl.plugin for impl in hooks.filter_logits}
    said = {impl.plugin: impl(request=request) for impl in hooks.fused_filters if impl.plugin in adjust | filters}
    if any(said.get(plugin) != nothing for plugin in adjust):
        return None
    found = [said.get(plugin) for plugin in filters if said.get(plugin) != nothing]
    if len(found) > 1:
        return None  # which of them comes first is not for the kernel to say
    return found[0] if found else nothing
