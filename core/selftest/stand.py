"""Scheduler and worker without an engine process or a loop: a list of requests in, every request's ids and logprobs out, bit by bit.

One loaded model serves all runs; each run has a fresh pool, scheduler and K/V cache. A run's engine may die: its scheduler, pool and
plugins, and all that the worker knows, are then made anew, and open requests go on from the journal, as in the front.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from ..bus import Bus
from ..config import Config
from ..contexts import EngineContext, Vocabulary
from ..errors import PluginError
from ..front.journal import Journal
from ..host import PluginHost, Switches, make_host
from ..kv.pool import BlockPool
from ..messages import StepOutput
from ..plan import StepInput, StepPlan, StepResult, TokenLogprobs
from ..plugin import Plugin, Role
from ..request import AdmittedRequest
from ..scheduling.scheduler import Scheduler
from ..worker.runner import ModelLoader, ModelRunner, load_model
from .front import Ask, Front, Reader
from .workers import InProcess, InThread, StandWorker

__all__ = ["Answer", "Ask", "Outcome", "Stand", "StandError"]

MOST_STEPS = 20000
TOKEN_BUDGET = 2048
"""Of a step, unless a run has its own."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str = ""
    text: str = ""
    """Empty when the model has no tokenizer."""
    stopped: str | None = None
    """The stop string that ended it."""
    cached: int = 0
    preemptions: int = 0
    """As the engine that ended it says."""
    prompt: list[int] = field(default_factory=list)
    """As it was admitted."""
    chunks: int = 0
    """Steps that ran tokens of its prompt."""
    mates: int = 0
    """Others in a step, at most."""
    accepted: int = 0
    rejected: int = 0
    """Drafts."""
    preempted: int = 0
    """Times that a plan took its blocks."""
    resumed: int = 0
    """Deaths after which it went on with tokens that it had."""
    tokenized: int = 0
    """Tokens of its prompt that were made from a text."""

    def same(self, other: Answer) -> bool:
        """In all that a client sees."""
        mine, its = ((a.tokens, a.logprobs, a.prompt_logprobs, a.reason, a.text, a.stopped, a.prompt) for a in (self, other))
        return mine == its


@dataclass
class Outcome:
    answers: list[Answer]
    steps: int = 0
    chunks: int = 0
    """Prompt chunks: requests planned with more than one token, or part of their prompt."""
    largest_batch: int = 0
    preempted: int = 0
    deaths: int = 0
    ahead: int = 0
    """Steps planned before the one before them had run."""
    discarded: int = 0
    """Tokens that those ran in vain."""
    media_tokens: int = 0
    """Placeholders of media that were run."""
    worker_pid: int = 0
    """Of the process that ran the steps."""
    counters: dict[str, float] = field(default_factory=dict)
    """Of all step reports, summed."""


class StandError(RuntimeError):
    """The engine broke a promise of its own: blocks lost, an end twice, no progress."""


