"""Plugins and policies that answer nonsense, contradict themselves, or come and go: nobody but those concerned notices."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.core.contexts import PrefixMatch
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.policy import FcfsPolicy
from tokenbus.core.request import StopRule
from tokenbus.core.scheduling.batch import Batch

FREE = "a free block"


class Odd(Plugin):
    """Answers what the request's `odd` field says, and notes who came and went."""

    info = PluginInfo(name="odd", summary="", scope="request", lossless=True, claims={"odd"})
    answers: dict[str, Any] = {}
    seen: list[str] = []

    def _answer(self, request, hook: str) -> Any:
        return self.answers.get(request.fields.get("odd")) if request.fields.get("odd", "").startswith(hook) else None

    @hookimpl
    def request_added(self, request):
        self.seen.append(f"+{request.request_id}")
        if self._answer(request, "added"):
            raise ValueError("not this one")
        if request.fields.get("odd") == "notes":
            request.notes["odd"] = {"not": "text"}
            request.notes[3] = "cut \ud800 off"
        if request.fields.get("odd") == "all notes":
            request.notes = ["not even", "a dict"]

    @hookimpl
    def request_removed(self, request):
        self.seen.append(f"-{request.request_id}")
        if self._answer(request, "removed"):
            raise ValueError("it stays")

    @hookimpl
    def stop_rule(self, request):
        return self._answer(request, "stop_rule")

    @hookimpl
    def wants_prompt_logits(self, request):
        return self._answer(request, "wants_prompt_logits")

    @hookimpl
    def limit_chunk(self, request):
        return self._answer(request, "limit_chunk")

    @hookimpl
    def match_prefix(self, request, pool):
        answer = self._answer(request, "match_prefix")
        if answer is not FREE:
            return answer
        block = next(b for b in range(pool.num_blocks) if not pool.refs(b) and not pool.is_retained(b))
        return PrefixMatch([block], pool.block_size)


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch):
    monkeypatch.setattr(Odd, "seen", [])


