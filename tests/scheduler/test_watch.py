"""What a watcher of the engine is shown is what the steps really did."""

from __future__ import annotations

import itertools

import pytest

from tokenbus.core.bus import Bus
from tokenbus.core.engine import watch
from tokenbus.core.engine.watch import MOST_STEPS, StepWatch
from tokenbus.core.errors import ErrorInfo
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.plan import StepPlan, StepResult
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl


class Right(Plugin):
    """Proposes two drafts: the first is right, the second is not."""

    info = PluginInfo(name="right", summary="", scope="request", lossless=True)
    solo = None

    @hookimpl
    def propose_drafts(self, request, most):
        right = type(self).solo(list(request.admitted.prompt), request.num_output + 2)[request.num_output :]
        return [right[0], 2 + (right[1] - 1) % 40][:most]


class Watched:
    """The scheduler's harness with a bus that a watch listens to, as in the engine's loop."""

    def __init__(self, harness, **options) -> None:
        self.h = harness(**options)
        self.bus = Bus()
        self.watch = StepWatch(self.bus, self.h.scheduler)

    def step(self) -> bool:
        h = self.h
        if not h.flights:
            self._begin(h.scheduler.schedule(h.now))
        if h.ahead and len(h.flights) == 1:
            self._begin(h.scheduler.schedule_ahead(h.now))
        if not h.flights:
            return False
        plan, order = h.flights.popleft()
        result = h.worker.execute(order)
        h.take(h.scheduler.update(plan, result, h.now, 0.01))
        self.bus.publish(result)
        return True

    def _begin(self, planned) -> None:
        if planned is not None:
            self.h.flights.append(planned)
            self.bus.publish(planned[0])

    def run(self) -> None:
        while self.step():
            pass


def named(reply) -> list[tuple[dict[str, int], list[str] | None, dict[str, tuple[int, int]]]]:
    ids = reply.ids
    return [
        (
            {ids[row]: n for row, n in step.prefill.items()},
            None if step.decode is None else [ids[row] for row in step.decode],
            {ids[row]: pair for row, pair in step.verify.items()},
        )
        for step in reply.steps
    ]


def test_prompt_chunks_and_decodes_are_told_apart(harness):
    w = Watched(harness, on=("chunked_prefill",), settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 8}})
    w.watch.look()
    w.h.add("a", 5, max_tokens=4)
    w.step()
    w.h.add("b", 12, max_tokens=3)
    w.run()
    reply = w.watch.look()
    assert named(reply) == [
        ({"a": 5}, [], {}),
        ({"b": 8}, ["a"], {}),
        ({"b": 4}, None, {}),
        ({}, ["a", "b"], {}),
        ({}, ["b"], {}),
    ]
    assert [step.prompt_tokens for step in reply.steps] == [5, 8, 4, 0, 0]
    assert [step.sampled for step in reply.steps] == [1, 1, 2, 2, 1]
    assert [step.num_decodes for step in reply.steps] == [0, 1, 1, 2, 1]
    first = reply.steps[0].step_id
    assert [step.step_id for step in reply.steps] == [first, first + 1, first + 2, first + 3, first + 4]
    assert (reply.open, reply.running, reply.waiting, reply.lost) == (0, 0, 0, 0)
    assert w.watch.look().steps == [], "each step is shown once"


def test_steps_planned_ahead_are_shown_as_what_they_run(harness):
    w = Watched(harness, on=("chunked_prefill",), settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 8}}, ahead=True)
    w.watch.look()
    w.h.add("a", 5, max_tokens=4)
    w.h.add("b", 12, max_tokens=3)
    w.run()
    reply = w.watch.look()
    assert named(reply) == [
        ({"a": 5, "b": 3}, [], {}),
        ({"b": 8}, ["a"], {}),
        ({"b": 1}, None, {}),
        ({}, ["a", "b"], {}),
        ({}, ["b"], {}),
    ]
    assert [step.sampled for step in reply.steps] == [1, 1, 2, 2, 1]
    assert w.h.planned_ahead == 4
    for before, after in itertools.pairwise(reply.steps):
        assert after.started >= before.started + before.duration - 0.001, "steps follow each other"


def test_a_step_that_was_not_run_is_not_shown(harness):
    w = Watched(harness, ahead=True)
    w.watch.look()
    w.h.add("a", 5, max_tokens=9)
    w.step()
    plan, order = w.h.flights.popleft()
    w.h.flights.append(w.h.scheduler.schedule_ahead(w.h.now))
    w.bus.publish(w.h.flights[0][0])
    w.h.flights.appendleft((plan, order))
    w.h.fail_step(ErrorInfo(kind="WorkerError", message="x"))
    w.h.add("b", 5, max_tokens=2)
    w.run()
    steps = w.watch.look().steps
    assert [step.sampled for step in steps] == [1, 1, 1]
    assert len({step.step_id for step in steps} & {plan.step_id, plan.step_id + 1}) == 0


