"""The model runner: applies a step's order to request states, runs the model on the ragged batch, samples.

launch(order)
  apply      dropped, new, new_blocks, features                                            (requests.py)
  encode     what the model's encoder makes of pictures and sounds that begin here         (requests.py, encoder.py)
  prepare    token ids, positions, slots, block tables of all runs behind each other       (batch.build; on a device: device_steps.stage)
  forward    the model, all tokens                                                         (on a device: from a graph, maybe)
  prompts    LM head and token_logprobs over prompt rows of requests that want them, PROMPT_TILE rows at a time
  logits     LM head on the rows that sample: of each request whose last known token was run, that one's and its drafts'
  sample     core's sampler with the plugins' hooks; drafts that are equal are accepted    (sampling.py; on a device: device_steps.sample)
  propose    what plugins in the worker propose for the next step                          (after.propose)
collect(pending)
             the result. On the CPU it was there before; on a device this waits for the sampled ids, and the next step may be launched
             before it: the ids it begins with are on the device already
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
import torch

from ...kernels.torch_ops.limits import measure_limits
from ..config import Config
from ..contexts import Vocabulary, WorkerContext
from ..errors import EngineDiedError, PluginError, StepMemoryError, TokenbusError, WorkerError, plain_text
from ..host import PluginHost
from ..kv import sizing
from ..models.base import CausalModel, KVCache
from ..plan import Kernels, StepInput, StepResult
from . import start
from .attention import AttentionBackend, KVLayout
from .base import WorkerInfo
from .compute import StepComputer, host_logits
from .device import Device, device_broke, make_device
from .encoder import WorkerMedia, load_media
from .paged import make_cache
from .pending import InFlight, Pending
from .plugins import WorkerPlugins
from .requests import Requests
from .start import ModelLoader, load_model
from .threads import available_cores
from .vocabulary import LazyVocabulary

log = structlog.get_logger(__name__)


class ModelRunner:
    """Owns the model, the K/V tensors and all request states. Not thread-safe: one thread calls it, `load` first, then `allocate`.

    loader, vocabulary: for a model that no directory holds. clock: CPU seconds of the thread or process it runs in. device: the model's,
    by default; another one is for tests.
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
        device: Device | None = None,
    ) -> None:
        self.config = config
        self.plugins = WorkerPlugins(host, features)
        self._loader = loader
        self._clock = clock
        self._device = device
        self._computer: StepComputer | None = None
        self._model: CausalModel | None = None
        self._layout: KVLayout | None = None
        self._kv: KVCache | None = None
        self.vocabulary = vocabulary or LazyVocabulary(config.model.model, lambda: self._loaded()[0].spec)
        self._context = WorkerContext(self.vocabulary)
        self._book = Requests(self.plugins, self._context)
        self._requests, self._failed = self._book.known, self._book.failed
        self._in_flight = InFlight(self._book, config.cache.block_size)
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
        self.media = load_media(model, self.plugins, self.config.cache.encoder_memory_mb << 20)
        self._layout = layout = self.plugins.kv_layout(name, model.kv_layout(self.config.cache.block_size))
        lossless, reason = self._lossless(model, layout)
        attention = self.plugins.attention(layout)
        self._told_attention = attention if self.plugins.slot_error is None else None  # None: the first step tells
        self._load_sides(name, model, layout)
        sides = self.plugins.sides
        beside = [*sides, *([self.media] if self.media else ())]
        device = self._on(layout)
        start.check_graphs(self.config, device, model, attention)
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
            weights_bytes=spec.weights_bytes + sum(part.weights_bytes for part in beside),
            kv_bytes_per_token=layout.bytes_per_token + sum(side.kv_bytes_per_token for side in sides),
            free_bytes=max(
                0, start.free_bytes(self.config, device, model, layout, attention) - sum(part.fixed_bytes for part in beside)
            ),
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
            ahead=device.asynchronous,
            encodes_in_pieces=not device.asynchronous and self.media is not None and self.media.in_pieces,
            kv_memory_fraction=sizing.GPU_FRACTION if device.counts_memory else sizing.CPU_FRACTION,
        )

    def _on(self, layout: KVLayout) -> Device:
        if self._device is None:
            self._device = make_device(layout.device)
        return self._device

    def _lossless(self, model: CausalModel, layout: KVLayout) -> tuple[bool, str]:
        if not model.spec.lossless:
            return False, model.spec.lossless_reason
        backend = self.plugins.attention(layout)
        if not backend.invariant:
            return False, f"attention backend {backend.name!r} is not batch invariant"
        return model.numerics_probe()

    def _load_sides(self, name: str, model: CausalModel, layout: KVLayout) -> None:
        start.load_sides(
            self.config, self.plugins, name, model, layout, self.vocabulary, lambda hidden: host_logits(model, hidden)
        )

    @property
    def media(self) -> WorkerMedia | None:
        """What encodes the model's media; None for one that reads text only."""
        return self._book.media

    @media.setter
    def media(self, media: WorkerMedia | None) -> None:
        self._book.media = media

    def allocate(self, num_blocks: int) -> None:
        """Make the K/V tensors."""
        model, layout = self._loaded()
        self._kv = make_cache(layout, num_blocks)
        for side in self.plugins.sides:
            side.allocate(num_blocks)
        device, steps = self._on(layout), None
        if device.asynchronous:
            from .device_steps import DeviceSteps

            steps = DeviceSteps(device, model, layout, self._kv, num_blocks, self.config.model.cuda_graphs)
            self._book.fuse, self._book.dropped = True, steps.resident.drop
        self._computer = StepComputer(
            model, layout, self._kv, device, steps, self._book, self._in_flight, self.config.scheduler.max_drafts
        )

    def close(self) -> None:
        """End the threads it has started."""
        if self.media is not None:
            self.media.close()

    def _loaded(self) -> tuple[CausalModel, KVLayout]:
        if self._model is None or self._layout is None:
            raise WorkerError("the model is not loaded")
        return self._model, self._layout

    @property
    def ahead(self) -> bool:
        """`launch` comes back before the step's end; the next may be launched before this one is collected."""
        return self._device is not None and self._device.asynchronous

    # ---- a step -----------------------------------------------------------------------------------------------------------------

    def run(self, order: StepInput) -> StepResult:
        """Run one step. Raises WorkerError when it fails as a whole (StepMemoryError: nothing of it was done), PluginError when a plugin's
        attention backend is to blame; a request that fails alone is in `errors` of the result."""
        return self.collect(self.launch(order))

    def launch(self, order: StepInput) -> Pending:
        """Give a step to the device; on the CPU, run it. Raises what `run` does."""
        cpu = self._clock()
        try:
            with torch.inference_mode():
                pending = self._launch(order)
        except StepMemoryError as error:
            log.warning("step_without_memory", step_id=order.step_id, error=error.message)
            raise
        except WorkerError:
            raise
        except PluginError:
            log.exception("step_failed", step_id=order.step_id)
            raise
        except Exception as error:
            raise _failure(order.step_id, error) from error
        pending.result.phases["cpu"] = self._clock() - cpu
        if self.media is not None and self._clock is time.thread_time:
            pending.result.phases["cpu"] += self.media.take_cpu_seconds()
        return pending

    def collect(self, pending: Pending) -> StepResult:
        """The step's result, for which this waits; those launched before it are settled too. Raises WorkerError, or EngineDiedError
        when the GPU is broken."""
        if pending.later is None:
            return pending.result
        cpu, started = self._clock(), time.perf_counter()
        try:
            self._in_flight.settle(pending)
        except Exception as error:
            raise _failure(pending.result.step_id, error) from error
        phases = pending.result.phases
        phases["wait"] = time.perf_counter() - started
        phases["cpu"] += self._clock() - cpu
        return pending.result

    def _launch(self, order: StepInput) -> Pending:
        model, layout = self._loaded()
        if self._computer is None:
            raise WorkerError("the K/V cache is not allocated")
        if order.features is not None or order.settings or order.drafts:
            self._in_flight.settle()  # plugins may look at all tokens
        began = time.perf_counter()
        result = StepResult(step_id=order.step_id, sampled={})
        self._book.apply(order, result, layout.block_size)
        runs = self._book.runs(order, result, layout.block_size, model.spec.vocab_size)
        pending = Pending(result)
        encoding = time.perf_counter()
        if order.encode is not None and self.media is not None:
            self.media.beforehand(order.encode)
        runs = self._book.encode(runs, result)
        encoded = time.perf_counter()
        if runs:
            attention = self._attention(model, layout, result)
            self._computer.run(runs, pending, attention, began + encoded - encoding)
            self._told_attention = attention
        if self.media is not None:
            result.encoded, result.forgotten = self.media.take_news()
            result.phases["encode"] = encoded - encoding
        return pending

    def _attention(self, model: CausalModel, layout: KVLayout, result: StepResult) -> AttentionBackend:
        """The backend for this step; the result says so when it is another one than before."""
        attention = self.plugins.attention(layout)
        if attention is not self._told_attention:
            lossless, reason = self._lossless(model, layout)
            error = self.plugins.slot_error
            told = None if error is None else error.to_wire()
            result.kernels = Kernels(attention=attention.name, lossless=lossless, reason=reason, error=told)
        return attention


def _failure(step_id: int, error: Exception) -> TokenbusError:
    """Of a step, as the engine is told. A device that broke does nothing for this process any more: another one must be started."""
    log.error("step_failed", step_id=step_id, exc_info=error)
    text = f"step {step_id} failed: {type(error).__name__}: {plain_text(error)}"
    return EngineDiedError(f"the GPU broke: {text}") if device_broke(error) else WorkerError(text)
