"""What if: the recorded arrivals through the real scheduler, KV pool and deciding plugins, with fitted step times and no model.

A virtual clock stands for the time: a step takes what `StepTimes` says, requests arrive when they did (also while a step "computes"), and
whoever was cancelled from outside is cancelled at the same output token; who gave up without having got one, at the same time. Live
switches and settings of the recording are changed again when they were.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import live_settings
from ..bus import Bus
from ..contexts import EngineContext
from ..errors import PluginError
from ..host import PluginHost, Switches
from ..kv.pool import BlockPool
from ..messages import Finish, StepOutput
from ..plan import StepInput, StepPlan, StepResult
from ..plugin import Plugin
from ..scheduling.scheduler import Scheduler
from .file import RecordingError
from .history import History, shown
from .media import Encoder
from .step_time import Run, StepTimes
from .stories import STOP, UNIQUE, Story, make_logits_plugin, make_plugin
from .what_if import Questions, WhatIf

BURST = 0.0005
"""Seconds between requests that are taken in together."""


@dataclass
class Served:
    """What became of one request. Times in seconds since the recording began."""

    serial: int
    arrival: float
    emitted: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of each step that gave it output."""
    ended: float | None = None
    reason: str = ""
    prompt: int = 0
    cached: int = 0
    preemptions: int = 0
    partial: bool = False
    """It was under way when the recording began: its times say nothing."""


@dataclass
class Course:
    """A run, recorded or simulated."""

    served: list[Served]
    steps: int = 0
    guessed: int = 0
    """Steps with more rows than any recorded one."""
    step_ids: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens of each step's requests, in order: what plans are compared by."""


def recorded(history: History) -> Course:
    """What really happened."""
    served = []
    for serial, life in history.lives.items():
        end = life.end
        served.append(
            Served(
                serial=serial,
                arrival=life.arrival.arrival,
                emitted=life.emitted,
                ended=None if end is None else end.at,
                reason="" if end is None else end.reason,
                prompt=life.arrival.prompt,
                cached=life.cached if end is None else end.cached,
                preemptions=0 if end is None else end.preemptions,
                partial=life.partial or life.arrival.known > 0,
            )
        )
    ids = [tuple(run.n for run in one.runs) for one in history.steps]
    return Course(served, steps=len(history.steps), step_ids=ids)


