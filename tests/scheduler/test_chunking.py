"""chunked_prefill: the allowance, how it is shared, and that it never changes an answer."""

from __future__ import annotations

import pytest

from tokenbus.core.contexts import StepView
from tokenbus.plugins.chunked_prefill import ChunkedPrefill, ChunkSettings, StepTimes

FIXED = {"chunked_prefill": {"mode": "fixed", "chunk_size": 64}}


def view(**values: int) -> StepView:
    return StepView(**{"step_id": 1, "budget": 2048, "num_decodes": 4, "prompt_tokens": 0, "waiting": 0, **values})


def test_c31_streams_go_on_and_the_short_prompt_overtakes_the_long_one(harness) -> None:
    h = harness(num_blocks=400, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048)
    h.add("a", 20, max_tokens=100)
    for _ in range(3):
        h.step()
    h.add("b", 3000, max_tokens=2)
    for _ in range(3):
        h.step()
    h.add("c", 10, max_tokens=2)
    h.run()
    with_b = [plan for plan in h.plans if "b" in plan.num_tokens]
    assert all(plan.num_tokens["a"] == 1 for plan in with_b), "a emits in every step"
    assert max(plan.num_prompt_tokens for plan in with_b) == 64
    assert len(with_b) >= 3000 // 64
    assert h.first_token_at["c"] - min(p.step_id for p in with_b) <= 5
    assert h.first_token_at["c"] < h.first_token_at["b"]


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_borders_change_nothing(harness, chunk: int) -> None:
    settings = {"chunked_prefill": {"mode": "fixed", "chunk_size": chunk}}
    h = harness(on=("chunked_prefill",), settings=settings)
    prompts = {name: [3 + (i * ord(name)) % 40 for i in range(20 + ord(name) % 7)] for name in "abc"}
    for name, prompt in prompts.items():
        h.add(name, prompt, max_tokens=6)
    h.run()
    for name, prompt in prompts.items():
        assert h.tokens[name] == h.solo(prompt, 6)
    assert max(plan.num_prompt_tokens for plan in h.plans) <= chunk


def test_the_oldest_keeps_a_quarter_whatever_comes(harness) -> None:
    h = harness(num_blocks=800, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048, max_running=64)
    h.add("s", 10, max_tokens=200)
    h.step()
    h.add("long", 1600, max_tokens=1)
    h.step()
    steps = 0
    while "long" in h.scheduler.requests:
        for _ in range(4):
            h.add(f"x{steps}-{_}", 20, max_tokens=1)
        plan = h.step()
        assert plan.num_tokens["long"] >= 16
        steps += 1
    assert steps <= 1600 // 16
    h.run()


def test_among_long_prompts_the_shorter_remainder_is_served_first(harness) -> None:
    h = harness(num_blocks=800, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048)
    h.add("s", 10, max_tokens=100)
    h.step()
    for name, size in (("p", 1000), ("q", 700), ("r", 300)):
        h.add(name, size, max_tokens=1)
    plan = h.step()
    assert plan.num_tokens["p"] == 16, "a quarter; the rest is kept for the shorter ones"
    h.run()
    assert h.first_token_at["r"] < h.first_token_at["q"] < h.first_token_at["p"]


@pytest.mark.parametrize("num_long", [1, 2, 3])
@pytest.mark.parametrize("size", [20, 50])
def test_no_room_is_wasted_and_nobody_starves_while_short_prompts_keep_coming(harness, num_long: int, size: int) -> None:
    """A long prompt at the head of the line must not keep the room from the shorter ones behind it, for whom it is kept."""
    h = harness(num_blocks=4000, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048, max_running=64)
    h.add("s", 10, max_tokens=400)
    h.step()
    for number in range(num_long):
        h.add(f"long{number}", 3900, max_tokens=1)
    used = []
    for step in range(80):
        h.add(f"x{step}", size, max_tokens=1)
        used.append(h.step().num_prompt_tokens)
    assert min(used[2:]) == 64, "the whole allowance is used while prompts have work"
    waits = [h.first_token_at[f"x{step}"] - step for step in range(60) if f"x{step}" in h.first_token_at]
    assert len(waits) >= 0.8 * 60 * min(1.0, 48 / size)
    h.run()
    assert all(f"long{number}" in h.first_token_at for number in range(num_long))


