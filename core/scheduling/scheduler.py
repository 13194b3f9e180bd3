"""The scheduler: which tokens run next, whose KV blocks they use, when a request ends. A plain object that EngineCore owns and calls.

    add / cancel / expire      intake: changes what is open; ends go out with the next output        (intake.py)
    schedule                   one transaction: decodes, prompt chunks, waiting requests, blocks     (step_builder.py)
    schedule_ahead             the same while a step computes, on what that one is known to do       (ahead.py)
    update / fail_step         the step's result: append, stop checks, filled blocks, output         (results.py)
    relieve                    the step was too large for the device's memory: smaller ones          (relief.py)
    flush                      ends that happened while no step ran
    apply_switches             between two steps

At most two plans are in flight: one computes, one (`schedule_ahead`) waits behind it. `update` or `fail_step` takes in the older one's
result. No step does work that grows with requests that have ended. Nothing here awaits, locks or blocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from ..config import Config, SchedulerConfig
from ..errors import ErrorInfo, PluginError
from ..host import PluginHost, Switches
from ..kv.pool import BlockPool
from ..messages import StepOutput, StepReport
from ..plan import StepInput, StepPlan, StepResult, WorkerRequest
from ..request import AdmittedRequest, Request
from .ahead import Flight, MustWaitError, expected, why_wait
from .batch import Batch
from .encoding import Encoding
from .intake import Intake
from .live_switches import LiveSwitches
from .results import Results
from .step_builder import StepBuilder

PluginFailure = Callable[[str, PluginError], None]
"""`(plugin name, error)`: an engine-wide hook raised. Called from inside the scheduler, so only take a note.

`error.hook == "scheduling_policy"`: core's policy has taken over already and no request is lost; any other: the rule for plugins that raise
outside any one request (core/hooks.py) is the engine's to apply."""


