"""What somebody who watches the engine is shown: the last steps request by request, the open requests, the map of the KV pool.

    first look ──> listens to plans and results ──> a look takes what there is ──> ... ──> no look for KEEP_SECONDS: stops listening

Nobody looks, nothing is noted: the engine then does no work for this at all. There is one watcher, the front, for all of its viewers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from ..bus import Bus, Listener
from ..messages import WatchedRequest, WatchedStep, WatchReply
from ..plan import StepPlan, StepResult
from ..request import Request, Status
from ..scheduling.scheduler import Scheduler

KEEP_SECONDS = 5.0
"""After the last look."""
MOST_STEPS = 256
"""Steps kept between two looks: one more, and those kept so far are dropped and counted."""
MOST_REQUESTS = 1024
"""Open requests that a look lists: those that run first."""
MOST_PARTS = 512
"""Parts of the pool's map."""


class _Begun(NamedTuple):
    """A step that has no result yet."""

    plan: StepPlan
    at: float
    """Unix seconds."""
    clock: float
    prefill: dict[str, int]
    """Prompt tokens by request."""
    drafts: Mapping[str, list[int]]


class StepWatch:
    def __init__(self, bus: Bus, scheduler: Scheduler) -> None:
        self._bus = bus
        self._scheduler = scheduler
        self._listeners: list[Listener] = []
        self._until = 0.0
        self._begun: deque[_Begun] = deque()
        """Oldest first."""
        self._landed = 0.0
        """When the last result was there: a step that was planned before began then."""
        self._lost = 0
        self._forget_steps()

    @property
    def watching(self) -> bool:
        return bool(self._listeners)

    def look(self, *, slow: bool = True) -> WatchReply:
        """What has happened since the last look. slow: also the open requests and the map, which take time in proportion to their
        number."""
        self._until = time.monotonic() + KEEP_SECONDS
        if not self._listeners:
            self._listeners = [self._bus.listen(self._planned, StepPlan), self._bus.listen(self._ran, StepResult)]
        scheduler, pool = self._scheduler, self._scheduler.pool
        reply = WatchReply(
            steps=self._steps,
            lost=self._lost,
            ids=list(self._rows),
            open=len(scheduler.requests),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            free_blocks=pool.num_available - pool.num_retained,
            retained_blocks=pool.num_retained,
            num_blocks=pool.num_blocks,
            allocation_failures=pool.allocation_failures,
            requests=_listed(scheduler.requests) if slow else None,
            blocks=pool.census(MOST_PARTS) if slow else None,
        )
        self._forget_steps()
        self._lost = 0
        return reply

    def _forget_steps(self) -> None:
        self._steps: list[WatchedStep] = []
        self._rows: dict[str, int] = {}
        """Places of request ids in the reply's `ids`."""
        self._decoded: list[str] | None = None
        """The requests that decoded in the last step kept."""

    def _row(self, request_id: str) -> int:
        return self._rows.setdefault(request_id, len(self._rows))

    def _planned(self, plan: StepPlan) -> None:
        """Before the step runs: requests are as they were when it was planned."""
        if time.monotonic() > self._until:
            self._stop()
            return
        scheduler = self._scheduler
        drafts = {} if scheduler.in_flight is None else scheduler.in_flight.drafts
        prefill: dict[str, int] = {}
        if plan.num_prompt_tokens:
            for request_id, n in plan.num_tokens.items():
                request = scheduler.requests[request_id]
                known = n - len(drafts.get(request_id, ()))
                if known > 1 or scheduler.starts(request) < request.num_prompt:
                    prefill[request_id] = known
        self._begun.append(_Begun(plan, time.time(), time.monotonic(), prefill, drafts))

    def _ran(self, result: StepResult) -> None:
        while self._begun and self._begun[0].plan.step_id < result.step_id:
            self._begun.popleft()  # it failed
        if not self._begun or self._begun[0].plan.step_id != result.step_id:
            return
        plan, at, clock, prefill, drafts = self._begun.popleft()
        late, now = max(0.0, self._landed - clock), time.monotonic()
        self._landed = now
        if result.void:
            return
        if len(self._steps) == MOST_STEPS:
            self._lost += MOST_STEPS
            self._forget_steps()
        sampled, row = result.sampled, self._row
        decoded = [one for one in plan.num_tokens if one not in prefill and one not in drafts]
        same, self._decoded = decoded == self._decoded, decoded
        self._steps.append(
            WatchedStep(
                step_id=plan.step_id,
                started=at + late,
                duration=now - clock - late,
                prefill={row(one): n for one, n in prefill.items()},
                verify={row(one): (len(tokens), max(0, len(sampled.get(one, ())) - 1)) for one, tokens in drafts.items()},
                decode=None if same else [row(one) for one in decoded],
                num_decodes=len(decoded),
                prompt_tokens=plan.num_prompt_tokens,
                draft_tokens=plan.num_draft_tokens,
                sampled=sum(map(len, sampled.values())),
                preempted=[row(one) for one in plan.preempted],
                budget=plan.budget,
                running=plan.running,
                waiting=plan.waiting,
                phases=result.phases,
                bytes_moved=result.bytes_moved,
                flops=result.flops,
                media_tokens=plan.num_media_tokens,
            )
        )

    def _stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._begun.clear()
        self._lost = 0
        self._forget_steps()


def _listed(requests: Mapping[str, Request]) -> list[WatchedRequest]:
    running = [request for request in requests.values() if request.status is Status.RUNNING]
    listed = running[:MOST_REQUESTS]
    if len(listed) < MOST_REQUESTS:
        waiting = (request for request in requests.values() if request.status is Status.WAITING)
        listed += [request for request, _ in zip(waiting, range(MOST_REQUESTS - len(listed)), strict=False)]
    return [
        WatchedRequest(
            request_id=request.request_id,
            running=request.status is Status.RUNNING,
            prompt=request.num_prompt,
            computed=request.computed,
            output=request.num_output,
            max_output=request.limit - request.num_prompt,
            arrival=request.arrival,
            blocks=len(request.blocks),
            cached=request.cached_tokens or 0,
            preemptions=request.preemptions,
            arm=request.admitted.arm,
        )
        for request in listed
    ]
