"""fcfs and priority: order, ageing, displacement, and what happens when a policy fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tokenbus.core.errors import FieldError
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.policy import FcfsPolicy
from tokenbus.core.request import AdmittedRequest, Request
from tokenbus.plugins.scheduling.priority import Priority, PriorityPolicy

PRIORITY = ("scheduling.priority",)


class BrokenPolicy(FcfsPolicy):
    broken: set[str] = set()

    def _maybe(self, name: str) -> None:
        if name in self.broken:
            raise RuntimeError(f"no {name} today")

    def add(self, request, *, preempted, now):
        self._maybe("add")
        super().add(request, preempted=preempted, now=now)

    def peek(self, now):
        self._maybe("peek")
        return None if "lose" in self.broken else super().peek(now)

    def pop(self, request):
        self._maybe("pop")
        super().pop(request)

    def remove(self, request):
        self._maybe("remove")
        super().remove(request)

    def victim(self, running, now):
        self._maybe("victim")
        return super().victim(running, now)

    def displaces(self, waiting, running, now):
        self._maybe("displaces")


class Broken(Plugin):
    info = PluginInfo(name="broken", summary="", scope="step", lossless=True, slot="scheduling")

    @hookimpl
    def scheduling_policy(self):
        if "scheduling_policy" in BrokenPolicy.broken:
            raise RuntimeError("no policy today")
        return BrokenPolicy()


@pytest.fixture
def broken(monkeypatch) -> set[str]:
    monkeypatch.setattr(BrokenPolicy, "broken", set())
    return BrokenPolicy.broken


def order_of(h) -> list[str]:
    return [new.request_id for order in h.inputs for new in order.new]


def test_fcfs_ignores_priority(harness) -> None:
    h = harness(on=("scheduling.fcfs",), max_running=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -5)):
        h.add(name, 5, fields={"priority": priority})
    h.run()
    assert order_of(h) == ["a", "b", "c"]


def test_lower_number_first_ties_by_arrival(harness) -> None:
    h = harness(on=PRIORITY, max_running=1)
    for name, priority in (("a", 5), ("b", 5), ("c", 0), ("d", -1), ("e", 0)):
        h.add(name, 5, fields={"priority": priority} if priority else {})
    h.run()
    assert order_of(h) == ["d", "c", "e", "a", "b"]


def test_c32_the_low_one_ends_within_its_age_and_the_urgent_one_displaces(harness) -> None:
    h = harness(on=PRIORITY, max_running=2, settings={"scheduling.priority": {"age_seconds": 5.0}}, step_seconds=0.5)
    h.add("low", 4, max_tokens=4, fields={"priority": 3})
    started = h.now
    number = 0
    while "low" not in h.finished:
        while sum(name.startswith("h") for name in h.scheduler.requests) < 4:  # at capacity: two run, two wait
            h.add(f"h{number}", 4, max_tokens=4)
            number += 1
        h.step()
        assert h.now - started < 60
    assert h.now - started <= 3 * 5.0 + 5.0
    assert number > 10
    # a full batch of class 0, then one urgent request
    while h.scheduler.num_waiting:
        h.step()
    h.add("x", 4, max_tokens=50)
    h.add("y", 4, max_tokens=50)
    while {r.request_id for r in h.scheduler.requests.values()} != {"x", "y"} or h.scheduler.num_waiting:
        h.step()
    h.add("urgent", 4, max_tokens=2, fields={"priority": -2})
    plan = h.step()
    assert plan.preempted == ("y",), "the newest of the least urgent gives way"
    assert plan.num_tokens == {"x": 1, "urgent": 4}
    h.run()
    assert h.finished["y"].preemptions == 1
    assert h.tokens["y"] == h.solo(next(n.tokens[:4] for o in h.inputs for n in o.new if n.request_id == "y"), 50)


def test_equal_class_never_displaces_and_aged_requests_are_not_sent_back(harness) -> None:
    h = harness(on=PRIORITY, max_running=1, settings={"scheduling.priority": {"age_seconds": 5.0}})
    h.add("a", 4, max_tokens=30, fields={"priority": 1})
    h.step()
    h.add("b", 4, max_tokens=2, fields={"priority": 1})
    assert h.step().preempted == ()
    h.now += 6.0
    h.add("c", 4, max_tokens=2, fields={"priority": 0})
    assert h.step().preempted == (), "a came more than one class's worth of seconds before c"
    h.add("d", 4, max_tokens=2, fields={"priority": -1})
    assert h.step().preempted == ("a",)
    h.run()
    assert order_of(h) == ["a", "d", "a", "b", "c"]


def test_an_urgent_request_takes_blocks_from_less_urgent_ones(harness) -> None:
    h = harness(on=PRIORITY, num_blocks=8, block_size=4)
    h.add("a", 12, max_tokens=12, fields={"priority": 2})
    h.step()
    h.add("u", 20, max_tokens=4)
    plan = h.step()
    assert plan.preempted == ("a",)
    assert plan.num_tokens == {"u": 20}
    h.run()
    assert [h.finished[name].reason for name in "au"] == ["length"] * 2


def test_when_blocks_run_out_the_least_urgent_is_the_victim(harness) -> None:
    h = harness(on=PRIORITY, num_blocks=8, block_size=4)
    h.add("low", 7, max_tokens=16, fields={"priority": 1})
    h.add("high", 7, max_tokens=16)
    h.run()
    assert h.finished["high"].preemptions == 0
    assert h.finished["low"].preemptions >= 1


@pytest.mark.parametrize("value", [101, -101, 1.5, "1", True, None])
def test_bad_classes_are_refused_by_name(value) -> None:
    plugin = Priority(Priority.Settings(), "front")
    with pytest.raises(FieldError) as caught:
        plugin.check_fields(fields={"priority": value}, request=None)
    assert caught.value.param == "priority"
    assert plugin.check_fields(fields={"priority": -100}, request=None) is None


@pytest.mark.parametrize("policy", [FcfsPolicy(), PriorityPolicy(30.0)])
def test_removed_requests_do_not_pile_up(policy) -> None:
    hooks = SimpleNamespace()
    for number in range(1000):
        request = Request(AdmittedRequest(request_id=str(number), prompt=[1], max_tokens=1, arrival=float(number)), hooks)
        policy.add(request, preempted=False, now=0.0)
        if number:
            policy.remove(request)
    assert len(policy) == 1
    assert len(policy._heap) < 50
    assert policy.peek(0.0).request_id == "0"
    with pytest.raises(ValueError, match="head"):
        policy.pop(request)


@pytest.mark.parametrize("method", ["add", "peek", "lose", "pop", "remove", "victim", "displaces", "scheduling_policy"])
def test_a_policy_that_raises_is_replaced_and_nobody_is_lost(harness, broken: set[str], method: str) -> None:
    h = harness(plugins=(Broken,), num_blocks=8, block_size=4, max_running=2)
    prompts = {name: [3 + (i * ord(name)) % 40 for i in range(7)] for name in "abcdef"}
    h.switch(broken=True)
    for name, prompt in list(prompts.items())[:4]:
        h.add(name, prompt, max_tokens=14)
    h.step()
    broken.add(method)
    if method == "scheduling_policy":
        h.switch(broken=False)
        h.switch(broken=True)
    for name, prompt in list(prompts.items())[4:]:
        h.add(name, prompt, max_tokens=14)
    h.scheduler.cancel("d", "cancelled", h.now)
    h.run()
    assert [name for name, _ in h.failures] == ["broken"]
    error = h.failures[0][1]
    assert (error.plugin, error.hook) == ("broken", "scheduling_policy")
    assert h.finished.pop("d").reason == "cancelled"
    assert {name: finish.reason for name, finish in h.finished.items()} == dict.fromkeys("abcef", "length")
    for name in "abcef":
        assert h.tokens[name] == h.solo(prompts[name], 14)


def test_live_swap_takes_everybody_along(harness) -> None:
    h = harness(on=("scheduling.fcfs",), max_running=1)
    h.add("a", 5, max_tokens=3)
    h.step()
    for name, priority in (("b", 3), ("c", 1), ("d", 2)):
        h.add(name, 5, max_tokens=1, fields={"priority": priority})
    h.switch(scheduling__priority=True)
    assert h.switches.on == {"scheduling.priority"}
    h.check()
    for _ in range(3):
        h.step()
    h.switch(scheduling__priority=False)
    h.run()
    assert order_of(h)[:3] == ["a", "c", "b"], "c by class, then by arrival again"