class Scheduler:
    def __init__(
        self,
        config: Config,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        pool: BlockPool,
        host: PluginHost,
        switches: Switches,
        on_plugin_failure: PluginFailure,
        start_plugin: Callable[[str], object] | None = None,
        encodes_in_pieces: bool = False,
    ) -> None:
        """max_model_len: tokens of prompt plus output, the pool's size may lower it. host: role "engine", with the plugins of
        `switches` loaded and their `engine_started` called (the caller does both, here and before `apply_switches`).
        start_plugin: does both for one that is off, when a request comes that has it all the same (default: only loads it).
        encodes_in_pieces: `WorkerInfo.encodes_in_pieces`."""
        max_model_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self.pool = pool
        self.batch = Batch(pool, on_plugin_failure)
        self.live = LiveSwitches(host, switches, self.batch, start_plugin or (lambda name: host.load((name,))))
        self._builder = StepBuilder(self.batch, config.scheduler, Encoding(in_pieces=encodes_in_pieces))
        self._intake = Intake(
            self.batch,
            self.live,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            token_budget=lambda: self._builder.config.token_budget,
        )
        self._results = Results(self.batch)
        self._flights: deque[Flight] = deque()
        self._waits = ""
        self._lost_drops: list[str] = []

    # ---- intake -----------------------------------------------------------------------------------------------------------------

    def add(self, admitted: AdmittedRequest, now: float) -> None:
        """Take in a request. Never raises for the request's own faults: it then ends with an error in the next output."""
        self._intake.add(admitted, now)

    def cancel(self, request_id: str, reason: str, now: float) -> None:
        """End an open request: reason "cancelled", "stop" (the front found a stop string) or "deadline". Unknown ids are ignored.
        Safe while a step computes: its result for the request is then discarded."""
        self._intake.cancel(request_id, reason, now)

    def fail(self, request_id: str, error: ErrorInfo, now: float) -> None:
        """End an open request with an error that isn't its own fault. Unknown ids are ignored."""
        if (request := self.batch.requests.get(request_id)) is not None:
            self.batch.end(request, "error", now, error=error)

    def expire(self, now: float) -> None:
        """End every request whose deadline has passed, with a DeadlineError."""
        self._intake.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next (Unix seconds); None: never, as things stand."""
        return self._intake.next_deadline()

    def has_work(self) -> bool:
        return bool(self.batch.running or self.batch.line)

    @property
    def requests(self) -> Mapping[str, Request]:
        """All open requests by id."""
        return self.batch.requests

    @property
    def num_running(self) -> int:
        return len(self.batch.running)

    @property
    def num_waiting(self) -> int:
        return len(self.batch.line)

    @property
    def in_flight(self) -> StepInput | None:
        """The step that was planned last and has no result yet; None when there is none."""
        return self._flights[-1].order if self._flights else None

    def runs(self, request_ids: Iterable[str]) -> dict[str, tuple[int, int]]:
        """`{request_id: (first, last)}` of those that are open: the steps in flight run tokens[first:last] of it, or encode what stands
        there."""
        requests, flights = self.batch.requests, self._flights
        found: dict[str, tuple[int, int]] = {}
        for name in request_ids:
            if (request := requests.get(name)) is not None:
                count = sum(one.plan.num_tokens.get(name, 0) for one in flights)
                found[name] = request.computed, request.computed + max(1, count)
        return found

    def starts(self, request: Request) -> int:
        """Where the step planned last begins in a request: its computed tokens, and those that the step before it runs."""
        return request.computed + (self._flights[0].plan.num_tokens.get(request.request_id, 0) if len(self._flights) > 1 else 0)

    @property
    def switches(self) -> Switches:
        return self.live.switches

    # ---- the step ---------------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> tuple[StepPlan, StepInput] | None:
        """The next step, or None when there is nothing to run. Its blocks are taken when this returns."""
        self._nothing_in_flight()
        planned = self._builder.build(now)
        if planned is None:
            self._waits = ""
            return None
        return self._take_off(*planned, ahead=False)

    def schedule_ahead(self, now: float) -> tuple[StepPlan, StepInput] | None:
        """The step after the one in flight, on what that one is known to do; None when nothing can be planned before its result is there
        (`StepReport.waited` of the next step then says why) or is left to do."""
        if len(self._flights) != 1:
            raise RuntimeError(f"{len(self._flights)} steps are in flight")
        self._waits = self._builder.next_waits or why_wait(self._flights[0], self.batch)
        if self._waits:
            return None
        try:
            with expected(self.batch, self._flights[0].order) as ending:
                if ending == len(self.batch.running) and not self.batch.line:
                    return None
                planned = self._builder.build(now, ending=ending)
        except MustWaitError as error:
            self._waits = str(error)
            return None
        return None if planned is None else self._take_off(*planned, ahead=True)

    def wait(self, why: str) -> None:
        """The next step is not planned ahead, for a reason of the caller's."""
        self._waits = why

    def _nothing_in_flight(self) -> None:
        if self._flights:
            raise RuntimeError(f"step {self._flights[0].plan.step_id} has neither been updated nor failed")

    def _take_off(
        self, plan: StepPlan, new: list[WorkerRequest], new_blocks: dict[str, list[int]], *, ahead: bool
    ) -> tuple[StepPlan, StepInput]:
        dropped = self.batch.take_dropped()
        if self._lost_drops:
            dropped = [*dict.fromkeys(self._lost_drops + dropped)]
            self._lost_drops = []
        order = StepInput(
            step_id=plan.step_id,
            num_tokens=plan.num_tokens,
            new=new,
            new_blocks=new_blocks,
            drafts=self._builder.drafts,
            dropped=dropped,
            features=self.live.take_announcement(),
            settings=self.live.take_settings(),
            encode=self._builder.encode,
            ahead=ahead,
        )
        self._flights.append(Flight(plan, order, self._builder.proposers, waited=self._waits))
        self._waits = ""
        return plan, order

    def _land(self, plan: StepPlan) -> Flight:
        if not self._flights or self._flights[0].plan.step_id != plan.step_id:
            raise RuntimeError(f"step {plan.step_id} is not the one that computes")
        return self._flights.popleft()

    def update(self, plan: StepPlan, result: StepResult, now: float, seconds: float, gap: float = 0.0) -> StepOutput:
        """Take in the result of the older step in flight. seconds, gap: `StepReport.duration` and `gap`. The output carries the ends from
        intake too."""
        flight = self._land(plan)
        output = StepOutput(step_id=plan.step_id, tokens=result.sampled, logprobs=result.logprobs, kernels=result.kernels)
        for request_id, error in result.errors.items():
            self.fail(request_id, error, now)
        if flight.void:
            return self._close(output, self._report(None, None, now, 0.0), now)
        if plan.num_tokens:
            self._builder.relief.went_well(self._builder.config.token_budget)
        self._builder.encoding.update(result.encoded, result.forgotten)
        self._results.take(flight, result, output, now)
        hooks = self.live.engine_hooks
        for impl in hooks.step_finished:
            self.batch.call_engine_wide(impl, plan=plan, result=result, seconds=seconds)
        report = self._report(plan, result, now, seconds, gap=gap, flight=flight)
        return self._close(output, report, now)

    def _close(self, output: StepOutput, report: StepReport, now: float) -> StepOutput:
        output.report = report
        output.finished = self.batch.take_ended()
        if output.finished and self._flights:
            requests, behind = self.batch.requests, self._flights[0]
            behind.discarded = sum(n for name, n in behind.plan.num_tokens.items() if name not in requests)
        self.live.release(now)
        return output

    def fail_step(self, plan: StepPlan, error: ErrorInfo, now: float) -> StepOutput:
        """The older step in flight failed as a whole: its requests end with the error, and the worker is told again what this step told
        it. A step behind it is not run; its other requests are as if it had not been planned."""
        order = self._land(plan).order
        known_again = {new.request_id for flight in self._flights for new in flight.order.new}
        self._lost_drops += [name for name in order.dropped if name not in known_again]
        if order.features is not None:
            self.live.announce()
        self.live.announce_settings(order.settings, again=True)
        for request_id in plan.num_tokens:
            self.fail(request_id, error, now)
        return self._after_failure(plan, now)

    def relieve(self, plan: StepPlan, error: ErrorInfo, now: float) -> StepOutput:
        """The worker had no memory for the older step in flight: it has taken over what the order says, and run nothing (StepMemoryError).
        The next steps are smaller (relief.py), and requests beyond what such a step runs go back to the line. When no smaller one is of
        use, the request ends with the error."""
        relief = self._builder.relief
        if not relief.shrink(plan):
            alone = "a request can't run, not even alone"
            advice = "with a smaller scheduler.token_budget, or less memory for K/V (cache.kv_memory_fraction), it might"
            return self.fail_step(plan, msgspec.structs.replace(error, message=f"{alone}: {error.message}; {advice}"), now)
        self._land(plan)
        batch = self.batch
        while relief.limit is not None and len(batch.running) > relief.limit:
            victim = batch.line.victim(batch.running, now)
            batch.preempt(victim, now)
            relief.preempted.append(victim.request_id)
        return self._after_failure(plan, now)

    def _after_failure(self, plan: StepPlan, now: float) -> StepOutput:
        self._builder.encoding.step_failed()
        for flight in self._flights:
            flight.void = True
        return self._close(StepOutput(step_id=plan.step_id), self._report(None, None, now, 0.0), now)

    def flush(self, now: float) -> StepOutput | None:
        """Ends that no step has carried yet (a cancel while idle, a request refused); None when there are none."""
        self.live.release(now)
        ended = self.batch.take_ended()
        if not ended:
            return None
        return StepOutput(step_id=self._builder.step_id, finished=ended, report=self._report(None, None, now, 0.0))

    def _report(
        self,
        plan: StepPlan | None,
        result: StepResult | None,
        now: float,
        seconds: float,
        *,
        gap: float = 0.0,
        flight: Flight | None = None,
    ) -> StepReport:
        """Without a plan and result: how things stand when no step has given any."""
        num_tokens = {} if plan is None else plan.num_tokens
        prompt_tokens = 0 if plan is None else plan.num_prompt_tokens
        drafts = 0 if plan is None else plan.num_draft_tokens
        total = sum(num_tokens.values()) - drafts if prompt_tokens else len(num_tokens)
        counters = {} if result is None else result.counters
        if self.batch.counters:
            counters = {**counters, **self.batch.counters}
            self.batch.counters = {}
        return StepReport(
            step_id=self._builder.step_id if plan is None else plan.step_id,
            started=now - seconds,
            duration=seconds,
            phases={} if result is None else result.phases,
            num_requests=len(num_tokens),
            prompt_tokens=prompt_tokens,
            draft_tokens=drafts,
            decode_tokens=total - prompt_tokens,
            running=len(self.batch.running),
            waiting=len(self.batch.line),
            free_blocks=self.pool.num_available,
            num_blocks=self.pool.num_blocks,
            preempted=0 if plan is None else len(plan.preempted),
            allocation_failures=self.pool.allocation_failures,
            bytes_moved=0 if result is None else result.bytes_moved,
            flops=0 if result is None else result.flops,
            counters=counters,
            cpu_seconds=time.process_time(),
            gap=gap,
            ran=plan is not None,
            ahead=flight is not None and flight.order.ahead,
            waited="" if flight is None else flight.waited,
            ahead_discarded=0 if flight is None else flight.discarded,
        )

    # ---- switches ---------------------------------------------------------------------------------------------------------------

    def apply_switches(self, new: Switches, now: float | None = None) -> list[str]:
        """Between two steps: put `new` in force. Its plugins are loaded and started by the caller.

        Lossless plugins that changed go on or off for open requests too (`PluginHost.after_switch`), with `request_added` or
        `request_removed`; otherwise an open request keeps what it was admitted with. The waiting line moves to the new policy.
        Plugins that nobody uses any more get their `engine_stopped` and are unloaded: now (their names are returned), or as their last
        request ends.
        """
        self._nothing_in_flight()
        return self.live.apply(new, time.time() if now is None else now)

    def configure(self, config: SchedulerConfig, plugins: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Between two steps: other limits from the next one on. plugins: settings of plugins that the worker must be told of."""
        self._nothing_in_flight()
        self._builder.configure(config)
        self.live.announce_settings(plugins or {})

    # ---- checks -----------------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """RuntimeError unless pool, block tables, batch and waiting line agree."""
        self.batch.check_integrity()
