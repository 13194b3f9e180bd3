"""Live switches, lingering plugins, and plugins that raise."""

from __future__ import annotations

import pytest

from tokenbus.core.contexts import PrefixMatch
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.request import StopRule


class Lossy(Plugin):
    info = PluginInfo(name="lossy", summary="", scope="request", lossless=False)
    stopped: list[str] = []

    @hookimpl
    def engine_stopped(self):
        Lossy.stopped.append("lossy")

    @hookimpl
    def stop_rule(self, request, eos_token_ids):
        return StopRule(token_ids=frozenset(range(2, 50)), min_tokens=3)


PER_REQUEST = (
    "request_added",
    "stop_rule",
    "wants_prompt_logits",
    "match_prefix",
    "limit_chunk",
    "blocks_filled",
    "request_removed",
)


class Faulty(Plugin):
    """Raises in the hook that the request's `fault` field names."""

    info = PluginInfo(name="faulty", summary="", scope="request", lossless=True, claims={"fault"})
    engine_fault = ""

    def _maybe(self, request, hook: str) -> None:
        if request.fields.get("fault") == hook:
            raise ZeroDivisionError(hook)

    @hookimpl
    def request_added(self, request):
        self._maybe(request, "request_added")

    @hookimpl
    def stop_rule(self, request):
        self._maybe(request, "stop_rule")

    @hookimpl
    def wants_prompt_logits(self, request):
        self._maybe(request, "wants_prompt_logits")

    @hookimpl
    def match_prefix(self, request):
        self._maybe(request, "match_prefix")
        if request.fields.get("fault") == "bad match":
            return PrefixMatch(blocks=[0], num_tokens=3)
        return None

    @hookimpl
    def limit_chunk(self, request):
        self._maybe(request, "limit_chunk")
        return 0 if request.fields.get("fault") == "always zero" else None

    @hookimpl
    def blocks_filled(self, request):
        self._maybe(request, "blocks_filled")

    @hookimpl
    def request_removed(self, request):
        self._maybe(request, "request_removed")

    @hookimpl
    def step_finished(self):
        if self.engine_fault == "step_finished":
            raise ZeroDivisionError

    @hookimpl
    def block_evicted(self, block_id):
        if self.engine_fault == "block_evicted":
            raise ZeroDivisionError


@pytest.mark.parametrize("hook", [*PER_REQUEST, "bad match"])
@pytest.mark.parametrize("running", [False, True])
def test_a_raising_hook_ends_its_request_only(harness, hook: str, running: bool) -> None:
    h = harness(plugins=(Faulty,), on=("faulty", "prefix_cache", "chunked_prefill"))
    prompt = [3 + (i * i) % 40 for i in range(9)]
    if running:
        h.add("good", prompt, max_tokens=5)
        h.step()
    h.add("bad", 9, max_tokens=5, fields={"fault": hook})
    if not running:
        h.add("good", prompt, max_tokens=5)
    h.run()
    error = h.finished["bad"].error
    assert h.finished["bad"].reason == "error"
    assert (error.kind, error.plugin) == ("PluginError", "faulty")
    assert error.hook == ("match_prefix" if hook == "bad match" else hook)
    assert h.finished["good"].reason == "length"
    assert h.tokens["good"] == h.solo(prompt, 5)
    assert h.failures == []


@pytest.mark.parametrize("hook", ["step_finished", "block_evicted"])
def test_a_raising_engine_wide_hook_is_told_and_the_loop_goes_on(harness, monkeypatch, hook: str) -> None:
    monkeypatch.setattr(Faulty, "engine_fault", hook)
    h = harness(plugins=(Faulty,), on=("faulty", "prefix_cache"), num_blocks=8, block_size=4)
    for name in "abc":
        h.add(name, 12, max_tokens=12)
    h.run()
    assert h.failures
    assert {(name, error.hook) for name, error in h.failures} == {("faulty", hook)}
    assert all(finish.reason == "length" for finish in h.finished.values())


def test_all_answers_zero_still_moves_one_token(harness) -> None:
    h = harness(plugins=(Faulty,), on=("faulty",))
    h.add("a", 5, max_tokens=3, fields={"fault": "always zero"})
    h.add("b", 5, max_tokens=3, fields={"fault": "always zero"})
    h.run()
    assert all(sum(plan.num_tokens.values()) == 1 for plan in h.plans)
    assert len(h.plans) == 14
    assert all(len(tokens) == 3 for tokens in h.tokens.values())