def test_drafts_with_what_was_accepted(harness, monkeypatch):
    monkeypatch.setattr(Right, "solo", staticmethod(harness.solo))
    w = Watched(harness, plugins=(Right,), on=("right",))
    w.watch.look()
    w.h.add("a", 6, max_tokens=6)
    w.run()
    reply = w.watch.look()
    assert named(reply)[:3] == [({"a": 6}, [], {}), ({}, None, {"a": (2, 1)}), ({}, None, {"a": (2, 1)})]
    assert [step.draft_tokens for step in reply.steps[:3]] == [0, 2, 2]


def test_what_is_run_anew_after_a_preemption_is_prefill(harness):
    w = Watched(harness, num_blocks=8, token_budget=64)
    w.watch.look()
    w.h.add("a", 12, max_tokens=16)
    w.h.add("b", 10, max_tokens=16)
    w.run()
    reply = w.watch.look()
    preempted = [(index, reply.ids[row]) for index, step in enumerate(reply.steps) for row in step.preempted]
    assert preempted
    index, request_id = preempted[0]
    anew = next(step for step in reply.steps[index:] if reply.ids.index(request_id) in step.prefill)
    assert anew.prefill[reply.ids.index(request_id)] > 10, "its prompt and what it had generated"


def test_requests_and_the_pool_are_listed_when_asked_for(harness):
    w = Watched(harness, num_blocks=16, max_running=1)
    w.h.add("a", 5, max_tokens=4, arm="x/b")
    w.h.add("b", 6, max_tokens=7)
    w.step()
    w.step()
    reply = w.watch.look(slow=True)
    assert reply.requests is not None
    assert [
        (r.request_id, r.running, r.prompt, r.computed, r.output, r.max_output, r.blocks, r.arm) for r in reply.requests
    ] == [
        ("a", True, 5, 6, 2, 4, 2, "x/b"),
        ("b", False, 6, 0, 0, 7, 0, ""),
    ]
    assert reply.blocks is not None
    assert len(reply.blocks) == 16
    assert [sum(part[i] for part in reply.blocks) for i in range(3)] == [2, 0, 14]
    assert (reply.free_blocks, reply.retained_blocks, reply.num_blocks) == (14, 0, 16)
    fast = w.watch.look(slow=False)
    assert (fast.requests, fast.blocks) == (None, None)


def test_running_requests_are_listed_first_and_the_list_is_bounded(harness, monkeypatch):
    monkeypatch.setattr(watch, "MOST_REQUESTS", 3)
    w = Watched(harness, max_running=2)
    for name in "abcd":
        w.h.add(name, 4)
    w.step()
    w.h.scheduler.cancel("a", "cancelled", w.h.now)
    w.step()
    requests = w.watch.look(slow=True).requests
    assert [(request.request_id, request.running) for request in requests] == [("b", True), ("c", True), ("d", False)]


def test_nobody_watches_nothing_is_listened_to(harness, monkeypatch):
    w = Watched(harness)
    w.h.add("a", 4, max_tokens=6)
    w.step()
    assert not w.bus.wants(StepPlan)
    assert not w.bus.wants(StepResult)
    clock = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    w.watch.look()
    w.step()
    assert w.watch.watching
    clock[0] = watch.KEEP_SECONDS + 1
    w.step()
    assert not w.watch.watching
    assert not w.bus.wants(StepPlan)
    assert w.watch.look().steps == [], "what was noted for a watcher that left is forgotten"


def test_steps_that_nobody_takes_are_bounded_and_counted(harness):
    w = Watched(harness, num_blocks=256)
    w.watch.look()
    w.h.add("a", 4, max_tokens=MOST_STEPS + 10)
    w.run()
    reply = w.watch.look()
    assert reply.lost == MOST_STEPS
    assert len(reply.steps) == 10
    assert reply.steps[0].decode == [0], "the first shown stands for itself"
    assert w.watch.look().lost == 0


@pytest.mark.parametrize(("num_blocks", "parts"), [(1, 4), (7, 4), (8, 4), (512, 512), (1000, 512)])
def test_the_census_counts_every_block_once(num_blocks, parts):
    pool = BlockPool(num_blocks, 4)
    taken = pool.allocate(min(num_blocks, 5))
    for block in taken[::2]:
        pool.retain(block)
    pool.release(taken[:3])
    found = pool.census(parts)
    assert len(found) <= parts
    retained = pool.num_retained
    used = len(taken) - len(taken[:3])
    assert [sum(part[i] for part in found) for i in range(3)] == [used, retained, num_blocks - used - retained]
