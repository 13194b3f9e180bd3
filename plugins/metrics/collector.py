"""Counts what the front's bus tells. Metric names and meanings are in the table of docs/metrics.md; a test compares the two."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

from ...core.front.events import (
    EngineDied,
    EngineStarted,
    FeatureChange,
    LoopLag,
    MediaPrepared,
    RequestAdmitted,
    RequestRecord,
    RequestRefused,
)
from ...core.messages import StepReport

if TYPE_CHECKING:
    from ...core.contexts import FrontContext
    from . import MetricsSettings

log = structlog.get_logger(__name__)

PROMPT_BUCKETS = (128, 512, 2048, 8192)
LATENCY = (0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
STEPS_AT_ONCE = 64
"""Steps that are counted together: one by one each would find its counters out of the processor's caches."""
GAPS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)
LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def prompt_bucket(tokens: int) -> str:
    """The label of a prompt's length: "le_128", ..., "gt_8192"."""
    return next((f"le_{bound}" for bound in PROMPT_BUCKETS if tokens <= bound), f"gt_{PROMPT_BUCKETS[-1]}")


class Collector:
    """One registry of its own, filled by listeners on the bus; `close` takes them away."""

    def __init__(self, front: FrontContext, settings: MetricsSettings) -> None:
        self._registry = CollectorRegistry()
        self._front = front
        self._idle = IdleAlarm(settings.idle_alarm_fraction, settings.idle_alarm_window)
        self._allocation_failures = 0
        self._cpu: dict[str, float] = {}
        self._steps: list[StepReport] = []
        """Not counted yet."""
        self._make_step_metrics()
        self._make_request_metrics()
        self._make_media_metrics()
        self._make_process_metrics()
        bus = front.bus
        self._listeners = [
            bus.listen(self._note_step, StepReport),
            bus.listen(self._on_admitted, RequestAdmitted),
            bus.listen(self._on_request, RequestRecord),
            bus.listen(self._on_refused, RequestRefused),
            bus.listen(self._on_media, MediaPrepared),
            bus.listen(self._on_lag, LoopLag),
            bus.listen(self._on_started, EngineStarted),
            bus.listen(self._on_died, EngineDied),
            bus.listen(self._on_change, FeatureChange),
        ]
        if (info := front.info()) is not None:
            self._on_started(EngineStarted(info, 0))

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()

    @property
    def registry(self) -> CollectorRegistry:
        """With all that was told so far."""
        self._count_steps()
        return self._registry

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The metrics in the text format that the Accept header asks for, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    # ---- definitions ------------------------------------------------------------------------------------------------------------

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tokenbus_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"tokenbus_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"tokenbus_{name}", text, labels, buckets=buckets, registry=self._registry)

    def _make_step_metrics(self) -> None:
        self.running = self._gauge("requests_running", "Requests that hold KV blocks")
        self.waiting = self._gauge("requests_waiting", "Requests in the engine's queue")
        self.free_blocks = self._gauge("kv_blocks_free", "KV blocks that can be handed out (free and evictable)")
        self.total_blocks = self._gauge("kv_blocks_total", "KV blocks in the pool")
        self.kv_usage = self._gauge("kv_usage_ratio", "Share of KV blocks that requests hold")
        self.steps = self._counter("steps", "Engine steps")
        self.step_seconds = self._histogram(
            "step_seconds", "Wall time of a step, from plan (or the step before) to result", LATENCY
        )
        self.step_gap = self._histogram("step_gap_seconds", "Time before a step in which the worker had nothing to do", GAPS)
        self.ahead = self._counter("steps_planned_ahead", "Steps planned while the one before computed")
        self.waited = self._counter("steps_that_waited", "Steps planned only after the result of the one before", ("why",))
        self.discarded = self._counter("ahead_discarded_tokens", "Tokens run in vain in steps planned ahead")
        self.step_requests = self._histogram("step_requests", "Requests in a step", LENGTHS)
        self.step_prompt = self._histogram("step_prompt_tokens", "Prompt tokens in a step", LENGTHS)
        self.step_decode = self._histogram("step_decode_tokens", "Decode tokens in a step", LENGTHS)
        self.step_drafts = self._histogram("step_draft_tokens", "Drafts verified in a step", LENGTHS)
        self.plugin_counts = self._counter("plugin_counts", "What plugins count, by the counter's own name", ("name",))
        self.phase_seconds = self._counter("step_phase_seconds", "Wall time of steps by phase", ("phase",))
        self.preemptions = self._counter("preemptions", "Requests that lost their KV blocks and were queued again")
        self.allocation_failures = self._counter("kv_allocation_failures", "Times the pool had too few blocks")
        self.bytes_moved = self._counter("step_bytes", "Weights and K/V that steps had to move, by formula")
        self.flops = self._counter("step_flops", "Floating-point operations of steps, by formula")
        self.bandwidth_share = self._gauge(
            "step_bandwidth_ratio", "Last step: bytes per second over the measured read bandwidth"
        )
        self.flops_share = self._gauge("step_flops_ratio", "Last step: operations per second over the measured matmul rate")
        self.idle_seconds = self._counter(
            "idle_while_busy_seconds", "Time in which requests waited or ran but no step computed"
        )
        self.idle_alarm = self._gauge(
            "alarm_queue_busy_device_idle", "1 while that time passes the alarm's fraction of its window"
        )

    def _make_request_metrics(self) -> None:
        by_prompt = ("prompt",)
        self.ttft = self._histogram("ttft_seconds", "Time to first token, by prompt length", LATENCY, by_prompt)
        self.itl = self._histogram("inter_token_latency_seconds", "Time between tokens of a request", LATENCY, by_prompt)
        self.e2e = self._histogram("e2e_seconds", "Time from arrival to the end of a request", LATENCY, by_prompt)
        by_arm = ("arm",)
        self.arm_ttft = self._histogram(
            "arm_ttft_seconds", "Time to first token of requests in experiments, by arm", LATENCY, by_arm
        )
        self.arm_itl = self._histogram(
            "arm_inter_token_latency_seconds", "Time between tokens of requests in experiments, by arm", LATENCY, by_arm
        )
        self.started = self._counter("requests_started", "Choices handed to the engine: those finished plus those open")
        self.open = self._gauge("requests_open", "Choices handed to the engine that have not ended")
        self.finished = self._counter("requests_finished", "Choices by finish reason and arm", ("reason", "arm"))
        self.resumptions = self._counter(
            "request_resumptions", "Times that a choice went on in another engine after its own had died"
        )
        self.refused = self._counter("requests_refused", "API requests refused before admission", ("status", "kind"))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens of ended requests that a cache gave")
        self.output_tokens = self._counter("output_tokens", "Tokens generated for ended requests")
        self.tokenize_seconds = self._counter("tokenize_seconds", "Time spent tokenising prompts")
        self.template_seconds = self._counter("template_seconds", "Time spent in chat templates")

    def _make_media_metrics(self) -> None:
        self.media_items = self._counter(
            "media_items", "Pictures and sounds of requests, by kind, processed or found in the cache", ("kind", "source")
        )
        self.media_tokens = self._counter("media_tokens", "Prompt tokens that those stand for")
        self.media_seconds = self._histogram(
            "media_seconds", "Time in which an API request's pictures and sounds were fetched and processed", LATENCY
        )
        self.media_bytes = self._gauge("media_open_bytes", "Processed pictures and sounds of open requests")

    def _make_process_metrics(self) -> None:
        self.cpu = self._counter("process_cpu_seconds", "CPU time by process", ("process",))
        self.lag = self._histogram("loop_lag_seconds", "How late an event loop woke", LATENCY, ("process",))
        self.deaths = self._counter("engine_deaths", "Engine processes that ended while they should have run")
        self.restarts = self._gauge("engine_restarts", "Restarts of the engine since the server began")
        self.changes = self._counter("feature_changes", "Live switch changes")
        self.machine_bandwidth = self._gauge("machine_read_bytes_per_second", "Memory read bandwidth measured at start")
        self.machine_flops = self._gauge(
            "machine_flops_per_second", "Matrix product rate measured at start, in the model's dtype"
        )

    # ---- events -----------------------------------------------------------------------------------------------------------------

    def _note_step(self, step: StepReport) -> None:
        self._steps.append(step)
        if len(self._steps) >= STEPS_AT_ONCE:
            self._count_steps()

    def _count_steps(self) -> None:
        steps, self._steps = self._steps, []
        for step in steps:
            self._on_step(step)

    def _on_step(self, step: StepReport) -> None:
        self.running.set(step.running)
        self.waiting.set(step.waiting)
        self.free_blocks.set(step.free_blocks)
        self.total_blocks.set(step.num_blocks)
        self.kv_usage.set(1 - step.free_blocks / step.num_blocks if step.num_blocks else 0)
        if step.ran:
            self._count_step(step)
        for name, count in step.counters.items():
            self.plugin_counts.labels(name).inc(max(0.0, count))
        self.preemptions.inc(step.preempted)
        self.allocation_failures.inc(max(0, step.allocation_failures - self._allocation_failures))
        self._allocation_failures = step.allocation_failures
        self._count_cpu("engine", step.cpu_seconds)
        idle = self._idle.step(step.started, step.duration, busy=step.running + step.waiting > 0)
        self.idle_seconds.inc(idle)
        self.idle_alarm.set(self._idle.alarm)

    def _count_step(self, step: StepReport) -> None:
        self.steps.inc()
        self.step_seconds.observe(step.duration)
        self.step_gap.observe(step.gap)
        self.ahead.inc(step.ahead)
        if step.waited:
            self.waited.labels(step.waited).inc()
        self.discarded.inc(step.ahead_discarded)
        if step.num_requests:
            self.step_requests.observe(step.num_requests)
            self.step_prompt.observe(step.prompt_tokens)
            self.step_decode.observe(step.decode_tokens)
        for phase, seconds in step.phases.items():
            self.phase_seconds.labels(phase).inc(max(0.0, seconds))
        self.step_drafts.observe(step.draft_tokens)
        self.bytes_moved.inc(step.bytes_moved)
        self.flops.inc(step.flops)
        info = self._front.info()
        if info is not None and step.duration > 0:
            if info.read_bytes_per_second:
                self.bandwidth_share.set(step.bytes_moved / step.duration / info.read_bytes_per_second)
            if info.flops_per_second:
                self.flops_share.set(step.flops / step.duration / info.flops_per_second)

    def _on_admitted(self, admitted: RequestAdmitted) -> None:
        self.started.inc()
        self.open.inc()
        self.media_bytes.inc(admitted.media_bytes)

    def _on_request(self, record: RequestRecord) -> None:
        label = prompt_bucket(record.prompt_tokens)
        self.open.dec()
        self.media_bytes.dec(record.media_bytes)
        self.finished.labels(record.finish_reason, record.arm).inc()
        if record.ttft is not None:
            self.ttft.labels(label).observe(record.ttft)
        itl = self.itl.labels(label)
        for gap in record.gaps:
            itl.observe(gap)
        self.e2e.labels(label).observe(record.e2e)
        if record.arm:
            self._on_arm(record)
        self.prompt_tokens.inc(record.prompt_tokens)
        self.cached_tokens.inc(record.cached_tokens)
        self.output_tokens.inc(record.output_tokens)
        self.resumptions.inc(record.resumptions)
        self.tokenize_seconds.inc(max(0.0, record.tokenize_seconds))
        self.template_seconds.inc(max(0.0, record.template_seconds))

    def _on_arm(self, record: RequestRecord) -> None:
        if record.ttft is not None:
            self.arm_ttft.labels(record.arm).observe(record.ttft)
        itl = self.arm_itl.labels(record.arm)
        for gap in record.gaps:
            itl.observe(gap)

    def _on_refused(self, refused: RequestRefused) -> None:
        self.refused.labels(str(refused.status), refused.kind).inc()

    def _on_media(self, prepared: MediaPrepared) -> None:
        for kind, count in prepared.items.items():
            known = prepared.known.get(kind, 0)
            self.media_items.labels(kind, "processed").inc(count - known)
            self.media_items.labels(kind, "cache").inc(known)
        self.media_tokens.inc(prepared.tokens)
        self.media_seconds.observe(prepared.seconds)

    def _on_lag(self, lag: LoopLag) -> None:
        self._count_steps()
        self.lag.labels(lag.process).observe(lag.seconds)
        self._count_cpu(lag.process, lag.cpu_seconds)
        if lag.process == "engine":
            self._idle.look(time.time(), computing=lag.step_age > 0)
            self.idle_alarm.set(self._idle.alarm)

    def _on_started(self, started: EngineStarted) -> None:
        self._count_steps()
        self.restarts.set(started.restarts)
        self.machine_bandwidth.set(started.info.read_bytes_per_second)
        self.machine_flops.set(started.info.flops_per_second)
        self.total_blocks.set(started.info.num_blocks)
        self.free_blocks.set(started.info.num_blocks)
        self._allocation_failures = 0
        self._cpu.pop("engine", None)

    def _on_died(self, died: EngineDied) -> None:
        self._count_steps()
        self.deaths.inc()
        self.running.set(0)
        self.waiting.set(0)
        self._idle.forget()

    def _on_change(self, change: FeatureChange) -> None:
        self.changes.inc()

    def _count_cpu(self, process: str, total: float) -> None:
        before = self._cpu.get(process, 0.0)
        if total > before:
            self.cpu.labels(process).inc(total - before)
            self._cpu[process] = total