@pytest.mark.parametrize(
    ("hook", "answer"),
    [
        ("limit_chunk", 2.5),
        ("limit_chunk", "3"),
        ("match_prefix", [0]),
        ("match_prefix", FREE),
        ("match_prefix", PrefixMatch([10**6], 4)),
        ("stop_rule", {1, 2}),
        ("stop_rule", StopRule(token_ids=frozenset({1}), min_tokens="many")),  # type: ignore[arg-type]
        ("wants_prompt_logits", "yes"),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_a_nonsensical_answer_ends_its_request_only(harness, monkeypatch, hook: str, answer: Any, running: bool) -> None:
    monkeypatch.setattr(Odd, "answers", {hook: answer})
    h = harness(plugins=(Odd,), on=("odd", "prefix_cache"))
    prompt = [3 + (i * i) % 40 for i in range(9)]
    h.add("good", prompt, max_tokens=5)
    if running:
        h.step()
    h.add("bad", 9, max_tokens=5, fields={"odd": hook})
    h.run()
    error = h.finished["bad"].error
    assert (h.finished["bad"].reason, error.kind, error.plugin, error.hook) == ("error", "PluginError", "odd", hook)
    assert h.finished["good"].reason == "length"
    assert h.tokens["good"] == h.solo(prompt, 5)


def test_notes_leave_as_text(harness) -> None:
    h = harness(plugins=(Odd,), on=("odd",))
    h.add("some", 5, fields={"odd": "notes"})
    h.add("all", 5, fields={"odd": "all notes"})
    h.run()
    assert h.finished["some"].notes == {"odd": "{'not': 'text'}", "3": "cut ? off"}
    assert h.finished["all"].notes == {"": "['not even', 'a dict']"}


# ---- policies -------------------------------------------------------------------------------------------------------------------


class Pushy(FcfsPolicy):
    """Every newcomer displaces the oldest running request. `fault`: what else it does wrong."""

    fault = ""

    def add(self, request, *, preempted, now):
        if preempted and self.fault == "add":
            raise ValueError("no way back")
        super().add(request, preempted=preempted, now=now)

    def peek(self, now):
        waiting = sorted(self._waiting.values(), key=lambda r: (r.preemptions > 0, r.request_id))
        if self.fault == "forgets whom it favoured":
            waiting.reverse()
        return waiting[0] if waiting else None

    def pop(self, request):
        del self._waiting[request.request_id]

    def displaces(self, waiting, running, now):
        return running[0]


class PushyPlugin(Plugin):
    info = PluginInfo(name="scheduling.pushy", summary="", scope="step", lossless=True, slot="scheduling")

    @hookimpl
    def scheduling_policy(self):
        return Pushy()


@pytest.mark.parametrize("full", ["batch", "pool"])
@pytest.mark.parametrize("fault", ["add", "forgets whom it favoured", ""])
def test_a_policy_that_fails_while_it_displaces(harness, monkeypatch, fault: str, full: str) -> None:
    """Core's policy takes over in the middle of an admission, with another head."""
    monkeypatch.setattr(Pushy, "fault", fault)
    sizes = {"max_running": 2} if full == "batch" else {"num_blocks": 8}
    h = harness(plugins=(PushyPlugin,), on=("scheduling.pushy",), **sizes)
    names = ["b1", "b2", "a3", "a4"]
    for name in names[:2]:
        h.add(name, 9, max_tokens=6)
    h.step()
    for name in names[2:]:
        h.add(name, 9, max_tokens=6)
    h.run()
    assert {h.finished[name].reason for name in names} == {"length"}
    assert sum(finish.preemptions for finish in h.finished.values()) >= 1
    assert {(name, error.hook) for name, error in h.failures} == {("scheduling.pushy", "scheduling_policy")}
    for name in names:
        prompt = [3 + (7 * i + len(name) + ord(name[-1])) % 47 for i in range(9)]
        assert h.tokens[name] == h.solo(prompt, 6)


# ---- costs ----------------------------------------------------------------------------------------------------------------------


def test_admitting_many_at_once_looks_at_each_a_few_times(harness, monkeypatch) -> None:
    looks = 0
    soon = Batch.soon

    def counting(self, request):
        nonlocal looks
        looks += 1
        return soon(self, request)

    monkeypatch.setattr(Batch, "soon", counting)
    h = harness(num_blocks=2000, max_running=400, token_budget=4000)
    for number in range(50):
        h.add(f"first{number}", 5, max_tokens=3)
    h.step()
    looks = 0
    for number in range(300):
        h.add(f"r{number}", 5, max_tokens=3)
    h.step()
    assert len(h.scheduler.batch.running) == 350
    assert looks <= 50 + 2 * 300
    h.run()


def test_headroom_is_kept_up_to_date(harness, monkeypatch) -> None:
    """What the builder carries along equals a fresh count, whatever joined and left in the step."""
    compared = 0

    def check(self, request, match) -> bool:
        nonlocal compared
        answer = fits(self, request, match)
        if self._headroom is not None:
            compared += 1
            assert self._headroom == sum(map(self._batch.headroom, self._batch.running))
        return answer

    from tokenbus.core.scheduling.step_builder import StepBuilder

    fits = StepBuilder._fits
    monkeypatch.setattr(StepBuilder, "_fits", check)
    h = harness(on=("scheduling.priority", "prefix_cache", "chunked_prefill"), num_blocks=30, max_running=5, token_budget=16)
    for number in range(60):
        h.add(f"r{number}", 3 + (5 * number) % 40, max_tokens=1 + number % 13, fields={"priority": number % 4})
        h.step()
    h.run()
    assert compared > 60
    assert sum(len(plan.preempted) for plan in h.plans) > 5


# ---- switches -------------------------------------------------------------------------------------------------------------------


def test_a_plugin_hears_of_each_request_it_gets_and_loses(harness) -> None:
    h = harness(plugins=(Odd,), on=())
    h.add("runs", 5, max_tokens=20)
    h.step()
    h.add("pinned", 5, max_tokens=20, pinned={"odd": False})
    h.switch(odd=True)
    assert Odd.seen == ["+runs"]
    h.add("new", 5, max_tokens=20)
    h.add("claims", 5, max_tokens=20, fields={"odd": "x"})
    h.step()
    h.switch(odd=False)
    assert Odd.seen == ["+runs", "+new", "+claims", "-runs", "-new"]
    h.switch(odd=True)
    h.run()
    assert sorted(Odd.seen[5:7]) == ["+new", "+runs"]
    assert sorted(Odd.seen[7:]) == ["-claims", "-new", "-runs"]
    assert h.finished["pinned"].features == ()


@pytest.mark.parametrize("fault", ["added", "removed"])
def test_a_plugin_that_raises_on_a_request_it_gets_or_loses_ends_it(harness, monkeypatch, fault: str) -> None:
    h = harness(plugins=(Moody,), on=() if fault == "added" else ("moody",))
    h.add("bad", 5, max_tokens=9)
    h.add("good", 5, max_tokens=9)
    h.step()
    monkeypatch.setattr(Moody, "fault", f"request_{fault}")
    h.switch(moody=fault == "added")
    monkeypatch.setattr(Moody, "fault", "")
    h.run()
    error = h.finished["bad"].error
    assert (error.plugin, error.hook) == ("moody", f"request_{fault}")
    assert h.finished["good"].reason == "length"


class Moody(Plugin):
    info = PluginInfo(name="moody", summary="", scope="request", lossless=True)
    fault = ""

    def _maybe(self, request, hook: str) -> None:
        if self.fault == hook and request.request_id == "bad":
            raise ValueError("not this one")

    @hookimpl
    def request_added(self, request):
        self._maybe(request, "request_added")

    @hookimpl
    def request_removed(self, request):
        self._maybe(request, "request_removed")


def test_a_claim_that_is_used_keeps_its_plugin_on_the_way(harness) -> None:
    h = harness(plugins=(Odd,), on=("odd",))
    h.add("open", 5, max_tokens=9, fields={"odd": "x"})
    h.step()
    h.switch(odd=False)
    h.add("uses", 5, max_tokens=9, features=("odd",), fields={"odd": "x"})
    h.add("not", 5, max_tokens=9, features=("odd",))
    h.run()
    assert [h.finished[name].features for name in ("open", "uses", "not")] == [("odd",), ("odd",), ()]
    assert "odd" not in h.host.loaded
    h.add("late", 5, features=("odd",), fields={"odd": "x"})
    h.add("fine", 5, features=("odd",))
    h.add("stranger", 5, features=("nobody",))
    h.run()
    assert h.finished["stranger"].error.kind == "UnavailableError"
    assert [(h.finished[name].reason, h.finished[name].features) for name in ("late", "fine")] == [
        ("length", ("odd",)), ("length", ()),
    ]  # fmt: skip
    assert "odd" not in h.host.loaded
