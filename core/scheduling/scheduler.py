"""The scheduler: which tokens run next, whose KV blocks they use, when a request ends. A plain object that EngineCore owns and calls.

    add / cancel / expire      intake: changes what is open; ends go out with the next output        (intake.py)
    schedule                   one transaction: decodes, prompt chunks, waiting requests, blocks     (step_builder.py)
    update / fail_step         the step's result: append, stop checks, filled blocks, output         (here)
    flush                      ends that happened while no step ran
    apply_switches             between two steps

Per step: at most one plan is in flight (`schedule` then `update` or `fail_step`). No step does work that grows with requests that
have ended. Nothing here awaits, locks or blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..config import Config, SchedulerConfig
from ..errors import ErrorInfo, PluginError, TokenbusError
from ..host import PluginHost, Switches
from ..kv.pool import BlockPool
from ..messages import StepOutput, StepReport
from ..plan import StepInput, StepPlan, StepResult, TokenLogprobs
from ..request import AdmittedRequest, Request, Status
from .batch import Batch
from .intake import Intake
from .live_switches import LiveSwitches
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
    ) -> None:
        """max_model_len: tokens of prompt plus output, the pool's size may lower it. host: role "engine", with the plugins of
        `switches` loaded and their `engine_started` called (the caller does both, here and before `apply_switches`).
        start_plugin: does both for one that is off, when a request comes that has it all the same (default: only loads it)."""
        max_model_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self.pool = pool
        self.batch = Batch(pool, on_plugin_failure)
        self.live = LiveSwitches(host, switches, self.batch, start_plugin or (lambda name: host.load((name,))))
        self._builder = StepBuilder(self.batch, config.scheduler)
        self._intake = Intake(
            self.batch,
            self.live,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            token_budget=lambda: self._builder.token_budget,
        )
        self._in_flight: StepInput | None = None
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
        """The step that computes; None between two steps."""
        return self._in_flight

    @property
    def switches(self) -> Switches:
        return self.live.switches

    # ---- the step ---------------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> tuple[StepPlan, StepInput] | None:
        """The next step, or None when there is nothing to run. Its blocks are taken when this returns."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} has neither been updated nor failed")
        planned = self._builder.build(now)
        if planned is None:
            return None
        plan, new, new_blocks = planned
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
        )
        self._in_flight = order
        return plan, order

    def update(self, plan: StepPlan, result: StepResult, now: float, seconds: float) -> StepOutput:
        """Take in a step's result; `seconds` is the wall time from plan to result. The output carries the ends from intake too."""
        self._in_flight = None
        output = StepOutput(step_id=plan.step_id, tokens=result.sampled, logprobs=result.logprobs, kernels=result.kernels)
        for request_id, error in result.errors.items():
            self.fail(request_id, error, now)
        if result.prompt_logprobs:
            output.prompt_logprobs = self._prompt_logprobs(plan, result.prompt_logprobs)
        if self._builder.drafts:
            self._count_drafts(result)
        self._advance(plan, result, output, now)
        if self._builder.drafts:
            self._settle_drafts(result, now)
        for request_id, drafts in result.drafts.items():
            if (request := self.batch.requests.get(request_id)) is not None:
                request.proposed = len(request.tokens), drafts
        hooks = self.live.engine_hooks
        for impl in hooks.step_finished:
            self.batch.call_engine_wide(impl, plan=plan, result=result, seconds=seconds)
        output.report = self._report(plan, result, now, seconds)
        output.finished = self.batch.take_ended()
        self.live.release(now)
        return output

    def _advance(self, plan: StepPlan, result: StepResult, output: StepOutput, now: float) -> None:
        """Append what was sampled, check for the end, note filled blocks. The hot loop: one pass over the plan."""
        batch = self.batch
        requests, block_size = batch.requests, batch.block_size
        sampled = result.sampled
        stale: list[str] | None = None
        ending: list[tuple[Request, str, int | None]] | None = None
        filled: list[tuple[Request, int, int]] | None = None
        for request_id, num_tokens in plan.num_tokens.items():
            request = requests.get(request_id)
            if request is None:
                stale = stale or []
                stale.append(request_id)
                continue
            before = request.computed
            new = sampled.get(request_id)
            if new is None:
                computed = before + num_tokens
            else:
                tokens = request.tokens
                known = len(tokens)
                if len(new) == 1 and known + 1 < request.limit and new[0] not in request.stop_ids:
                    computed = known
                    tokens.append(new[0])
                else:
                    kept, reason, stop_token = accept(request, new)
                    computed = min(known + len(new) - 1, len(tokens))
                    if reason is not None:
                        ending = ending or []
                        ending.append((request, reason, stop_token))
                        if len(kept) < len(new):
                            _trim(output, result, request_id, kept)
            request.computed = computed
            if computed // block_size != before // block_size and request.hooks.blocks_filled:
                filled = filled or []
                filled.append((request, before // block_size, computed // block_size))
        if filled is not None:
            self._blocks_filled(filled, now)
        if ending is not None:
            for request, reason, stop_token in ending:
                if request.status is not Status.FINISHED:
                    batch.end(request, reason, now, stop_token=stop_token, keep_in_running=True)
            batch.sweep()
        if stale is not None:
            for request_id in stale:
                _trim(output, result, request_id, [])

    def _count_drafts(self, result: StepResult) -> None:
        """Before any of its requests ends."""
        for request_id, drafts in self._builder.drafts.items():
            request, new = self.batch.requests.get(request_id), result.sampled.get(request_id)
            if request is not None and new is not None:
                request.draft_tokens += len(drafts)
                request.accepted_tokens += len(new) - 1

    def _settle_drafts(self, result: StepResult, now: float) -> None:
        """Give back what drafts took, and tell who proposed them how good they were."""
        counters, builder = self.batch.counters, self._builder
        for request_id, drafts in builder.drafts.items():
            new, plugin = result.sampled.get(request_id), builder.proposers[request_id]
            if new is None:
                continue
            accepted = len(new) - 1
            names = [
                "verified_steps",
                *(f"proposed_at.{i}" for i in range(len(drafts))),
                *(f"accepted_at.{i}" for i in range(accepted)),
            ]
            for name, count in (
                ("proposed_tokens", len(drafts)),
                ("accepted_tokens", accepted),
                *((name, 1) for name in names),
            ):
                counters[f"{plugin}.{name}"] = counters.get(f"{plugin}.{name}", 0) + count
            request = self.batch.requests.get(request_id)
            if request is None or request.status is not Status.RUNNING:
                continue
            self.batch.shrink(request)
            try:
                for impl in request.hooks.drafts_verified:
                    if impl.plugin == plugin:
                        impl(request=request, proposed=len(drafts), accepted=accepted)
            except TokenbusError as error:
                self.batch.end(request, "error", now, error=error.to_wire())

    def _blocks_filled(self, filled: list[tuple[Request, int, int]], now: float) -> None:
        pool = self.pool
        for request, first, last in filled:
            try:
                for impl in request.hooks.blocks_filled:
                    impl(request=request, first=first, last=last, pool=pool)
            except TokenbusError as error:
                self.batch.end(request, "error", now, error=error.to_wire())

    def _prompt_logprobs(self, plan: StepPlan, given: dict[str, list[TokenLogprobs]]) -> dict[str, list[TokenLogprobs]]:
        """Those not sent before: after a preemption the prompt runs again, its logprobs go out once."""
        fresh: dict[str, list[TokenLogprobs]] = {}
        for request_id, entries in given.items():
            request = self.batch.requests.get(request_id)
            if request is None or request_id not in plan.num_tokens:
                continue
            entries = entries[max(0, request.prompt_logprobs_sent - request.computed) :]  # noqa: PLW2901
            if entries:
                request.prompt_logprobs_sent += len(entries)
                fresh[request_id] = entries
        return fresh

    def fail_step(self, plan: StepPlan, error: ErrorInfo, now: float) -> StepOutput:
        """The step failed as a whole: its requests end with the error, and the worker is told again what this step told it."""
        if self._in_flight is not None:
            self._lost_drops = list(self._in_flight.dropped)
            if self._in_flight.features is not None:
                self.live.announce()
            self.live.announce_settings(self._in_flight.settings, again=True)
            self._in_flight = None
        for request_id in plan.num_tokens:
            self.fail(request_id, error, now)
        output = StepOutput(step_id=plan.step_id, finished=self.batch.take_ended(), report=self._report(None, None, now, 0.0))
        self.live.release(now)
        return output

    def flush(self, now: float) -> StepOutput | None:
        """Ends that no step has carried yet (a cancel while idle, a request refused); None when there are none."""
        self.live.release(now)
        ended = self.batch.take_ended()
        if not ended:
            return None
        return StepOutput(step_id=self._builder.step_id, finished=ended, report=self._report(None, None, now, 0.0))

    def _report(self, plan: StepPlan | None, result: StepResult | None, now: float, seconds: float) -> StepReport:
        """Without a plan and result: how things stand when no step has given any (its num_requests is 0)."""
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
        )

    # ---- switches ---------------------------------------------------------------------------------------------------------------

    def apply_switches(self, new: Switches, now: float | None = None) -> list[str]:
        """Between two steps: put `new` in force. Its plugins are loaded and started by the caller.

        Lossless plugins that changed go on or off for open requests too (`PluginHost.after_switch`), with `request_added` or
        `request_removed`; otherwise an open request keeps what it was admitted with. The waiting line moves to the new policy.
        Plugins that nobody uses any more get their `engine_stopped` and are unloaded: now (their names are returned), or as their last
        request ends.
        """
        return self.live.apply(new, time.time() if now is None else now)

    def configure(self, config: SchedulerConfig, plugins: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Between two steps: other limits from the next one on. plugins: settings of plugins that the worker must be told of."""
        self._builder.configure(config)
        self.live.announce_settings(plugins or {})

    # ---- checks -----------------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """RuntimeError unless pool, block tables, batch and waiting line agree."""
        self.batch.check_integrity()


def accept(request: Request, new: list[int]) -> tuple[list[int], str | None, int | None]:
    """Append sampled tokens until one ends the request: (tokens to show, why it ends or None, the stop token).

    A stop token is not appended and not shown. What was sampled behind the end is discarded.
    """
    tokens = request.tokens
    for index, token in enumerate(new):
        if len(tokens) >= request.limit:
            return new[:index], "length", None
        if token in request.stop_ids and len(tokens) >= request.stop_min_len:
            return new[:index], "stop", token
        tokens.append(token)
    return new, "length" if len(tokens) >= request.limit else None, None


def _trim(output: StepOutput, result: StepResult, request_id: str, kept: list[int]) -> None:
    """Show only `kept` of a request's tokens. The result's own dictionaries stay as they came: others read them."""
    if output.tokens is result.sampled:
        output.tokens = dict(result.sampled)
        output.logprobs = dict(result.logprobs)
    if kept:
        output.tokens[request_id] = kept
    else:
        output.tokens.pop(request_id, None)
    if (entries := output.logprobs.get(request_id)) is not None:
        if kept:
            output.logprobs[request_id] = entries[: len(kept)]
        else:
            del output.logprobs[request_id]