class IdleAlarm:
    """Watches for "queue busy, device idle": gaps between steps although requests waited or ran when the last step ended."""

    def __init__(self, fraction: float, window: float) -> None:
        self.fraction = fraction
        self.window = window
        self.alarm = False
        self._gaps: deque[tuple[float, float]] = deque()
        self._idle = 0.0
        """Sum of the gaps."""
        self._ended: float | None = None
        self._busy = False

    def step(self, started: float, duration: float, *, busy: bool) -> float:
        """A step began at `started` (Unix seconds); `busy`: work was left when it ended. Returns the idle seconds before it."""
        idle = 0.0
        if self._ended is not None and self._busy:
            idle = max(0.0, started - self._ended)
            self._gaps.append((started, idle))
            self._idle += idle
        self._ended = started + duration
        self._busy = busy
        self._judge(self._ended, 0.0)
        return idle

    def look(self, now: float, *, computing: bool) -> None:
        """Between steps, about every second: a gap that has not ended counts too, and old gaps leave the window."""
        open_gap = 0.0 if computing or not self._busy or self._ended is None else max(0.0, now - self._ended)
        self._judge(now, open_gap)

    def _judge(self, now: float, open_gap: float) -> None:
        while self._gaps and self._gaps[0][0] < now - self.window:
            self._idle -= self._gaps.popleft()[1]
        if not self._gaps:
            self._idle = 0.0  # rounding errors end here
        alarm = self._idle + open_gap > self.fraction * self.window
        if alarm and not self.alarm:
            log.warning("queue_busy_device_idle", window_seconds=self.window, fraction=self.fraction)
        self.alarm = alarm

    def forget(self) -> None:
        """The engine died: the gap until the next one's first step is not idleness."""
        self._ended = None
        self._busy = False
