"""A step planned while the one before it computes: what it counts on, when it waits, and what becomes of a wrong guess."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from tokenbus.core.errors import ErrorInfo
from tokenbus.core.plan import Drafts
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.request import PENDING, StopRule

ERROR = ErrorInfo(kind="WorkerError", message="out of luck")


class Stops(Plugin):
    """Ends a request at its `stop_at`-th new token."""

    info = PluginInfo(name="stops", summary="", scope="request", lossless=False, claims={"stop_ids"})

    @hookimpl
    def stop_rule(self, request):
        return StopRule(frozenset(request.fields["stop_ids"]))


class Scores(Plugin):
    info = PluginInfo(name="scores", summary="", scope="request", lossless=False, claims={"prompt_logprobs"})

    @hookimpl
    def wants_prompt_logits(self, request):
        return True


class Guesses(Plugin):
    """Proposes nonsense."""

    info = PluginInfo(name="guesses", summary="", scope="request", lossless=True)

    @hookimpl
    def propose_drafts(self, request, most):
        return [5]


class Peeks(Plugin):
    """Notes what hooks see of requests while steps are planned."""

    info = PluginInfo(name="peeks", summary="", scope="request", lossless=True)
    seen: list[tuple[str, int]] = []

    @hookimpl
    def limit_chunk(self, request, wanted, step):
        assert PENDING not in request.tokens
        self.seen.append((request.request_id, request.remaining))
        return min(wanted, 3)


def stopping(h, prompt: int, at: int) -> dict:
    """Fields that end a request after `at` tokens."""
    tokens = [3 + (7 * i + 1 + ord("a")) % 47 for i in range(prompt)]
    return {"stop_ids": [h.solo(tokens, at + 1)[at]]}


def test_the_next_step_counts_on_one_token_each_and_names_none(harness) -> None:
    h = harness(ahead=True, block_size=4)
    h.add("a", 4, max_tokens=5)
    h.add("b", 9, max_tokens=5)
    assert h.plan()
    assert len(h.flights) == 2
    first, second = (order for _, order in h.flights)
    assert (first.num_tokens, first.ahead) == ({"a": 4, "b": 9}, False)
    assert (second.num_tokens, second.ahead) == ({"a": 1, "b": 1}, True)
    assert second.new == []
    assert set(second.new_blocks) == {"a"}, "its fifth token needs a block, and got it before the fourth was known to be run"
    a = h.scheduler.requests["a"]
    assert (a.computed, a.tokens[4:], a.num_output) == (0, [], 0), "nobody sees a guess"
    assert h.scheduler.in_flight is second
    assert h.scheduler.starts(a) == 4
    assert h.scheduler.runs(["a", "b", "gone"]) == {"a": (0, 5), "b": (0, 10)}
    h.run()
    assert h.planned_ahead == 4
    assert h.discarded == 0
    assert {len(tokens) for tokens in h.tokens.values()} == {5}


def test_who_reaches_its_limit_is_left_out_and_its_place_is_given_away(harness) -> None:
    h = harness(ahead=True, max_running=2)
    h.add("a", 3, max_tokens=1)
    h.add("b", 3, max_tokens=2)
    h.add("c", 3, max_tokens=2)
    assert h.plan()
    assert h.flights[1][1].num_tokens == {"b": 1, "c": 3}
    assert h.flights[1][0].running == 2
    h.run()
    assert (h.discarded, len(h.plans)) == (0, 3)
    assert {name: finish.reason for name, finish in h.finished.items()} == dict.fromkeys("abc", "length")


def test_nothing_is_planned_for_those_that_end(harness) -> None:
    h = harness(ahead=True)
    h.add("a", 3, max_tokens=1)
    h.add("b", 5, max_tokens=0)
    assert h.plan()
    assert len(h.flights) == 1
    h.run()
    assert (h.tokens, h.waits) == ({"a": h.tokens["a"]}, {})
    h.add("c", 3, max_tokens=1)
    assert h.step().step_id == 2, "no number was lost"


def test_chunks_go_on_and_hooks_never_see_a_token_that_is_not_there(harness) -> None:
    Peeks.seen.clear()
    h = harness(ahead=True, on=("peeks",), plugins=(Peeks,))
    h.add("a", 8, max_tokens=4)
    h.run()
    assert [plan.num_tokens["a"] for plan in h.plans] == [3, 3, 2, 1, 1, 1]
    assert Peeks.seen == [("a", 8), ("a", 5), ("a", 2)]
    assert h.planned_ahead == 5


@pytest.mark.parametrize("cache", [False, True])
def test_a_stop_token_leaves_one_token_run_in_vain(harness, cache: bool) -> None:
    """Also where the token in vain opens a block of its own, and where others take the blocks at once."""
    for prompt in range(3, 12):
        plain = harness(on=("stops",), plugins=(Stops,))
        fields = stopping(plain, prompt, 2)
        features = ("stops", "prefix_cache") if cache else ("stops",)
        h = harness(ahead=True, on=features, plugins=(Stops,), num_blocks=8, block_size=4)
        for one in (plain, h):
            one.add("a", prompt, max_tokens=9, fields=fields)
            one.run()
        assert h.tokens == plain.tokens
        assert h.finished["a"].stop_token == plain.finished["a"].stop_token is not None
        assert h.discarded == 1
        assert len(h.plans) == len(plain.plans) + 1
        h.add("ab", prompt + 1, max_tokens=20 - prompt)  # its K/V is checked position by position
        h.add("b", prompt, max_tokens=3, fields=fields)
        h.run()


def test_blocks_of_an_ended_request_serve_others_while_it_still_runs_in_vain(harness) -> None:
    h = harness(ahead=True, on=("stops",), plugins=(Stops,), num_blocks=4, block_size=4, max_running=2)
    h.add("a", 8, max_tokens=8, fields=stopping(h, 8, 0))
    h.add("b", 9, max_tokens=4)
    h.step()  # a has ended; a step that runs it once more is in flight, with a block more
    assert h.finished.keys() == {"a"}
    assert "a" in h.flights[0][1].num_tokens
    h.run()
    assert h.tokens["b"] == h.solo([3 + (7 * i + 1 + ord("b")) % 47 for i in range(9)], 4)
    assert h.discarded == 1


def test_a_cancel_between_two_steps_is_counted_and_drops_once(harness) -> None:
    h = harness(ahead=True)
    h.add("a", 4, max_tokens=9)
    h.add("b", 4, max_tokens=9)
    assert h.plan()
    h.scheduler.cancel("a", "cancelled", h.now)
    h.step()
    assert h.finished["a"].reason == "cancelled"
    h.run()
    assert [order.dropped for order in h.inputs if order.dropped] == [["a"]]
    assert h.discarded == 1
    assert "a" not in h.tokens


def test_prompt_logprobs_come_once_and_in_order(harness) -> None:
    got = []
    for ahead in (False, True):
        h = harness(ahead=ahead, on=("scores", "peeks"), plugins=(Scores, Peeks), num_blocks=8, block_size=2)
        h.add("a", 10, max_tokens=3, fields={"prompt_logprobs": 1})
        h.add("bb", 7, max_tokens=6, fields={"prompt_logprobs": 1})
        h.run()
        got.append((h.prompt_logprobs, h.tokens))
        assert (h.planned_ahead > 3) == ahead
    assert got[0] == got[1]


# ---- when it waits ------------------------------------------------------------------------------------------------------------------


def test_requests_that_may_have_drafts_are_waited_for(harness) -> None:
    h = harness(ahead=True, on=("guesses",), plugins=(Guesses,))
    h.add("a", 4, max_tokens=6)
    h.run()
    assert h.planned_ahead == 0
    assert h.waits["drafts"] == len(h.plans) - 1
    h.add("b", 4, max_tokens=6, features=())
    h.run()
    assert h.planned_ahead == 5


def test_who_got_drafts_from_the_worker_is_waited_for_for_a_while(harness) -> None:
    h = harness(ahead=True)
    execute = h.worker.execute

    def proposing(order):
        result = execute(order)
        if order.step_id == 2:
            result.drafts["a"] = Drafts("p", [7])
        return result

    h.worker.execute = proposing
    h.add("a", 4, max_tokens=24)
    h.run()
    waited = [output.report.step_id for output in h.outputs if output.report.waited == "drafts"]
    assert waited[0] == 4, "step 3 was planned before the drafts were known"
    assert 6 <= len(waited) <= 8
    assert h.planned_ahead > 10
    assert not any(order.drafts for order in h.inputs), "drafts behind a token that was not known then are none"
    assert h.tokens["a"] == h.solo(h.inputs[0].new[0].tokens, 24)


def test_nobody_is_preempted_while_a_step_is_in_flight(harness) -> None:
    tokens = []
    for ahead in (False, True):
        h = harness(ahead=ahead, num_blocks=7, block_size=2, max_running=4)
        for name in "abcd":
            h.add(name, 3, max_tokens=8)
        h.run()
        assert sum(len(plan.preempted) for plan in h.plans) > 0
        tokens.append(h.tokens)
        if ahead:
            assert h.waits["blocks"] > 0
            assert h.planned_ahead > 3
    assert tokens[0] == tokens[1]


def test_a_prompt_that_lacks_blocks_is_left_out_and_served_in_the_next_step(harness) -> None:
    left_out = 0
    for blocks, prompt in itertools.product(range(9, 14), (2, 3)):
        settings = {"chunked_prefill": {"mode": "fixed", "chunk_size": 1}}
        h = harness(ahead=True, num_blocks=blocks, block_size=2, on=("chunked_prefill",), settings=settings)
        h.add("a", prompt, max_tokens=15)
        h.add("b", 16, max_tokens=2)
        h.run()
        preempting = next((i for i, plan in enumerate(h.plans) if plan.preempted == ("b",)), 0)
        before = h.plans[preempting - 1]
        left_out += preempting > 0 and h.inputs[preempting - 1].ahead and "b" not in before.num_tokens
        assert h.planned_ahead >= 3
        assert {finish.reason for finish in h.finished.values()} == {"length"}
    assert left_out, "its last step before it gave way went on without it"


def test_an_urgent_request_displaces_once_nothing_is_in_flight(harness) -> None:
    h = harness(ahead=True, on=("scheduling.priority",), max_running=1)
    h.add("a", 4, max_tokens=30, fields={"priority": 1})
    h.step()
    h.add("b", 4, max_tokens=2, fields={"priority": -50})
    h.step()
    h.step()
    assert h.waits == {}
    h.step()
    assert h.plans[-2].preempted == ("a",)
    assert h.waits == {"displacing": 1}
    h.run()
    assert h.finished["a"].preemptions == 1


@pytest.mark.parametrize("policy", ["scheduling.two_phase", "scheduling.static"])
def test_policies_that_compose_steps_wait(harness, policy: str) -> None:
    h = harness(ahead=True, on=(policy,))
    for name in "abc":
        h.add(name, 6, max_tokens=4)
    h.run()
    assert h.planned_ahead == 0
    assert h.waits["policy"] == len(h.plans) - 1


def test_a_step_that_tells_of_switches_or_settings_is_waited_for(harness) -> None:
    h = harness(ahead=True)
    h.add("a", 4, max_tokens=20)
    h.step()
    h.switch(chunked_prefill=True)
    h.step()
    h.step()
    assert h.waits == {"switches": 1}
    h.land()
    h.scheduler.configure(h.config.scheduler, {"chunked_prefill": {"chunk_size": 3}})
    h.step()
    h.step()
    assert h.waits == {"switches": 2}
    h.run()


def test_what_needs_an_engine_at_rest_says_so(harness) -> None:
    h = harness(ahead=True)
    h.add("a", 4, max_tokens=20)
    with pytest.raises(RuntimeError, match="0 steps are in flight"):
        h.scheduler.schedule_ahead(h.now)
    assert h.plan()
    (first, _), (second, _) = h.flights
    with pytest.raises(RuntimeError, match="2 steps are in flight"):
        h.scheduler.schedule_ahead(h.now)
    for call in (
        lambda: h.scheduler.schedule(h.now),
        lambda: h.scheduler.apply_switches(h.switches, h.now),
        lambda: h.scheduler.configure(h.config.scheduler),
    ):
        with pytest.raises(RuntimeError, match=f"step {first.step_id} has neither"):
            call()
    result = h.worker.execute(h.flights[0][1])
    with pytest.raises(RuntimeError, match=f"step {second.step_id} is not the one"):
        h.scheduler.update(second, result, h.now, 0.01)
    h.take(h.scheduler.update(h.flights.popleft()[0], result, h.now, 0.01))
    h.run()


# ---- a step that fails --------------------------------------------------------------------------------------------------------------


def test_of_a_step_behind_a_failed_one_nothing_is_run_and_nobody_else_ends(harness) -> None:
    h = harness(ahead=True, max_running=3)
    h.add("a", 5, max_tokens=6)
    h.add("b", 5, max_tokens=1)
    assert h.plan()
    h.add("c", 3, max_tokens=5)
    h.step()
    assert h.plan()
    assert [order.num_tokens for _, order in h.flights] == [{"a": 1}, {"a": 1, "c": 3}]
    h.fail_step(ERROR)
    assert h.finished["a"].error == ERROR
    h.step()
    assert h.plan()
    assert h.inputs[3].num_tokens == {"c": 3}, "as if it had not been planned"
    assert h.inputs[3].new == [], "the worker has known it since"
    h.run()
    assert h.waits == {"failed": 1}
    assert h.finished["c"].reason == "length"
    assert h.tokens["c"] == h.solo([3 + (7 * i + 1 + ord("c")) % 47 for i in range(3)], 5)
    assert [output.report.num_requests for output in h.outputs[:4]] == [2, 0, 0, 1], "neither counts as a step"


def test_a_request_that_joined_anew_is_not_dropped_for_a_step_that_failed_before(harness) -> None:
    """What a failed step told the worker to forget is told again, but for who is back by then."""
    h = harness(ahead=True)
    for name in ("a", "b", "x"):
        h.add(name, 5, max_tokens=9)
    h.step()
    h.land()
    h.scheduler.batch.preempt(h.scheduler.requests["b"], h.now)
    h.scheduler.cancel("x", "cancelled", h.now)
    h.ahead = False
    h.scheduler.configure(msgspec.structs.replace(h.config.scheduler, max_running=1))
    assert h.plan()
    h.scheduler._builder.configure(h.config.scheduler)
    h.ahead = True
    assert h.plan()
    (_, first), (_, second) = h.flights
    assert (first.num_tokens, first.dropped) == ({"a": 1}, ["b", "x"])
    assert [new.request_id for new in second.new] == ["b"]
    h.fail_step(ERROR)
    h.run()
    assert [order.dropped for order in h.inputs if order.dropped] == [["b", "x"], ["x", "a"]]
    assert h.finished["a"].error == ERROR
    assert h.tokens["b"] == h.solo(h.inputs[0].new[1].tokens, 9)
