"""A device that has no memory for large steps: requests run in smaller ones, with the same tokens, or end with a clear error."""

from __future__ import annotations

import msgspec
import pytest

from tokenbus.core.errors import ErrorInfo
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.scheduling import relief

NO_MEMORY = ErrorInfo(kind="StepMemoryError", message="there is no memory for a step")


class Tight:
    """Runs the harness on a device that has memory for steps of `most` tokens."""

    def __init__(self, h, most: int) -> None:
        self.h, self.most = h, most
        self.failed: list[int] = []
        """Sizes of the steps that failed."""

    def step(self) -> bool:
        h = self.h
        planned = h.scheduler.schedule(h.now)
        if planned is None:
            h.take(h.scheduler.flush(h.now))
            return False
        plan, order = planned
        size = sum(plan.num_tokens.values())
        if size > self.most:
            self.failed.append(size)
            take_over(h.worker, order)
            h.take(h.scheduler.relieve(plan, NO_MEMORY, h.now))
        else:
            h.plans.append(plan)
            h.take(h.scheduler.update(plan, h.worker.execute(order), h.now, 0.01))
        h.check()
        return True

    def run(self, steps: int = 2000) -> list[int]:
        for _ in range(steps):
            if not self.step() and not self.h.scheduler.has_work():
                assert self.h.pool.num_available == self.h.pool.num_blocks
                return self.failed
        raise AssertionError("still busy")


def take_over(worker, order) -> None:
    """What the real worker has done of a step when it says that it had no memory."""
    worker.execute(msgspec.structs.replace(order, num_tokens={}, drafts={}))


@pytest.mark.parametrize(
    "on", [("chunked_prefill",), ("chunked_prefill", "prefix_cache"), ()], ids=["chunks", "cache", "whole"]
)
@pytest.mark.parametrize("most", [40, 7, 3])
def test_all_requests_finish_with_their_tokens(harness, on, most):
    h = harness(on=on, max_running=8, token_budget=64)
    sizes = {name: 3 + 4 * i if on else min(most, 3 + i) for i, name in enumerate("abcdefgh")}
    for name, size in sizes.items():
        h.add(name, size, max_tokens=6)
    prompts = {name: list(h.scheduler.requests[name].tokens) for name in sizes}
    failed = Tight(h, most).run()
    assert {finish.reason for finish in h.finished.values()} == {"length"}
    assert {name: h.tokens[name] for name in sizes} == {name: h.solo(prompts[name], 6) for name in sizes}
    assert failed
    assert len(failed) < 20, "steps that can't be run are planned again and again"


def test_one_token_that_finds_no_memory_ends_its_request(harness):
    h = harness(on=("chunked_prefill",))
    h.add("a", 9)
    failed = Tight(h, 0).run()
    assert failed == [9, 4, 2, 1]
    assert h.finished["a"].reason == "error"
    assert (
        "not even alone: there is no memory for a step; with a smaller scheduler.token_budget" in h.finished["a"].error.message
    )


def test_a_prompt_that_nobody_chunks_ends_alone(harness):
    h = harness(token_budget=16)
    h.add("a", 3, max_tokens=6)
    h.add("b", 30)
    Tight(h, 12).run()
    assert (h.finished["a"].reason, h.finished["b"].reason) == ("length", "error")
    assert h.tokens["a"] == h.solo([3 + (7 * i + 1 + ord("a")) % 47 for i in range(3)], 6)


def test_victims_are_the_policys(harness):
    h = harness(on=("scheduling.priority", "chunked_prefill"))
    for name, priority in (("a", 1), ("b", 0), ("c", 2), ("d", 0)):
        h.add(name, 2, max_tokens=8, fields={"priority": priority})
    h.step()
    plan, _ = h.scheduler.schedule(h.now)
    assert len(plan.num_tokens) == 4
    h.take(h.scheduler.relieve(plan, NO_MEMORY, h.now))
    assert [request.request_id for request in h.scheduler.batch.running] == ["b", "d"]
    h.check()
    plan, _ = h.scheduler.schedule(h.now)
    assert sorted(plan.preempted) == ["a", "c"], "who counts them finds them in the next plan"


def test_steps_grow_again_while_there_is_memory(harness, monkeypatch):
    monkeypatch.setattr(relief, "RECOVERY", 3)
    h = harness(on=("chunked_prefill",), token_budget=32, num_blocks=200)
    h.add("a", 200, max_tokens=2)
    device = Tight(h, 10)
    for _ in range(12):
        device.step()
    assert device.failed == [32, 16, 16, 16], "8 are tried, and three steps later 16 again"
    assert {plan.budget for plan in h.plans} == {8}
    device.most = 1000
    device.run()
    assert h.plans[-1].budget == 32
    assert h.tokens["a"] == h.solo([3 + (7 * i + 1 + ord("a")) % 47 for i in range(200)], 2)


def test_drafts_of_a_step_without_memory(harness, monkeypatch):
    monkeypatch.setattr(Oracle, "solo", staticmethod(harness.solo))
    h = harness(on=("chunked_prefill", "oracle"), plugins=(Oracle,), num_blocks=64)
    for name in "abc":
        h.add(name, 6, max_tokens=20)
    device = Tight(h, 9)
    failed = device.run()
    assert {name: h.tokens[name] for name in "abc"} == {
        name: h.solo([3 + (7 * i + 1 + ord(name)) % 47 for i in range(6)], 20) for name in "abc"
    }
    assert any(plan.num_draft_tokens for plan in h.plans)
    assert failed


class Oracle(Plugin):
    """Proposes what will come."""

    info = PluginInfo(name="oracle", summary="", scope="request", lossless=True)
    solo = None
    """The harness's."""

    @hookimpl
    def propose_drafts(self, request, most):
        return type(self).solo(request.tokens, min(most, 6))