class Stand:
    """`run` plays a list of requests under given switches and sizes. Close it."""

    def __init__(
        self,
        config: Config,
        enable: tuple[str, ...] = (),
        disable: tuple[str, ...] = (),
        *,
        plugins: tuple[type[Plugin], ...] = (),
        loader: ModelLoader = load_model,
        vocabulary: Callable[[], Vocabulary] | None = None,
        host_kind: Callable[..., PluginHost] = PluginHost,
    ) -> None:
        """enable, disable: for all runs, beside the plugins that are on by default. plugins: known to all three processes' hosts, beside
        those installed (not to a worker process). loader, vocabulary: as for ModelRunner. host_kind: makes each host. Raises what loading
        a model raises."""
        self.config = config
        self.enable, self.disable = enable, disable
        self._plugins, self._host_kind = plugins, host_kind
        self.names = self.host("engine", config).start_switches(enable=enable, disable=disable).names()

        def make_runner() -> ModelRunner:
            return ModelRunner(config, self.names, self.host("worker", config), loader=loader, vocabulary=vocabulary)

        self._thread = InThread(make_runner)
        self._process = InProcess(config, self.names)
        self.info = self._thread.info
        self.max_model_len = min(self.info.max_model_len, config.model.max_model_len or self.info.max_model_len)
        self.front = Front(config, self.names, self.info, self.max_model_len, self.host("front", config))

    def host(self, role: Role, config: Config, plugins: tuple[type[Plugin], ...] = ()) -> PluginHost:
        """A new one, which knows all plugins, and these."""
        return make_host(role, config, (*self._plugins, *plugins), self._host_kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.front.close()
        self._process.close()
        self._thread.close()

    @property
    def runner(self) -> ModelRunner:
        """The one of runs without a worker process."""
        return self._thread.runner

    def run(
        self,
        asks: list[Ask],
        *,
        on: tuple[str, ...] = (),
        off: tuple[str, ...] = (),
        chunk: int | None = None,
        blocks: int = 400,
        token_budget: int = TOKEN_BUDGET,
        max_running: int = 64,
        threads: int | None = None,
        plugins: tuple[type[Plugin], ...] = (),
        settings: dict[str, Any] | None = None,
        changes: Mapping[int, Mapping[str, bool]] | None = None,
        process: bool = False,
        ahead: bool = False,
        encoder_slice_ms: float = 0.0,
    ) -> Outcome:
        """on, off: engine plugins that are switched for this run; `plugins` are known to it besides those installed, in the engine only.
        chunk: prompt tokens a step, fixed. threads: None: as many as there are cores. changes: live switches by the number of steps
        before them. process: in the worker process. ahead: each step is planned before the one before it has run, where that can be done; a
        change waits until none is planned. encoder_slice_ms: `scheduler.encoder_slice_ms`; 0: items are encoded in one piece. Raises
        StandError, RuntimeError."""
        given = dict(self.config.plugins) | (settings or {})
        if chunk is not None:
            given["chunked_prefill"] = {"mode": "fixed", "chunk_size": chunk}
        cache = msgspec.structs.replace(self.config.cache, num_blocks=blocks)
        limits = msgspec.structs.replace(
            self.config.scheduler, token_budget=token_budget, max_running=max_running, encoder_slice_ms=encoder_slice_ms
        )
        config = msgspec.structs.replace(self.config, cache=cache, scheduler=limits, plugins=given)
        worker = self._process if process else self._thread
        worker.begin(blocks, threads)
        enabled = (*(name for name in self.enable if name not in off), *on)
        run = _Run(self, config, worker, enabled, (*self.disable, *off), plugins, ahead=ahead)
        try:
            return run.play(asks, changes or {})
        finally:
            if changes:
                worker.restore()

    def admit(self, ask: Ask, features: tuple[str, ...]) -> AdmittedRequest:
        return self.front.admit(ask, features)


class _Engine:
    """What dies with an engine process."""

    def __init__(self, host: PluginHost, switches: Switches, stand: Stand, config: Config) -> None:
        self._host = host
        self.pool = BlockPool(config.cache.num_blocks or 0, config.cache.block_size)
        self.failures: list[PluginError] = []
        self._context = EngineContext(bus=Bus(), config=config, pool=self.pool)
        self._start(switches)
        self.scheduler = Scheduler(
            config,
            max_model_len=stand.max_model_len,
            eos_token_ids=frozenset(stand.info.eos_token_ids),
            pool=self.pool,
            host=host,
            switches=switches,
            on_plugin_failure=lambda _, error: self.failures.append(error),
            encodes_in_pieces=stand.info.encodes_in_pieces,
        )

    def _start(self, switches: Switches) -> None:
        """Load what is on and not loaded yet, and tell it."""
        for name in self._host.load(switches.on):
            for impl in self._host.table(frozenset({name})).engine_started:
                impl(engine=self._context)

    def switch(self, wishes: Mapping[str, bool]) -> Switches:
        changed = self._host.change_switches(self.scheduler.switches, wishes)
        self._start(changed)
        self.scheduler.apply_switches(changed)
        return changed


class _Run:
    """One run: the front's side of it, and the engine it has at the moment."""

    def __init__(
        self,
        stand: Stand,
        config: Config,
        worker: StandWorker,
        enable: tuple[str, ...],
        disable: tuple[str, ...],
        plugins: tuple[type[Plugin], ...],
        *,
        ahead: bool,
    ) -> None:
        self._ahead = ahead
        self._planned: deque[tuple[StepPlan, StepInput]] = deque()
        """Steps that have not run yet, at most two."""
        self._stand, self._config, self._worker = stand, config, worker
        self._enable, self._disable, self._plugins = enable, disable, plugins
        self._strangers = frozenset(plugin.info.name for plugin in plugins)
        self._engine, self._switches = self._start()
        self._journal = Journal()
        self._asks: dict[str, Ask] = {}
        self._answers: dict[str, Answer] = {}
        self._readers: dict[str, Reader | None] = {}
        self._outcome = Outcome([])

    def _start(self) -> tuple[_Engine, Switches]:
        host = self._stand.host("engine", self._config, self._plugins)
        switches = host.start_switches(enable=self._enable, disable=self._disable)
        return _Engine(host, switches, self._stand, self._config), switches

    def play(self, asks: list[Ask], changes: Mapping[int, Mapping[str, bool]]) -> Outcome:
        outcome = self._outcome
        outcome.answers = [Answer() for _ in asks]
        outcome.worker_pid = self._worker.pid
        waiting = list(enumerate(asks))
        while waiting or len(self._journal):
            if outcome.steps in changes:
                while self._planned:
                    self._run_step()
                self._switches = self._engine.switch(changes[outcome.steps])
            ended = not len(self._journal) and all(ask.afterwards for _, ask in waiting)
            for index, ask in [one for one in waiting if ended or one[1].arrived(outcome.steps)]:
                waiting.remove((index, ask))
                self._take_in(ask, outcome.answers[index])
            outcome.steps += 1
            if outcome.steps > MOST_STEPS:
                raise StandError(f"no end after {MOST_STEPS} steps")
            self._step()
        engine = self._engine
        engine.scheduler.check_integrity()
        if engine.failures:
            raise engine.failures[0]
        if engine.pool.num_available != engine.pool.num_blocks:
            raise StandError(f"{engine.pool.num_blocks - engine.pool.num_available} blocks were lost")
        return outcome

    def _take_in(self, ask: Ask, answer: Answer) -> None:
        admitted = self._stand.admit(ask, self._switches.names())
        request_id = admitted.request_id
        answer.prompt, answer.tokenized = admitted.prompt, 0 if ask.text is None else len(admitted.prompt)
        self._asks[request_id], self._answers[request_id] = ask, answer
        self._readers[request_id] = self._stand.front.reader(admitted)
        self._journal.admit([admitted])
        self._hand_over(request_id)

    def _hand_over(self, request_id: str) -> None:
        entry = self._journal.get(request_id)
        assert entry is not None
        self._engine.scheduler.add(entry.as_sent(), time.time())
        entry.begun = True

    def _step(self) -> None:
        scheduler = self._engine.scheduler
        if not self._planned and (planned := scheduler.schedule(time.time())) is not None:
            self._take_up(*planned)
        if self._ahead and len(self._planned) == 1 and (planned := scheduler.schedule_ahead(time.time())) is not None:
            self._take_up(*planned)
        if self._planned:
            self._run_step()
        elif (output := scheduler.flush(time.time())) is not None:
            self._emit(output)
        elif scheduler.has_work():
            raise StandError("there is work, but an empty plan")

    def _take_up(self, plan: StepPlan, order: StepInput) -> None:
        self._planned.append((plan, order))
        self._count(plan)
        self._outcome.ahead += order.ahead

    def _run_step(self) -> None:
        plan, order = self._planned.popleft()
        result = self._worker.execute(_known(order, self._strangers))
        if self._fatal():
            self._die()
            return
        self._count_drafts(order, result)
        output = self._engine.scheduler.update(plan, result, time.time(), 0.01)
        self._outcome.discarded += output.report.ahead_discarded if output.report else 0
        self._emit(output)

    def _fatal(self) -> bool:
        return any(
            0 < self._asks[entry.admitted.request_id].fatal_at <= len(entry.tokens)
            and not self._answers[entry.admitted.request_id].resumed
            for entry in self._journal
        )

    def _die(self) -> None:
        """The step's result is lost, and what was planned behind it; what was emitted before is not."""
        self._outcome.deaths += 1
        self._planned.clear()
        self._engine, _ = self._start()
        self._worker.die(self._config.cache.num_blocks or 0)
        for entry in self._journal:
            request_id = entry.admitted.request_id
            if self._answers[request_id].stopped is not None:
                self._end(request_id, "stop", entry.cached_tokens or 0, entry.preemptions)
                continue
            self._answers[request_id].resumed += bool(entry.tokens)
            self._hand_over(request_id)

    def _emit(self, output: StepOutput) -> None:
        for name, count in (output.report.counters if output.report else {}).items():
            self._outcome.counters[name] = self._outcome.counters.get(name, 0) + count
        for request_id, entries in output.prompt_logprobs.items():
            self._answers[request_id].prompt_logprobs += entries
            self._journal.emit(request_id, (), len(entries))
        for request_id, tokens in output.tokens.items():
            answer, reader = self._answers[request_id], self._readers[request_id]
            if answer.stopped is not None:
                continue
            used = len(tokens) if reader is None else reader.feed(tokens)
            answer.tokens += tokens[:used]
            answer.logprobs += output.logprobs.get(request_id, ())[:used]
            self._journal.emit(request_id, tokens)
            if reader is not None and reader.stopped is not None:
                answer.stopped = reader.stopped
                self._engine.scheduler.cancel(request_id, "stop", time.time())
        for request_id, finish in output.finished.items():
            if finish.error is not None:
                raise StandError(f"request {request_id} ended with an error: {finish.error.message}")
            self._end(request_id, finish.reason, finish.cached_tokens, finish.preemptions)

    def _end(self, request_id: str, reason: str, cached: int, preemptions: int) -> None:
        if self._journal.end(request_id) is None:
            raise StandError(f"request {request_id} ended twice")
        answer, reader = self._answers[request_id], self._readers[request_id]
        answer.reason, answer.cached, answer.preemptions = reason, cached, preemptions
        if reader is not None:
            reader.end()
            answer.text, answer.stopped = reader.text, reader.stopped
            answer.reason = "stop" if reader.stopped is not None else reason

    def _count(self, plan: StepPlan) -> None:
        outcome, requests = self._outcome, self._engine.scheduler.requests
        outcome.preempted += len(plan.preempted)
        outcome.media_tokens += plan.num_media_tokens
        outcome.largest_batch = max(outcome.largest_batch, len(plan.num_tokens))
        for request_id in plan.preempted:
            self._answers[request_id].preempted += 1
        for request_id, count in plan.num_tokens.items():
            request, answer = requests[request_id], self._answers[request_id]
            computed = self._engine.scheduler.starts(request)
            outcome.chunks += count > 1 or computed + count < len(request.tokens)
            answer.chunks += computed < request.num_prompt and not answer.tokens
            answer.mates = max(answer.mates, len(plan.num_tokens) - 1)
            entry = self._journal.get(request_id)
            if entry is not None and entry.cached_tokens is None:
                entry.cached_tokens = request.cached_tokens or 0

    def _count_drafts(self, order: StepInput, result: StepResult) -> None:
        for request_id, drafts in order.drafts.items():
            accepted = max(0, len(result.sampled.get(request_id, ())) - 1)
            self._answers[request_id].accepted += accepted
            self._answers[request_id].rejected += len(drafts) - accepted


def _known(order: StepInput, strangers: frozenset[str]) -> StepInput:
    """The order without plugins that the worker does not know."""
    if not strangers:
        return order
    new = [
        msgspec.structs.replace(request, features=tuple(name for name in request.features if name not in strangers))
        for request in order.new
    ]
    told = None if order.features is None else tuple(name for name in order.features if name not in strangers)
    return msgspec.structs.replace(order, new=new, features=told)
