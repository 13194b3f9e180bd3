"""An engine's loop on a virtual clock, with the real scheduler, plugins and recorder; what computes is a parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenbus.core import live_settings
from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.contexts import EngineContext
from tokenbus.core.errors import WorkerError
from tokenbus.core.host import make_host
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.messages import PROTOCOL_VERSION, EngineInfo, SetSettings, StepOutput
from tokenbus.core.plan import StepInput, StepPlan, StepResult
from tokenbus.core.recording.history import History, read
from tokenbus.core.request import AdmittedRequest
from tokenbus.core.scheduling.scheduler import Scheduler
from tokenbus.plugins.recorder import writer

EOS = 1
ON = ("chunked_prefill", "prefix_cache", "scheduling.fcfs", "recorder")


@dataclass
class Ask:
    at: float
    prompt: list[int]
    max_tokens: int = 4
    values: dict[str, Any] = field(default_factory=dict)
    cancel_at: float | None = None


def step_seconds(parts: Sequence[tuple[int, int]]) -> float:
    """parts: (tokens that were computed before, tokens run) of each request. What a step of the pretended machine takes."""
    return 0.01 + sum(0.0011 * n + 0.000002 * computed for computed, n in parts)


def answer(request: Any, count: int) -> list[int]:
    """The next tokens of a request: they repeat, so drafts can be right."""
    return [100 + (request.num_prompt + request.num_output + i) % 7 for i in range(count)]


class Stage:
    def __init__(
        self,
        folder: Path,
        monkeypatch: Any,
        *,
        level: str = "shape",
        on: tuple[str, ...] = ON,
        settings: dict[str, Any] | None = None,
        recorder: dict[str, Any] | None = None,
        scheduler: dict[str, Any] | None = None,
        num_blocks: int = 400,
        block_size: int = 4,
        model: dict[str, Any] | None = None,
        execute: Callable[[StepInput], StepResult] | None = None,
        info: dict[str, Any] | None = None,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.flights: deque[tuple[StepPlan, StepInput]] = deque()
        self.now = 0.0
        self.folder = folder
        monkeypatch.setattr(writer, "clock", lambda: self.now)
        plugins = {"chunked_prefill": {"mode": "fixed", "chunk_size": 16}, **(settings or {})}
        plugins["recorder"] = {"path": str(folder), "level": level, **(recorder or {})}
        self.config: Config = from_mapping(
            {"model": model or {"model": str(folder / "no-model")}, "scheduler": scheduler or {}, "plugins": plugins}, "test"
        )
        self.host = make_host("engine", self.config)
        default = [name for name, cls in self.host.catalogue.items() if cls.info.default and name not in on]
        self.switches = self.host.start_switches(enable=on, disable=default)
        self.host.load(self.switches.on)
        self.bus = Bus()
        self.pool = BlockPool(num_blocks, block_size)
        described = {
            "version": PROTOCOL_VERSION, "model": "fake", "architecture": "Fake", "dtype": "float32", "vocab_size": 1000,
            "max_model_len": num_blocks * block_size, "block_size": block_size, "num_blocks": num_blocks, "weights_bytes": 0,
            "kv_bytes_per_token": 1024, "eos_token_ids": (EOS,), "lossless": True,
        } | (info or {})  # fmt: skip
        self.context = EngineContext(
            bus=self.bus,
            config=self.config,
            pool=self.pool,
            info=EngineInfo(**described),
            switches=lambda: self.scheduler.switches,
        )
        self.start(self.switches.on)
        self.failures: list[tuple[str, Exception]] = []
        self.scheduler = Scheduler(
            self.config,
            max_model_len=described["max_model_len"],
            eos_token_ids=frozenset(described["eos_token_ids"]),
            pool=self.pool,
            host=self.host,
            switches=self.switches,
            on_plugin_failure=lambda name, error: self.failures.append((name, error)),
        )
        self.execute = execute or self._pretend
        self.outputs: dict[str, list[int]] = {}
        self.steps = 0
        self.plans: list[StepPlan] = []
        self.bus.listen(self.plans.append, StepPlan)

    def start(self, names: Any) -> None:
        for impl in self.host.table(frozenset(names)).engine_started:
            impl(engine=self.context)

    @property
    def writer(self) -> Any:
        return self.host.loaded["recorder"]._writer

    def switch(self, **changes: bool) -> None:
        target = self.host.change_switches(self.scheduler.switches, changes)
        self.start(self.host.load(target.on))
        self.scheduler.apply_switches(target, self.now)

    def configure(self, values: dict[str, Any]) -> None:
        """Change settings live, as the engine's loop does."""
        self.context.config = config = live_settings.with_values(self.context.config, values)
        live_settings.apply_to_plugins(config, self.host, values)
        self.scheduler.configure(config.scheduler)
        self.bus.publish(SetSettings(1, values))

    def play(
        self, asks: Sequence[Ask], between: Callable[[int], None] = lambda _: None, seconds: Callable[..., float] = step_seconds
    ) -> None:
        """All to their ends. between: called before each step."""
        begin, scheduler = self.now, self.scheduler
        waiting = sorted(((ask.at, f"r{i}", ask) for i, ask in enumerate(asks)), key=lambda one: one[0])
        cancels = sorted((ask.cancel_at, name) for _, name, ask in waiting if ask.cancel_at is not None)
        while waiting or scheduler.has_work():
            between(self.steps)
            self._come(waiting, begin, self.now)
            if not self._plan():
                self._publish(scheduler.flush(self.now))
                if waiting:
                    self.now = max(self.now, begin + waiting[0][0])
                continue
            plan, order = self.flights.popleft()
            self.steps += 1
            known = [(scheduler.requests[name], n) for name, n in plan.num_tokens.items() if name in scheduler.requests]
            took = seconds([(request.computed, n) for request, n in known])
            try:
                result = self.execute(order)
            except WorkerError as error:
                self._publish(scheduler.fail_step(plan, error.to_wire(), self.now))
                continue
            done = self.now + took
            self._come(waiting, begin, done)
            while cancels and cancels[0][0] <= done - begin:
                scheduler.cancel(cancels.pop(0)[1], "cancelled", done)
            self.now = done
            output = scheduler.update(plan, result, self.now, took)
            self.bus.publish(result)
            self._publish(output)
        scheduler.check_integrity()

    def _plan(self) -> bool:
        """Plan as far as can be; whether there is a step to run."""
        if not self.flights:
            self._begin(self.scheduler.schedule(self.now))
        if self.ahead and len(self.flights) == 1:
            self._begin(self.scheduler.schedule_ahead(self.now))
        return bool(self.flights)

    def _begin(self, planned: tuple[StepPlan, StepInput] | None) -> None:
        if planned is not None:
            self.flights.append(planned)
            for event in planned:
                self.bus.publish(event)

    def _come(self, waiting: list[tuple[float, str, Ask]], begin: float, until: float) -> None:
        now = self.now
        while waiting and begin + waiting[0][0] <= until:
            at, name, ask = waiting.pop(0)
            self.now = max(now, begin + at)
            arrival = self.writer._created + self.now if "recorder" in self.host.loaded else self.now
            values = {"features": self.scheduler.switches.names(), **ask.values}
            self.scheduler.add(
                AdmittedRequest(request_id=name, prompt=ask.prompt, max_tokens=ask.max_tokens, arrival=arrival, **values),
                self.now,
            )
        self.now = now

    def _publish(self, output: StepOutput | None) -> None:
        if output is None:
            return
        for name, tokens in output.tokens.items():
            self.outputs.setdefault(name, []).extend(tokens)
        self.bus.publish(output)

    def _pretend(self, order: StepInput) -> StepResult:
        result = StepResult(step_id=order.step_id, sampled={})
        for name, n in order.num_tokens.items():
            request, drafts = self.scheduler.requests[name], order.drafts.get(name, [])
            if request.computed + n - len(drafts) == len(request.tokens):
                true = answer(request, len(drafts) + 1)
                right = next((i for i, draft in enumerate(drafts) if draft != true[i]), len(drafts))
                result.sampled[name] = true[: right + 1]
        return result

    def close(self) -> list[Path]:
        """End the recorder; the files, in order."""
        assert not self.failures
        recorder = self.host.loaded["recorder"]
        recorder.engine_stopped()
        recorder._writer._thread.join(30)
        assert self.bus.backlog == 0
        return self.files()

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.tbrec"))

    def history(self) -> History:
        return read(self.close())