class Simulation:
    """One run. catalogue: plugins by name, as a host has found them."""

    def __init__(self, history: History, ask: WhatIf, times: StepTimes, catalogue: Mapping[str, type[Plugin]]) -> None:
        self._history = history
        self._ask = ask
        self._times = times
        header, config = history.header, ask.config
        unique = itertools.count(UNIQUE)
        self._stories = {
            str(serial): Story(life, header.block_size, unique) for serial, life in history.lives.items() if life.arrival.prompt
        }
        self._host = PluginHost("engine", config.plugins)
        self._host.catalogue.update(catalogue)
        for plugin in (make_plugin(self._stories), make_logits_plugin(self._stories)):
            self._host.add(plugin)
        self._questions = Questions(header, self._host)
        on = self._questions.switches(header.features, ask)
        self._host.load(on.on)
        self._pool = BlockPool(config.cache.num_blocks or header.num_blocks, config.cache.block_size)
        self._context = EngineContext(bus=Bus(), config=config, pool=self._pool, switches=lambda: self._scheduler.switches)
        self._started(on.on)
        self._changes = deque(history.changes)
        self._scheduler = Scheduler(
            config,
            max_model_len=header.max_model_len,
            eos_token_ids=frozenset({STOP}),
            pool=self._pool,
            host=self._host,
            switches=on,
            on_plugin_failure=lambda _, error: _fail(error),
        )
        self._seen: dict[str, Served] = {}
        self._encoder = Encoder()
        arrivals = sorted(self._stories.items(), key=lambda item: (item[1].life.arrival.at, item[1].life.arrival.serial))
        self._arrivals = deque((story.life.arrival.at, name) for name, story in arrivals)
        given_up = ((story.given_up, name) for name, story in self._stories.items())
        self._given_up = deque(sorted((at, name) for at, name in given_up if at is not None))
        self._switchings = deque((one.step.at, one.step.features) for one in history.steps if one.step.features is not None)
        self.course = Course([])

    def _started(self, names: Iterable[str]) -> None:
        for impl in self._host.table(frozenset(names)).engine_started:
            impl(engine=self._context)

    def run(self) -> Course:
        """Raises RecordingError when the scheduler can't go on with it, PluginError."""
        scheduler, now = self._scheduler, 0.0
        while True:
            self._switch(now)
            self._happen(now, now)
            planned = scheduler.schedule(self._wall(now))
            if planned is None:
                self._take(scheduler.flush(self._wall(now)), now)
                if scheduler.has_work():
                    continue
                if not self._arrivals:
                    break
                now = self._burst(max(now, self._arrivals[0][0]))
                continue
            plan, order = planned
            runs, result = self._compute(plan, order)
            seconds = self._times.seconds(runs, now)
            self.course.steps += 1
            self.course.guessed += sum(run.n for run in runs) > self._times.most_rows
            self.course.step_ids.append(tuple(plan.num_tokens.values()))
            done = now + seconds
            self._happen(now, done)
            self._take(scheduler.update(plan, result, self._wall(done), seconds), done)
            self._end_from_outside(plan, done)
            now = done + self._times.overhead(len(runs))
        scheduler.check_integrity()
        self.course.served = list(self._seen.values())
        return self.course

    def _wall(self, at: float) -> float:
        return self._history.header.created + at

    # ---- from outside -----------------------------------------------------------------------------------------------------------

    def _happen(self, since: float, until: float) -> None:
        """Requests that come, and those that are given up, while a step computes or before one."""
        while self._arrivals and self._arrivals[0][0] <= until:
            at, name = self._arrivals.popleft()
            self._add(name, max(at, since))
        while self._given_up and self._given_up[0][0] <= until:
            at, name = self._given_up.popleft()
            request = self._scheduler.requests.get(name)
            if request is not None and request.num_output <= self._stories[name].life.arrival.known:
                self._scheduler.cancel(name, "cancelled", self._wall(at))

    def _burst(self, now: float) -> float:
        """The engine was idle: who comes right behind the first, as the choices of one API request do, is taken in with it."""
        while self._arrivals and self._arrivals[0][0] - now < BURST:
            at, name = self._arrivals.popleft()
            self._add(name, at)
            now = max(now, at)
        return now

    def _add(self, name: str, at: float) -> None:
        story, scheduler = self._stories[name], self._scheduler
        arrival = story.life.arrival
        self._seen[name] = Served(
            serial=arrival.serial,
            arrival=arrival.arrival,
            prompt=arrival.prompt,
            partial=story.life.partial or arrival.known > 0,
        )
        features = self._questions.features(arrival.features, arrival.pinned, scheduler.switches, self._ask)
        scheduler.add(story.admitted(features, self._history.header.created), self._wall(at))

    def _end_from_outside(self, plan: StepPlan, now: float) -> None:
        """Those whose story is over, and that do not end by themselves."""
        for name in plan.num_tokens:
            request = self._scheduler.requests.get(name)
            over = self._stories[name].over
            if request is not None and over is not None and request.num_output >= over and request.num_output:
                self._scheduler.cancel(name, "stop", self._wall(now))

    def _switch(self, now: float) -> None:
        while self._switchings and self._switchings[0][0] <= now:
            _, features = self._switchings.popleft()
            target = self._questions.switches(features or (), self._ask)
            self._started(self._host.load(target.on))
            self._scheduler.apply_switches(Switches(target.on), self._wall(now))
        while self._changes and self._changes[0].at <= now:
            self._configure(self._changes.popleft().values)

    def _configure(self, values: Mapping[str, Any]) -> None:
        """A live change of settings, but for those that were asked for otherwise."""
        kept = {name: value for name, value in values.items() if name not in self._ask.asked and self._plays(name)}
        self._context.config = config = live_settings.with_values(self._context.config, kept)
        live_settings.apply_to_plugins(config, self._host, kept)
        self._scheduler.configure(config.scheduler)

    def _plays(self, name: str) -> bool:
        """Whether a setting has a part in the simulation."""
        section, _, rest = name.partition(".")
        return section == "scheduler" or rest.rpartition(".")[0] in self._questions.simulated

    # ---- the worker's part ------------------------------------------------------------------------------------------------------

    def _compute(self, plan: StepPlan, order: StepInput) -> tuple[list[Run], StepResult]:
        runs, result = [], StepResult(step_id=plan.step_id, sampled={})
        for name, n in plan.num_tokens.items():
            request, drafts = self._scheduler.requests[name], order.drafts.get(name, [])
            known = len(request.tokens)
            samples = request.computed + n - len(drafts) == known
            decodes = request.computed >= request.num_prompt and n - len(drafts) == 1 and request.computed == known - 1
            media = self._encoder.tokens(request.admitted.media, request.computed, n)
            runs.append(Run(request.computed, n, len(drafts), samples, prompt=not decodes, media=media))
            if samples:
                true = self._stories[name].after(request.num_output, len(drafts) + 1)
                right = next((i for i, draft in enumerate(drafts) if draft != true[i]), len(drafts))
                result.sampled[name] = true[: right + 1]
        return runs, result

    def _take(self, output: StepOutput | None, now: float) -> None:
        if output is None:
            return
        for name, tokens in output.tokens.items():
            self._seen[name].emitted.append((now, len(tokens)))
        for name, finish in output.finished.items():
            self._ended(self._seen[name], self._stories[name], finish, now)

    def _ended(self, served: Served, story: Story, finish: Finish, now: float) -> None:
        if finish.error is not None and finish.error.plugin is not None:
            raise RecordingError(f"the simulation failed: {finish.error.message}")
        served.ended, served.reason = now, finish.reason
        served.cached, served.preemptions = finish.cached_tokens, finish.preemptions
        if story.over is not None:
            served.emitted = shown(served.emitted, story.over - story.life.arrival.known)


def _fail(error: PluginError) -> None:
    raise RecordingError(f"the simulation failed: {error.message}") from error