def test_a_lone_prompt_gets_the_whole_allowance_also_while_others_cannot_run(harness) -> None:
    h = harness(num_blocks=800, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048, max_running=2)
    h.add("s", 10, max_tokens=100)
    h.step()
    h.add("long", 1000, max_tokens=1)
    for number in range(5):
        h.add(f"w{number}", 10, max_tokens=1)
    h.step()
    plans = [h.step() for _ in range(5)]
    assert [plan.num_tokens["long"] for plan in plans] == [64] * 5, "nothing is kept for those that the full batch keeps out"
    h.run()


def test_adaptive_allowance_follows_measured_times() -> None:
    plugin = ChunkedPrefill(ChunkSettings(slow_down=3.0), "engine")
    assert plugin.allowance(view(num_decodes=0)) == 2048
    assert plugin.allowance(view()) == 128, "nothing is known yet"
    plugin.times.learn(4, 0, 0.025)
    plugin.times.learn(1, 100, 0.080)
    assert plugin.allowance(view()) == 62, "2 * 25 ms at 0.8 ms a token"
    for _ in range(50):
        plugin.times.learn(5, 62, 0.025 + 62 * 0.0016)
    assert plugin.allowance(view()) == pytest.approx(31, abs=1), "prompts became twice as slow"
    for _ in range(50):
        plugin.times.learn(4, 0, 0.0001)
    assert plugin.allowance(view()) == 16, "never below min_chunk"


def test_a_step_of_more_decodes_than_were_seen_takes_longer() -> None:
    """While prompts run in every step, no step tells how long the grown batch would take without them."""
    times = StepTimes()
    for count in [1, 2, 3, 4] * 30:
        times.learn(count, 0, 0.008 + 0.0005 * count)
    assert times.decode_step(16) == pytest.approx(0.016, rel=0.1)
    assert times.decode_step(1000) == pytest.approx(2 * times.decode_step(2.5), rel=0.1), "no farther than twice what was seen"
    assert times.decode_step(1) == pytest.approx(0.0085, rel=0.1)
    flat = StepTimes()
    for _ in range(50):
        flat.learn(1, 0, 0.010)
    assert 0.010 < flat.decode_step(8) <= 0.020
    flat.learn(33, 100, 0.015)
    assert flat.prompt_token >= 0.4 * 0.015 / 100


def test_times_are_smoothed() -> None:
    times = StepTimes()
    times.learn(2, 0, 1.0)
    times.learn(2, 0, 2.0)
    assert times.decode_step(2) == pytest.approx(1.2)
    assert times.prompt_token is None


def test_adaptive_steps_stay_near_what_they_may_take(harness) -> None:
    h = harness(num_blocks=800, block_size=16, on=("chunked_prefill",), token_budget=2048)

    def step() -> float:
        """A machine on which a step takes 20 ms and each prompt token 0.5 ms more."""
        planned = h.scheduler.schedule(h.now)
        plan, order = planned
        seconds = 0.020 + 0.0005 * plan.num_prompt_tokens
        h.take(h.scheduler.update(plan, h.worker.execute(order), h.now, seconds))
        return seconds

    h.add("a", 10, max_tokens=300)
    for _ in range(10):
        step()
    h.add("b", 3000, max_tokens=2)
    times = []
    while "b" in h.scheduler.requests:
        times.append(step())
    assert max(times[10:]) <= 1.1 * 3.6 * 0.020
    assert sum(times) / len(times) > 0.7 * 3.6 * 0.020, "and use what they may"
    h.run()


def test_switched_on_live_it_keeps_no_room_for_requests_that_decode(harness) -> None:
    h = harness(num_blocks=400, block_size=16, on=("chunked_prefill",), settings=FIXED, token_budget=2048)
    plugin = h.plugin("chunked_prefill")
    h.add("a", 20, max_tokens=50)
    h.step()
    request = h.scheduler.requests["a"]
    plugin._asked.clear()
    plugin.request_added(request)
    assert plugin._asked == {}
    h.run()


def test_switched_off_for_one_request(harness) -> None:
    h = harness(num_blocks=100, on=("chunked_prefill",), settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 8}})
    h.add("a", 40, max_tokens=1, features=(), pinned={"chunked_prefill": False})
    h.add("b", 40, max_tokens=1)
    h.run()
    chunks = {name: [plan.num_tokens[name] for plan in h.plans if name in plan.num_tokens] for name in "ab"}
    assert chunks["a"] == [40]
    assert max(chunks["b"]) <= 8
    assert h.plugin("chunked_prefill").chunks >= 4