def test_lossless_switches_reach_running_requests_unless_pinned(harness) -> None:
    settings = {"chunked_prefill": {"mode": "fixed", "chunk_size": 4}}
    h = harness(on=("chunked_prefill",), settings=settings, num_blocks=100)
    h.add("a", 40, max_tokens=2)
    h.step()
    h.add("b", 20, max_tokens=2, pinned={"chunked_prefill": True})
    assert h.switch(chunked_prefill=False) == []
    plan = h.step()
    assert plan.num_tokens == {"a": 36, "b": 4}
    assert h.inputs[-1].features == ()
    h.step()
    assert h.inputs[-1].features is None
    h.run()
    assert h.finished["a"].features == ()
    assert h.finished["b"].features == ("chunked_prefill",)
    assert "chunked_prefill" not in h.host.loaded
    assert h.switch(chunked_prefill=True) == []
    h.add("c", 20)
    assert h.step().num_tokens == {"c": 4}
    assert h.inputs[-1].features == ("chunked_prefill",)
    h.run()


def test_others_keep_what_they_were_admitted_with_and_the_plugin_goes_with_the_last(harness, monkeypatch) -> None:
    monkeypatch.setattr(Lossy, "stopped", [])
    h = harness(plugins=(Lossy,), on=("lossy",))
    h.add("a", 5, max_tokens=10)
    h.step()
    h.switch(lossy=False)
    h.add("b", 5, max_tokens=10)
    h.add("late", 5, max_tokens=10, features=("lossy",))
    assert "lossy" in h.host.loaded
    h.run()
    assert [h.finished[name].reason for name in ("a", "b", "late")] == ["stop", "length", "stop"]
    assert [len(h.tokens[name]) for name in ("a", "b", "late")] == [3, 10, 3]
    assert "lossy" not in h.host.loaded
    assert Lossy.stopped == ["lossy"]
    h.add("after all", 5, features=("lossy",), max_tokens=10)  # on its way when it went: loaded once more
    h.run()
    assert (h.finished["after all"].reason, len(h.tokens["after all"])) == ("stop", 3)
    assert "lossy" not in h.host.loaded
    assert Lossy.stopped == ["lossy", "lossy"]


def test_a_lossless_plugin_that_went_off_on_the_way_is_left_out(harness) -> None:
    h = harness(on=("prefix_cache",))
    h.switch(prefix_cache=False)
    h.add("a", 5, features=("prefix_cache",))
    h.run()
    assert h.finished["a"].features == ()
    assert h.finished["a"].reason == "length"


def test_off_and_on_again_while_it_lingers(harness, monkeypatch) -> None:
    monkeypatch.setattr(Lossy, "stopped", [])
    h = harness(plugins=(Lossy,), on=("lossy",))
    h.add("a", 5, max_tokens=10)
    h.step()
    h.switch(lossy=False)
    before = h.plugin("lossy")
    h.switch(lossy=True)
    h.run()
    assert h.plugin("lossy") is before
    assert Lossy.stopped == []


def test_nothing_is_left_of_requests_that_ended(harness) -> None:
    h = harness(on=("prefix_cache", "chunked_prefill", "scheduling.priority"))
    for number in range(300):
        h.add(f"r{number}", 3 + number % 20, max_tokens=2, deadline=h.now + 600)
        h.run()
    h.step()
    scheduler = h.scheduler
    chunked = h.plugin("chunked_prefill")
    sizes = [len(scheduler.batch.requests), len(scheduler.batch.line), len(scheduler.batch._ended), len(scheduler.batch._dropped),
             len(scheduler.batch.line.policy._heap), len(chunked._asked), len(chunked._counted)]  # fmt: skip
    assert max(sizes) <= 1
    assert len(h.worker.known) <= 1
    assert h.plugin("prefix_cache").num_blocks <= h.pool.num_blocks


class OddKernels(Plugin):
    """Keeps K/V in a way that nobody else reads."""

    info = PluginInfo(name="attention.odd", summary="", scope="step", lossless=False, slot="attention")


def test_what_runs_is_computed_again_when_its_kernels_fail_and_no_old_block_is_found(harness):
    h = harness(num_blocks=40, on=("attention.odd", "prefix_cache"), plugins=(OddKernels,), max_running=2)
    shared = list(range(3, 15))
    h.add("first", shared, max_tokens=2)
    h.run()
    h.add("a", [*shared, 20], max_tokens=12)
    h.add("b", [*shared, 21], max_tokens=12)
    h.add("waits", [*shared, 22], max_tokens=3)
    for _ in range(5):
        h.step()
    assert h.scheduler.num_running == 2
    assert h.scheduler.requests["a"].cached_tokens == 12
    h.switch(attention__odd=False)
    h.worker.kv = [[-1] * h.worker.block_size for _ in h.worker.kv]  # garbage to any other kernel
    h.run()
    for request_id, last, count in (("a", 20, 12), ("b", 21, 12), ("waits", 22, 3)):
        assert h.tokens[request_id] == h.solo([*shared, last], count)
        assert h.finished[request_id].reason == "length"
    assert [h.finished[name].preemptions for name in ("a", "b", "waits")] == [1, 1, 0]
