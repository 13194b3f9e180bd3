"""What shares a step: two_phase and static beside unified, and what core makes of a policy that answers nonsense."""

from __future__ import annotations

import pytest

from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.policy import FcfsPolicy, OrderedPolicy, Work

TWO_PHASE, STATIC = ("scheduling.two_phase",), ("scheduling.static",)
NO_PADDING = {"scheduling.static": {"pad": False}}


def kinds(h) -> str:
    """One letter a step: p(rompts only), d(ecodes only) or m(ixed)."""
    return "".join(
        "p" if plan.num_prompt_tokens == sum(plan.num_tokens.values()) else "m" if plan.num_prompt_tokens else "d"
        for plan in h.plans
    )


def lengths(h) -> list[int]:
    return [len(plan.num_tokens) for plan in h.plans]


def play(h) -> None:
    """Two streams, and two prompts that come while these decode."""
    h.add("a", 6, max_tokens=8)
    h.add("b", 5, max_tokens=4)
    for _ in range(2):
        h.step()
    h.add("c", 40, max_tokens=3)
    h.add("d", 3, max_tokens=3)
    h.run()


def test_unified_mixes_and_two_phase_never_does(harness) -> None:
    unified = harness(on=("scheduling.unified", "chunked_prefill"), token_budget=16)
    play(unified)
    assert "m" in kinds(unified)
    two = harness(on=(*TWO_PHASE, "chunked_prefill"), token_budget=16)
    play(two)
    assert "m" not in kinds(two)
    assert kinds(two).startswith("pdppp"), "the prompt of 40 takes three steps of 16, in which nobody decodes"
    assert two.tokens == unified.tokens
    assert {name: len(tokens) for name, tokens in two.tokens.items()} == {"a": 8, "b": 4, "c": 3, "d": 3}


def test_two_phase_goes_on_decoding_when_nobody_can_join(harness) -> None:
    h = harness(on=TWO_PHASE, max_running=2)
    for name in "abc":
        h.add(name, 4, max_tokens=3)
    h.run()
    assert kinds(h) == "pddpdd"
    assert h.first_token_at["c"] == 4


def test_two_phase_gives_way_when_blocks_run_out(harness) -> None:
    h = harness(on=TWO_PHASE, num_blocks=8, block_size=4)
    for name in "abcd":
        h.add(name, 6, max_tokens=14)
    h.run()
    assert sum(finish.preemptions for finish in h.finished.values()) > 0
    assert {name: len(tokens) for name, tokens in h.tokens.items()} == dict.fromkeys("abcd", 14)


def test_static_lets_nobody_join_until_all_have_finished(harness) -> None:
    h = harness(on=STATIC, settings=NO_PADDING)
    play(h)
    assert "m" not in kinds(h)
    assert h.first_token_at["c"] == h.first_token_at["d"]
    last = max(step for step, plan in enumerate(h.plans, 1) if "a" in plan.num_tokens)
    assert h.first_token_at["c"] == last + 1
    assert lengths(h) == [2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2]


def test_a_batch_whose_prompts_need_several_steps_is_open_until_it_decodes(harness) -> None:
    h = harness(on=(*STATIC, "chunked_prefill"), token_budget=16, settings=NO_PADDING)
    h.add("a", 30, max_tokens=3)
    h.step()
    h.add("b", 10, max_tokens=2)
    h.run()
    assert kinds(h) == "pppdd"
    assert h.plans[-2].num_tokens == {"a": 1, "b": 1}


def test_static_admits_only_whom_it_has_room_for_to_the_end(harness) -> None:
    """Four requests of 4 + 12 tokens in 32: two at a time, and nobody is ever preempted."""
    h = harness(on=STATIC, num_blocks=8, block_size=4, settings=NO_PADDING)
    for name in "abcd":
        h.add(name, 4, max_tokens=12)
    h.run()
    assert max(lengths(h)) == 2
    assert [h.finished[name].preemptions for name in "abcd"] == [0] * 4
    freely = harness(on=("scheduling.unified",), num_blocks=8, block_size=4)
    for name in "abcd":
        freely.add(name, 4, max_tokens=12)
    freely.run()
    assert max(lengths(freely)) > 2
    assert freely.tokens == h.tokens


def test_static_reserves_what_it_is_told_to(harness) -> None:
    h = harness(on=STATIC, num_blocks=16, block_size=4, settings={"scheduling.static": {"reserve_tokens": 32, "pad": False}})
    for name in "abcd":
        h.add(name, 4, max_tokens=2)
    h.run()
    assert max(lengths(h)) == 2


