"""Scheduler and model runner without processes or a loop: a list of requests in, every request's ids and logprobs out, bit by bit.

One loaded model serves all runs; each run has a fresh pool, scheduler and K/V cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from ..bus import Bus
from ..config import Config
from ..contexts import AdmissionContext, EngineContext, Vocabulary
from ..errors import PluginError
from ..host import PluginHost, Switches, make_host
from ..kv.pool import BlockPool
from ..plan import StepInput, StepPlan, TokenLogprobs
from ..plugin import Plugin, Role
from ..request import AdmittedRequest
from ..scheduling.scheduler import Scheduler
from ..worker.runner import ModelLoader, ModelRunner, load_model
from ..worker.threads import available_cores

MOST_STEPS = 20000


@dataclass
class Ask:
    """A request, as a client would put it."""

    prompt: list[int]
    max_tokens: int = 8
    temperature: float = 0.0
    seed: int = 0
    choice: int = 0
    fields: dict[str, Any] = field(default_factory=dict)
    at_step: int = 0
    """It arrives before this step."""
    without: tuple[str, ...] = ()
    """Plugins that it has switched off for itself."""


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str = ""
    cached: int = 0
    preemptions: int = 0

    def same(self, other: Answer) -> bool:
        mine, its = ((a.tokens, a.logprobs, a.prompt_logprobs, a.reason) for a in (self, other))
        return mine == its


@dataclass
class Outcome:
    answers: list[Answer]
    steps: int = 0
    chunks: int = 0
    """Prompt chunks: requests planned with more than one token, or part of their prompt."""
    largest_batch: int = 0
    preempted: int = 0
    counters: dict[str, float] = field(default_factory=dict)
    """Of all step reports, summed."""


class StandError(RuntimeError):
    """The engine broke a promise of its own: blocks lost, an end twice, no progress."""


class Stand:
    """`run` plays a list of requests under given switches and sizes."""

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
        those installed. loader, vocabulary: as for ModelRunner. host_kind: makes each host. Raises what loading a model raises."""
        self.config = config
        self.enable, self.disable = enable, disable
        self._plugins, self._host_kind = plugins, host_kind
        self.names = self.host("engine", config).start_switches(enable=enable, disable=disable).names()
        self.runner = ModelRunner(config, self.names, self.host("worker", config), loader=loader, vocabulary=vocabulary)
        self.info = self.runner.load()
        self.max_model_len = min(self.info.max_model_len, config.model.max_model_len or self.info.max_model_len)
        self.front = self.host("front", config)
        self.front.load(frozenset(self.names))
        self._serial = 0

    def host(self, role: Role, config: Config, plugins: tuple[type[Plugin], ...] = ()) -> PluginHost:
        """A new one, which knows all plugins, and these."""
        return make_host(role, config, (*self._plugins, *plugins), self._host_kind)

    def run(
        self,
        asks: list[Ask],
        *,
        on: tuple[str, ...] = (),
        off: tuple[str, ...] = (),
        chunk: int | None = None,
        blocks: int = 400,
        token_budget: int = 2048,
        max_running: int = 64,
        threads: int | None = None,
        plugins: tuple[type[Plugin], ...] = (),
        settings: dict[str, Any] | None = None,
        changes: Mapping[int, Mapping[str, bool]] | None = None,
    ) -> Outcome:
        """on, off: engine plugins that are switched for this run; `plugins` are known to it besides those installed, in the engine only.
        chunk: prompt tokens a step, fixed. threads: None: as many as there are cores. changes: live switches by the number of steps
        before them. Raises StandError, RuntimeError."""
        _set_threads(threads or available_cores())
        given = dict(self.config.plugins) | (settings or {})
        if chunk is not None:
            given["chunked_prefill"] = {"mode": "fixed", "chunk_size": chunk}
        cache = msgspec.structs.replace(self.config.cache, num_blocks=blocks)
        limits = msgspec.structs.replace(self.config.scheduler, token_budget=token_budget, max_running=max_running)
        config = msgspec.structs.replace(self.config, cache=cache, scheduler=limits, plugins=given)
        host = self.host("engine", config, plugins)
        enabled = (*(name for name in self.enable if name not in off), *on)
        switches = host.start_switches(enable=enabled, disable=(*self.disable, *off))
        pool = BlockPool(blocks, config.cache.block_size)
        context = EngineContext(bus=Bus(), config=config, pool=pool)
        _start(host, switches, context)
        failures: list[tuple[str, PluginError]] = []
        scheduler = Scheduler(
            config,
            max_model_len=self.max_model_len,
            eos_token_ids=frozenset(self.info.eos_token_ids),
            pool=pool,
            host=host,
            switches=switches,
            on_plugin_failure=lambda name, error: failures.append((name, error)),
        )
        self.runner.allocate(blocks)
        strangers = frozenset(plugin.info.name for plugin in plugins)

        def switch(now: Switches, wishes: Mapping[str, bool]) -> Switches:
            changed = host.change_switches(now, wishes)
            _start(host, changed, context)
            scheduler.apply_switches(changed)
            return changed

        try:
            outcome = self._play(scheduler, asks, switches, strangers, switch, changes or {})
        finally:
            if changes:
                self.runner.plugins.switch(self.names)
        scheduler.check_integrity()
        if failures:
            raise failures[0][1]
        if pool.num_available != blocks:
            raise StandError(f"{blocks - pool.num_available} blocks were lost")
        return outcome

    def _play(
        self,
        scheduler: Scheduler,
        asks: list[Ask],
        switches: Switches,
        strangers: frozenset[str],
        switch: Callable[[Switches, Mapping[str, bool]], Switches],
        changes: Mapping[int, Mapping[str, bool]],
    ) -> Outcome:
        """strangers: plugins that the worker does not know."""
        ids: dict[str, int] = {}
        waiting = list(enumerate(asks))
        outcome = Outcome([Answer() for _ in asks])
        while waiting or scheduler.has_work():
            if outcome.steps in changes:
                switches = switch(switches, changes[outcome.steps])
            for index, ask in [one for one in waiting if one[1].at_step <= outcome.steps]:
                waiting.remove((index, ask))
                admitted = self._admit(ask, switches.names())
                ids[admitted.request_id] = index
                scheduler.add(admitted, time.time())
            planned = scheduler.schedule(time.time())
            outcome.steps += 1
            if outcome.steps > MOST_STEPS:
                raise StandError(f"no end after {MOST_STEPS} steps")
            if planned is None:
                output = scheduler.flush(time.time())
                if scheduler.has_work() and output is None:
                    raise StandError("there is work, but an empty plan")
            else:
                self._count(outcome, planned[0], scheduler)
                output = scheduler.update(planned[0], self.runner.run(_known(planned[1], strangers)), time.time(), 0.01)
            if output is None:
                continue
            for name, count in (output.report.counters if output.report else {}).items():
                outcome.counters[name] = outcome.counters.get(name, 0) + count
            for request_id, tokens in output.tokens.items():
                outcome.answers[ids[request_id]].tokens += tokens
            for request_id, entries in output.logprobs.items():
                outcome.answers[ids[request_id]].logprobs += entries
            for request_id, entries in output.prompt_logprobs.items():
                outcome.answers[ids[request_id]].prompt_logprobs += entries
            for request_id, finish in output.finished.items():
                answer = outcome.answers[ids[request_id]]
                if answer.reason:
                    raise StandError(f"request {ids[request_id]} ended twice")
                if finish.error is not None:
                    raise StandError(f"request {ids[request_id]} ended with an error: {finish.error.message}")
                answer.reason, answer.cached, answer.preemptions = finish.reason, finish.cached_tokens, finish.preemptions
        if not all(answer.reason for answer in outcome.answers):
            raise StandError("a request never ended")
        return outcome

    @staticmethod
    def _count(outcome: Outcome, plan: StepPlan, scheduler: Scheduler) -> None:
        outcome.preempted += len(plan.preempted)
        outcome.largest_batch = max(outcome.largest_batch, len(plan.num_tokens))
        requests = scheduler.requests
        outcome.chunks += sum(
            n > 1 or requests[name].computed + n < len(requests[name].tokens) for name, n in plan.num_tokens.items()
        )

    def _admit(self, ask: Ask, features: tuple[str, ...]) -> AdmittedRequest:
        self._serial += 1
        features = tuple(name for name in features if name not in ask.without)
        fields = dict(ask.fields)
        context = AdmissionContext(
            prompt_len=len(ask.prompt),
            max_tokens=ask.max_tokens,
            vocab_size=self.info.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.info.eos_token_ids,
            temperature=ask.temperature,
            limits=self.config.limits,
            tokenize=lambda text: [1 + len(text)],
        )
        for impl in self.front.table(frozenset(self.front.loaded.keys() & set(features)), fields).check_fields:
            mine = {name: value for name, value in fields.items() if name in impl.info.claims}
            instead = impl(fields=mine, request=context)
            if instead is not None:
                fields = {name: value for name, value in fields.items() if name not in mine} | instead
        return AdmittedRequest(
            request_id=f"r{self._serial}",
            prompt=ask.prompt,
            max_tokens=ask.max_tokens,
            temperature=ask.temperature,
            seed=ask.seed,
            choice=ask.choice,
            fields=fields,
            features=features,
            arrival=float(self._serial),
        )


def _start(host: PluginHost, switches: Switches, context: EngineContext) -> None:
    """Load what is on and not loaded yet, and tell it."""
    for name in host.load(switches.on):
        for impl in host.table(frozenset({name})).engine_started:
            impl(engine=context)


def _known(order: StepInput, strangers: frozenset[str]) -> StepInput:
    if not strangers:
        return order
    new = [
        msgspec.structs.replace(request, features=tuple(name for name in request.features if name not in strangers))
        for request in order.new
    ]
    told = None if order.features is None else tuple(name for name in order.features if name not in strangers)
    return msgspec.structs.replace(order, new=new, features=told)


def _set_threads(count: int) -> None:
    from ...kernels.cpu import lib

    torch.set_num_threads(count)
    if lib.load():
        lib.set_threads(count)
