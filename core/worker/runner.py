"""The model runner: applies a step's order to request states, runs the model on the ragged batch, samples. Synchronous.

run(order)
  apply      dropped, new, new_blocks, features
  encode     what the model's encoder makes of pictures and sounds that begin here                 (encoder.py)
  prepare    token ids, positions, slots, block tables of all runs behind each other       (batch.build)
  forward    the model, all tokens
  logits     LM head on the rows that sample: of each request whose last known token was run, that one's and its drafts'
  sample     core's sampler with the plugins' hooks; drafts that are equal are accepted     (sampler.sample)
  prompts    LM head and token_logprobs over prompt rows of requests that want them, PROMPT_TILE rows at a time
  propose    what plugins in the worker propose for the next step                          (after.propose)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import structlog
import torch

from ...kernels.torch_ops.limits import measure_limits
from .. import sampler
from ..config import Config
from ..contexts import Vocabulary, WorkerContext
from ..device import resolve_device
from ..errors import ErrorInfo, PluginError, TokenbusError, WorkerError, plain_text
from ..host import PluginHost
from ..kv.sizing import free_memory
from ..models.base import CausalModel, KVCache
from ..models.linears import ChooseLinears
from ..plan import Kernels, StepInput, StepResult, TokenLogprobs, WorkerRequest
from . import after, batch
from .attention import AttentionBackend, KVLayout
from .base import WorkerInfo
from .batch import Run
from .encoder import WorkerMedia, media_of
from .paged import make_cache
from .plugins import WorkerPlugins
from .side import Beside, Ran, StepRan
from .state import SampleRow, WorkerRequestState
from .threads import available_cores
from .vocabulary import LazyVocabulary

log = structlog.get_logger(__name__)

PROMPT_TILE = 32
"""Prompt rows whose logits exist at the same time."""
SAMPLE_TILE = 128
"""Rows that are sampled together at most, which bounds the memory of their logits."""
ModelLoader = Callable[[Config, ChooseLinears], tuple[str, CausalModel]]
"""Gives the model's name and the loaded model; raises ModelError."""


def load_model(config: Config, choose: ChooseLinears | None) -> tuple[str, CausalModel]:
    from ..models.loader import load
    from ..models.resolve import resolve

    settings = config.model
    resolved, device = resolve(settings.model), resolve_device(settings.device)
    model = load(
        resolved,
        settings.dtype,
        device,
        settings.kernels,
        choose,
        batch_invariant=settings.batch_invariant,
        max_model_len=settings.max_model_len,
    )
    return resolved.name, model


