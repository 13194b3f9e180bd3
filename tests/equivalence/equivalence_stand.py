"""Scheduler and model runner without processes or a loop: a request list in, every request's ids and logprobs out, bit by bit.

One loaded model serves all cases; each case gets a fresh pool, scheduler and K/V cache.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import torch

from tokenbus.core.bus import Bus
from tokenbus.core.config import CacheConfig, Config, ModelConfig, SchedulerConfig
from tokenbus.core.contexts import AdmissionContext, EngineContext
from tokenbus.core.host import PluginHost
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.plugin import Plugin
from tokenbus.core.request import AdmittedRequest
from tokenbus.core.scheduling.scheduler import Scheduler
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.kernels.cpu import lib

BLOCK = 16


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


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reason: str = ""
    cached: int = 0
    preemptions: int = 0


@dataclass
class Outcome:
    answers: list[Answer]
    steps: int
    chunks: int
    """Prompt chunks: requests planned with more than one token, or part of their prompt."""
    largest_batch: int
    preempted: int
    counters: dict[str, float] = field(default_factory=dict)
    """Of all step reports, summed."""


class Stand:
    """One model on one kernel set; `run` plays a list of asks under given switches and sizes."""

    def __init__(
        self,
        model: str,
        kernels: Literal["cpu", "torch"],
        enable: tuple[str, ...] = (),
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> None:
        config = Config(model=ModelConfig(model=model, dtype=dtype, max_model_len=512, kernels=kernels))
        self.enable = (f"attention.{kernels}", *enable)
        self.names = _host("engine", {}).start_switches(enable=self.enable).names()
        self.runner = ModelRunner(config, self.names, _host("worker", {}))
        self.info = self.runner.load()
        assert self.info.lossless, self.info.lossless_reason
        self.front = _host("front", {})
        self.front.load(self.names)
        self._serial = 0

    def run(
        self,
        asks: list[Ask],
        *,
        off: tuple[str, ...] = (),
        chunk: int | None = None,
        blocks: int = 400,
        token_budget: int = 2048,
        max_running: int = 64,
        threads: int = 2,
        on: tuple[str, ...] = (),
        plugins: tuple[type[Plugin], ...] = (),
        settings: dict[str, Any] | None = None,
    ) -> Outcome:
        """on: engine plugins beside the default ones; `plugins` are found besides those that are installed."""
        torch.set_num_threads(threads)
        if lib.load():
            lib.set_threads(threads)
        settings = dict(settings or {})
        if chunk is not None:
            settings["chunked_prefill"] = {"mode": "fixed", "chunk_size": chunk}
        config = Config(
            scheduler=SchedulerConfig(token_budget=token_budget, max_running=max_running),
            cache=CacheConfig(block_size=BLOCK, num_blocks=blocks),
        )
        host = _host("engine", settings)
        for plugin in plugins:
            host.add(plugin)
        switches = host.start_switches(enable=(*self.enable, *on), disable=off)
        host.load(switches.on)
        pool = BlockPool(blocks, BLOCK)
        for impl in host.table(switches.on).engine_started:
            impl(engine=EngineContext(bus=Bus(), config=config, pool=pool))
        failures: list[Any] = []
        scheduler = Scheduler(
            config,
            max_model_len=512,
            eos_token_ids=frozenset(self.info.eos_token_ids),
            pool=pool,
            host=host,
            switches=switches,
            on_plugin_failure=lambda name, error: failures.append((name, error)),
        )
        self.runner.allocate(blocks)
        worker_names = tuple(name for name in switches.names() if name not in {p.info.name for p in plugins})
        outcome = self._play(scheduler, asks, switches.names(), worker_names)
        scheduler.check_integrity()
        assert not failures
        assert pool.num_available == blocks, "blocks were lost"
        return outcome

    def _play(self, scheduler: Scheduler, asks: list[Ask], features: tuple[str, ...], known: tuple[str, ...]) -> Outcome:
        """known: those of `features` that the worker has, too."""
        ids = {}
        waiting = list(enumerate(asks))
        answers = [Answer() for _ in asks]
        outcome = Outcome(answers, 0, 0, 0, 0)
        while waiting or scheduler.has_work():
            for index, ask in [w for w in waiting if w[1].at_step <= outcome.steps]:
                waiting.remove((index, ask))
                admitted = self._admit(ask, features)
                ids[admitted.request_id] = index
                scheduler.add(admitted, time.time())
            planned = scheduler.schedule(time.time())
            if planned is None:
                assert not scheduler.has_work() or scheduler.flush(time.time()), "work, but an empty plan"
                outcome.steps += 1
                continue
            plan, order = planned
            outcome.steps += 1
            assert outcome.steps < 5000
            outcome.preempted += len(plan.preempted)
            outcome.largest_batch = max(outcome.largest_batch, len(plan.num_tokens))
            outcome.chunks += sum(
                n > 1 or scheduler.requests[r].computed + n < len(scheduler.requests[r].tokens)
                for r, n in plan.num_tokens.items()
            )
            new = [msgspec.structs.replace(r, features=tuple(f for f in r.features if f in known)) for r in order.new]
            order = msgspec.structs.replace(order, new=new)
            output = scheduler.update(plan, self.runner.run(order), time.time(), 0.01)
            for name, count in (output.report.counters if output.report else {}).items():
                outcome.counters[name] = outcome.counters.get(name, 0) + count
            for request_id, tokens in output.tokens.items():
                answers[ids[request_id]].tokens += tokens
            for request_id, entries in output.logprobs.items():
                answers[ids[request_id]].logprobs += entries
            for request_id, entries in output.prompt_logprobs.items():
                answers[ids[request_id]].prompt_logprobs += entries
            for request_id, finish in output.finished.items():
                answer = answers[ids[request_id]]
                assert not answer.reason, "ended twice"
                assert finish.error is None, finish.error
                answer.reason, answer.cached, answer.preemptions = finish.reason, finish.cached_tokens, finish.preemptions
        assert all(answer.reason for answer in answers)
        return outcome

    def _admit(self, ask: Ask, features: tuple[str, ...]) -> AdmittedRequest:
        self._serial += 1
        fields = dict(ask.fields)
        context = AdmissionContext(
            prompt_len=len(ask.prompt),
            max_tokens=ask.max_tokens,
            vocab_size=self.info.vocab_size,
            max_model_len=512,
            eos_token_ids=self.info.eos_token_ids,
            temperature=ask.temperature,
            limits=Config().limits,
            tokenize=lambda text: [1 + len(text)],
        )
        for impl in self.front.table(frozenset(features), fields).check_fields:
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


def _host(role: Any, settings: dict[str, Any]) -> PluginHost:
    host = PluginHost(role, settings)
    host.discover()
    return host