def test_a_request_larger_than_the_pool_still_runs(harness) -> None:
    h = harness(on=STATIC, num_blocks=8, block_size=4, settings={"scheduling.static": {"reserve_tokens": 1000}})
    for name in "ab":
        h.add(name, 4, max_tokens=3)
    h.run()
    assert lengths(h) == [1, 1, 1] * 2


def test_static_pads_the_rows_of_those_that_have_finished(harness) -> None:
    h = harness(on=STATIC)
    for name, count in (("a", 12), ("b", 2), ("c", 4), ("d", 4)):
        h.add(name, 4, max_tokens=count)
    h.run()
    padded = [sum(plan.num_tokens.values()) for plan in h.plans]
    assert padded[0] == 16
    decodes = [size for size, plan in zip(padded, h.plans, strict=True) if not plan.num_prompt_tokens]
    assert decodes[:8] == [4] * 8, "four rows, however many have finished"
    assert decodes[-1] < 4, "a draft behind the end of an answer is none"
    assert h.plans[-3].num_draft_tokens > 0
    plain = harness(on=("scheduling.unified",))
    for name, count in (("a", 12), ("b", 2), ("c", 4), ("d", 4)):
        plain.add(name, 4, max_tokens=count)
    plain.run()
    assert h.tokens == plain.tokens


def test_live_swaps_between_them_lose_nobody(harness) -> None:
    h = harness(on=("scheduling.unified", "chunked_prefill"), token_budget=16, num_blocks=20)
    names = [f"r{i}" for i in range(12)]
    order = ["two_phase", "static", "unified", "static", "two_phase", "unified"]
    for i, name in enumerate(names):
        h.add(name, 3 + 5 * (i % 4), max_tokens=4 + i % 5)
        h.switch(**{f"scheduling__{order[i % len(order)]}": True})
        h.step()
    h.run()
    assert {name: finish.reason for name, finish in h.finished.items()} == dict.fromkeys(names, "length")
    for name in names:
        prompt = next(new.tokens[: new.num_prompt_tokens] for order in h.inputs for new in order.new if new.request_id == name)
        assert h.tokens[name] == h.solo(prompt, len(h.tokens[name]))


class OddPolicy(FcfsPolicy):
    answer: object = ()
    room: object = 0

    def compose(self, running, now):
        return self.answer

    def reserve(self, request):
        return self.room


class NewestFirst(OrderedPolicy):
    """Fails once it is asked for room."""

    def rank(self, request):
        return -request.arrival

    def victim(self, running, now):
        return running[0]

    def reserve(self, request):
        raise RuntimeError("no room today")


class Newest(Plugin):
    info = PluginInfo(name="newest", summary="", scope="step", lossless=True, slot="scheduling")

    @hookimpl
    def scheduling_policy(self):
        return NewestFirst()


def test_a_policy_may_fail_while_somebody_joins(harness) -> None:
    """Core's has another order, so the head that was looked at is no longer the head."""
    h = harness(on=("newest",), plugins=(Newest,))
    for name in "abcd":
        h.add(name, 6, max_tokens=4)
        h.now += 1.0
    h.run()
    assert [owner for owner, _ in h.failures] == ["newest"]
    assert {name: len(tokens) for name, tokens in h.tokens.items()} == dict.fromkeys("abcd", 4)


class Odd(Plugin):
    info = PluginInfo(name="odd", summary="", scope="step", lossless=True, slot="scheduling")

    @hookimpl
    def scheduling_policy(self):
        return OddPolicy()


@pytest.mark.parametrize("answer", [(Work.JOINING,), [Work.PROMPTS], (Work.DECODES,), (Work.DECODES, Work.PROMPTS)])
def test_a_policy_that_wants_too_little_still_gets_on(harness, monkeypatch, answer) -> None:
    """No plan is empty while there is work: core tries everything when the policy's wishes come to nothing."""
    monkeypatch.setattr(OddPolicy, "answer", answer)
    h = harness(on=("odd",), plugins=(Odd,))
    play(h)
    assert h.failures == []
    assert sorted(h.finished) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("answer", wrong) for wrong in (5, ("decodes",), (Work(0),), None)),
        *(("room", wrong) for wrong in (-1, 2.5, None, True)),
    ],
)
def test_a_policy_that_answers_nonsense_is_replaced(harness, monkeypatch, name, value) -> None:
    h = harness(on=("odd",), plugins=(Odd,))
    h.add("z", 6, max_tokens=4)
    h.step()
    monkeypatch.setattr(OddPolicy, name, value)
    play(h)
    assert [owner for owner, _ in h.failures] == ["odd"]
    assert sorted(h.finished) == ["a", "b", "c", "d", "z"]