class ModelRunner:
    """Owns the model, the K/V tensors and all request states. Not thread-safe: one thread calls it, `load` first, then `allocate`.

    loader, vocabulary: for a model that no directory holds. clock: CPU seconds of the thread or process it runs in.
    """

    def __init__(
        self,
        config: Config,
        features: tuple[str, ...],
        host: PluginHost,
        *,
        loader: ModelLoader = load_model,
        vocabulary: Callable[[], Vocabulary] | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.config = config
        self.plugins = WorkerPlugins(host, features)
        self._loader = loader
        self._clock = clock
        self._requests: dict[str, WorkerRequestState] = {}
        self._failed: dict[str, ErrorInfo] = {}
        """Requests that failed and are not dropped yet: the engine may have planned them again before it knew."""
        self._model: CausalModel | None = None
        self._layout: KVLayout | None = None
        self._kv: KVCache | None = None
        self._media: WorkerMedia | None = None
        self.vocabulary = vocabulary or LazyVocabulary(config.model.model, lambda: self._loaded()[0].spec)
        self._context = WorkerContext(self.vocabulary)
        self._told_attention: AttentionBackend | None = None
        """The backend that the engine knows of."""

    # ---- start ------------------------------------------------------------------------------------------------------------------

    def load(self) -> WorkerInfo:
        """Load plugins and model. Raises ModelError, PluginLoadError, ConfigError."""
        started = time.perf_counter()
        torch.set_num_threads(self.config.model.threads or available_cores())
        self.plugins.start()
        plugins_done = time.perf_counter()
        name, model = self._loader(self.config, self.plugins.linears)
        weights_done = time.perf_counter()
        self._model = model
        self._media = self._load_media(model)
        self._layout = layout = self.plugins.kv_layout(name, model.kv_layout(self.config.cache.block_size))
        lossless, reason = self._lossless(model, layout)
        attention = self.plugins.attention(layout)
        self._told_attention = attention if self.plugins.slot_error is None else None  # None: the first step tells
        self._load_sides(name, model, layout)
        sides = self.plugins.sides
        probed = time.perf_counter()
        limits = measure_limits(layout.dtype, layout.device)
        spec = model.spec
        return WorkerInfo(
            model=name,
            architecture=spec.architecture,
            dtype=str(layout.dtype).removeprefix("torch."),
            vocab_size=spec.vocab_size,
            max_model_len=spec.max_model_len,
            eos_token_ids=spec.eos_token_ids,
            weights_bytes=spec.weights_bytes + sum(s.weights_bytes for s in (*sides, *([self._media] if self._media else ()))),
            kv_bytes_per_token=layout.bytes_per_token + sum(side.kv_bytes_per_token for side in sides),
            free_bytes=max(0, free_memory() - sum(s.fixed_bytes for s in (*sides, *([self._media] if self._media else ())))),
            lossless=lossless,
            lossless_reason=reason,
            phases={
                "plugins": plugins_done - started,
                "weights": weights_done - plugins_done,
                "probe": probed - weights_done,
                "limits": time.perf_counter() - probed,
            },
            read_bytes_per_second=limits.read_bytes_per_second,
            flops_per_second=limits.flops_per_second,
        )

    def _lossless(self, model: CausalModel, layout: KVLayout) -> tuple[bool, str]:
        if not model.spec.lossless:
            return False, model.spec.lossless_reason
        backend = self.plugins.attention(layout)
        if not backend.invariant:
            return False, f"attention backend {backend.name!r} is not batch invariant"
        return model.numerics_probe()

    def _load_sides(self, name: str, model: CausalModel, layout: KVLayout) -> None:

        def at(path: str) -> Config:
            return msgspec.structs.replace(self.config, model=msgspec.structs.replace(self.config.model, model=path))

        self.plugins.make_sides(name, self.config.model.dtype, layout.block_size, layout.device.type)
        beside = Beside(
            spec=model.spec,
            layout=layout,
            vocabulary=self._context.vocabulary,
            logits=self._head,
            load=lambda path: load_model(at(path), choose=None)[1],
            vocabulary_of=lambda path, spec: LazyVocabulary(path, lambda: spec)(),
            attention=self.plugins.attention_beside,
        )
        for side in self.plugins.sides:
            side.load(beside)

    def _load_media(self, model: CausalModel) -> WorkerMedia | None:
        encoder = None if model.beside is None else self.plugins.encoder(model.beside)
        if encoder is None:
            return None
        model.take_media(looks_ahead=encoder.looks_ahead)
        return WorkerMedia(encoder, self.config.cache.encoder_memory_mb << 20)

    def allocate(self, num_blocks: int) -> None:
        """Make the K/V tensors."""
        self._kv = make_cache(self._loaded()[1], num_blocks)
        for side in self.plugins.sides:
            side.allocate(num_blocks)

    def _loaded(self) -> tuple[CausalModel, KVLayout]:
        if self._model is None or self._layout is None:
            raise WorkerError("the model is not loaded")
        return self._model, self._layout

    # ---- a step -----------------------------------------------------------------------------------------------------------------

    def run(self, order: StepInput) -> StepResult:
        """Run one step. Raises WorkerError when it fails as a whole, PluginError when a plugin's attention backend is to blame; a request
        that fails alone is in `errors` of the result."""
        cpu = self._clock()
        try:
            with torch.inference_mode():
                result = self._run(order)
        except WorkerError:
            raise
        except PluginError:
            log.exception("step_failed", step_id=order.step_id)
            raise
        except Exception as error:
            log.exception("step_failed", step_id=order.step_id)
            raise WorkerError(f"step {order.step_id} failed: {type(error).__name__}: {plain_text(error)}") from error
        result.phases["cpu"] = self._clock() - cpu
        return result

    def _run(self, order: StepInput) -> StepResult:
        model, layout = self._loaded()
        if self._kv is None:
            raise WorkerError("the K/V cache is not allocated")
        started = time.perf_counter()
        result = StepResult(step_id=order.step_id, sampled={})
        self._apply(order, result)
        runs = self._runs(order, result)
        encoded = started
        if self._media is not None:
            runs = self._encode(runs, result)
            encoded = time.perf_counter()
        if not runs:
            return result
        attention = self._attention(model, layout, result)
        forward = batch.build(runs, layout)
        if self._media is not None:
            self._media.attach(forward, runs)
        forward.attention.prepared = attention.prepare(forward.attention)
        prepared = time.perf_counter()
        hidden = model.forward(forward, self._kv, attention)
        ran = time.perf_counter()

        starts = forward.attention.query_start
        prompt_rows, head_calls = self._prompt_logprobs(runs, starts, hidden, result)
        prompted = time.perf_counter()
        tiles = _sampling_tiles(runs)
        result.flops = batch.flops(runs, layout, model.spec, prompt_rows + sum(run.rows for run in runs))
        result.bytes_moved = batch.bytes_moved(runs, layout, model.spec, head_calls + len(tiles))
        firsts = [run.request.computed for run in runs]
        for request, n, _ in runs:
            request.computed += n
            if request.media is not None:
                request.media.release(request.computed)
        in_head = 0.0
        for some in tiles:
            head_started = time.perf_counter()
            rows = [row for i in some for row in range(starts[i + 1] - runs[i].drafts - 1, starts[i + 1])]
            logits = self._head(hidden if len(rows) == len(hidden) else hidden[rows])
            in_head += time.perf_counter() - head_started
            self._sample(logits, [runs[i] for i in some], result)
        self._told_attention = attention
        result.phases = {
            "prepare": prepared - encoded,
            "forward": ran - prepared,
            "logits": in_head,
            "sample": time.perf_counter() - prompted - in_head,
        }
        if encoded > started:
            result.phases["encode"] = encoded - started
        if prompt_rows:
            result.phases["prompt_logprobs"] = prompted - ran
        if any(run.request.hooks.drafts_after_step for run in runs):
            sampled = time.perf_counter()
            self._propose(runs, firsts, starts, hidden, result, sampled - started)
            result.phases["draft"] = time.perf_counter() - sampled
        return result

    def _propose(
        self, runs: list[Run], firsts: list[int], starts: list[int], hidden: torch.Tensor, result: StepResult, seconds: float
    ) -> None:
        """Fill `result.drafts`. firsts: what each request had computed before the step."""
        ran = []
        for run, first, start in zip(runs, firsts, starts, strict=False):
            request = run.request
            if request.request_id in result.errors:
                continue
            rows = hidden[start : start + request.computed - first]
            ran.append(Ran(request, first, rows, run.drafts, len(result.sampled.get(request.request_id, ()))))
        step = StepRan(
            runs=ran,
            most=self.config.scheduler.max_drafts,
            num_requests=len(runs),
            num_tokens=starts[-1],
            decode_only=all(first >= run.request.num_prompt_tokens for run, first in zip(runs, firsts, strict=True)),
            seconds=seconds,
        )
        result.drafts, errors = after.propose(step, self.plugins.order)
        for request_id, error in errors.items():
            result.sampled.pop(request_id, None)
            result.logprobs.pop(request_id, None)
            self._fail(request_id, error, result)

    def _attention(self, model: CausalModel, layout: KVLayout, result: StepResult) -> AttentionBackend:
        """The backend for this step; the result says so when it is another one than before."""
        attention = self.plugins.attention(layout)
        if attention is not self._told_attention:
            lossless, reason = self._lossless(model, layout)
            error = self.plugins.slot_error
            told = None if error is None else error.to_wire()
            result.kernels = Kernels(attention=attention.name, lossless=lossless, reason=reason, error=told)
        return attention

    def _apply(self, order: StepInput, result: StepResult) -> None:
        for request_id in order.dropped:
            self._requests.pop(request_id, None)
            self._failed.pop(request_id, None)
            self.plugins.removed(request_id)
        self.plugins.configure(order.settings)
        for new in order.new:
            self._add(new, result)
        for request_id, blocks in order.new_blocks.items():
            if request_id in self._requests:
                self._requests[request_id].blocks.extend(blocks)
                self._handed_out(blocks)
        if order.features is not None:
            self._switch(order.features, result)
        self.plugins.release()

    def _handed_out(self, blocks: list[int]) -> None:
        for side in self.plugins.sides:
            side.handed_out(blocks)

    def _switch(self, features: tuple[str, ...], result: StepResult) -> None:
        """A plugin that can't be loaded here fails the step: the engine then switches it off again."""
        before = self.plugins.switch(features)
        if before == self.plugins.features:
            return
        for request in self._requests.values():
            if request.request_id in self._failed:
                continue
            try:
                for impl in self.plugins.move(request, before):
                    impl(request=request, worker=self._context)
            except TokenbusError as error:
                self._fail(request.request_id, error, result)

    def _add(self, new: WorkerRequest, result: StepResult) -> None:
        try:
            request = WorkerRequestState(new, self.plugins.added(new))
            self._requests[new.request_id] = request
            if new.media:
                request.media = media_of(new, self._media)
            self._handed_out(request.blocks[new.num_computed // self._loaded()[1].block_size :])
            for impl in request.hooks.worker_request_added:
                impl(request=request, worker=self._context)
        except TokenbusError as error:
            self._fail(new.request_id, error, result)

    def _fail(self, request_id: str, error: TokenbusError, result: StepResult) -> None:
        error.request_id = request_id
        log.warning(
            "request_failed_on_worker", request_id=request_id, error=error.message, plugin=error.plugin, hook=error.hook
        )
        self._failed[request_id] = result.errors[request_id] = error.to_wire()

    def _runs(self, order: StepInput, result: StepResult) -> list[Run]:
        """What can be run of the order; the rest are errors of their requests."""
        model, layout = self._loaded()
        block_size, vocab_size = layout.block_size, model.spec.vocab_size
        runs = []
        for request_id, count in order.num_tokens.items():
            if request_id in self._failed:
                result.errors[request_id] = self._failed[request_id]
                continue
            request = self._requests.get(request_id)
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
            self._fail(request_id, WorkerError(f"request {request_id} {problem}"), result)
        return runs

    def _encode(self, runs: list[Run], result: StepResult) -> list[Run]:
        """Have ready what the runs need of the encoder; the rest are errors of their requests."""
        assert self._media is not None
        ready = []
        for run in runs:
            try:
                self._media.load(run)
            except TokenbusError as error:
                self._fail(run.request.request_id, error, result)
                continue
            ready.append(run)
        self._media.count(result.counters)
        return ready

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocab_size], contiguous, on the CPU, ours to change."""
        logits = self._loaded()[0].logits(hidden)
        plain = logits.device.type == "cpu" and logits.dtype is torch.float32 and logits.is_contiguous()
        return logits if plain else logits.to("cpu", torch.float32).contiguous()

    def _sample(self, logits: torch.Tensor, runs: list[Run], result: StepResult) -> None:
        """One token for each row of `runs`; a request gets those up to the first that isn't the draft at its place."""
        parts: list[tuple[Run, int]] = []
        """Runs and their first row."""
        rows: list[SampleRow] = []
        kept: list[int] = []
        start = 0
        for run in runs:
            request, known = run.request, len(run.request.tokens) - run.drafts
            if request.request_id not in result.errors:
                parts.append((run, len(rows)))
                rows.extend(SampleRow(request, known + i, drafts=i) for i in range(run.drafts + 1))
                kept.extend(range(start, start + run.drafts + 1))
            start += run.drafts + 1
        if len(kept) < start:
            logits = logits[kept]
        if not rows:
            return
        firsts = {run.request.request_id: logits[row].clone() for run, row in parts if run.drafts}
        outcome = sampler.sample(logits, rows, self.plugins.order)
        for run, row in parts:
            request = run.request
            known = len(request.tokens) - run.drafts
            tokens, entries = outcome.token_ids[row : row + run.drafts + 1], outcome.logprobs[row : row + run.drafts + 1]
            error = outcome.errors.get(request.request_id)
            if run.drafts:
                drafts = request.tokens[known:]
                del request.tokens[known:]
                if error is not None:  # of a row behind a wrong draft, maybe, which would not have been
                    alone = sampler.sample(firsts[request.request_id][None], [SampleRow(request, known)], self.plugins.order)
                    error, tokens, entries = alone.errors.get(request.request_id), alone.token_ids, alone.logprobs
                else:
                    right = next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))
                    tokens, entries = tokens[: right + 1], entries[: right + 1]
            if error is not None:
                self._fail(request.request_id, error, result)
                continue
            request.tokens.extend(tokens)
            if run.drafts:
                request.computed = len(request.tokens) - 1
                del request.blocks[-(-len(request.tokens) // self._loaded()[1].block_size) :]
            result.sampled[request.request_id] = tokens
            if entries[0] is not None:
                result.logprobs[request.request_id] = [entry for entry in entries if entry is not None]

    def _prompt_logprobs(self, runs: list[Run], starts: list[int], hidden: torch.Tensor, result: StepResult) -> tuple[int, int]:
        """Fill `result.prompt_logprobs`. Returns rows and calls of the LM head."""
        num_rows = num_calls = 0
        for run, start in zip(runs, starts, strict=False):
            request = run.request
            if not request.prompt_logits:
                continue
            count = min(run.n, request.num_prompt_tokens - 1 - request.computed)
            entries: list[TokenLogprobs] = []
            for first in range(0, count, PROMPT_TILE):
                size = min(PROMPT_TILE, count - first)
                position = request.computed + first + 1
                rows = [SampleRow(request, position + i, is_prompt=True) for i in range(size)]
                logits = self._head(hidden[start + first : start + first + size])
                known = request.tokens[position : position + size]
                given, errors = sampler.prompt_logprobs(logits, rows, known, self.plugins.order)
                num_rows, num_calls = num_rows + size, num_calls + 1
                if errors:
                    self._fail(request.request_id, errors[request.request_id], result)
                    break
                entries.extend(entry for entry in given if entry is not None)
            else:
                if entries:
                    result.prompt_logprobs[request.request_id] = entries
        return num_rows, num_calls


def _sampling_tiles(runs: Sequence[Run]) -> list[list[int]]:
    """Indices of the runs that sample, in groups of at most SAMPLE_TILE rows (a run with more drafts is a group of its own)."""
    tiles: list[list[int]] = []
    room = 0
    for i, run in enumerate(runs):
        if not run.rows:
            continue
        if run.rows > room:
            tiles.append([])
            room = SAMPLE_TILE
        tiles[-1].append(i)
        room -= run.rows
    return tiles
