"""Plans, ends and messages of the scheduler, step by step."""

from __future__ import annotations

import pytest

from tokenbus.core.errors import ErrorInfo


def test_one_request_runs_its_prompt_then_one_token_a_step(harness) -> None:
    h = harness()
    h.add("a", 10, max_tokens=3)
    h.run()
    assert [plan.num_tokens for plan in h.plans] == [{"a": 10}, {"a": 1}, {"a": 1}]
    assert [plan.num_prompt_tokens for plan in h.plans] == [10, 0, 0]
    assert h.tokens["a"] == h.solo(h.inputs[0].new[0].tokens, 3)
    assert h.finished["a"].reason == "length"
    assert len(h.inputs[0].new[0].blocks) == 3
    assert h.inputs[1].new == []
    assert h.inputs[1].new_blocks == {}


def test_blocks_are_taken_only_as_tokens_need_them(harness) -> None:
    h = harness(block_size=4)
    h.add("a", 7, max_tokens=7)
    held = []
    while h.step() is not None:
        held.append(len(h.scheduler.requests["a"].blocks) if "a" in h.scheduler.requests else None)
    # the K/V of 7, 8, 9, ... tokens
    assert held == [2, 2, 3, 3, 3, 3, None]


def test_decodes_come_first_then_running_prompts_then_new_ones(harness) -> None:
    h = harness(on=("chunked_prefill",), settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 8}}, token_budget=16)
    h.add("a", 4, max_tokens=20)
    h.step()
    h.add("b", 20, max_tokens=2)
    h.step()
    h.add("c", 20, max_tokens=2)
    plan = h.step()
    assert plan is not None
    assert list(plan.num_tokens) == ["a", "b"]
    assert plan.num_tokens == {"a": 1, "b": 8}
    h.run()
    assert {name: h.finished[name].reason for name in "abc"} == dict.fromkeys("abc", "length")


def test_without_chunking_a_prompt_runs_whole_even_past_the_budget_but_only_one(harness) -> None:
    h = harness(token_budget=16, num_blocks=200)
    h.add("a", 40, max_tokens=1)
    h.add("b", 40, max_tokens=1)
    assert h.step().num_tokens == {"a": 40}
    assert h.step().num_tokens == {"b": 40}
    h.run()


def test_short_prompts_share_a_step_up_to_the_budget(harness) -> None:
    h = harness(token_budget=16)
    for name in "abcd":
        h.add(name, 6, max_tokens=1)
    assert h.step().num_tokens == {"a": 6, "b": 6}


def test_max_running_is_upheld_and_never_above_the_budget(harness) -> None:
    h = harness(token_budget=3, max_running=100)
    for name in "abcdef":
        h.add(name, 1, max_tokens=5)
    h.run()
    assert max(plan.running for plan in h.plans) == 3
    assert max(len(plan.num_tokens) for plan in h.plans) == 3


def test_scoring_only_gives_no_tokens_and_ends_with_length(harness) -> None:
    h = harness()
    h.add("a", 9, max_tokens=0)
    h.run()
    assert "a" not in h.tokens
    assert h.finished["a"].reason == "length"
    assert len(h.plans) == 1
    assert not any(output.tokens for output in h.outputs)


def test_end_token_ends_the_request_and_is_not_shown(harness) -> None:
    h = harness()
    h.add("a", 5, max_tokens=10)
    expected = h.solo(h.scheduler.requests["a"].tokens, 10)
    stop = expected[4]
    h.scheduler.requests["a"].stop_ids = frozenset({stop})
    h.run()
    assert h.tokens["a"] == expected[: expected.index(stop)]
    assert (h.finished["a"].reason, h.finished["a"].stop_token) == ("stop", stop)


def test_stop_ids_wait_for_the_minimum_length(harness) -> None:
    h = harness()
    h.add("a", 5, max_tokens=10)
    request = h.scheduler.requests["a"]
    expected = h.solo(request.tokens, 10)
    request.stop_ids = frozenset(expected)
    request.stop_min_len = request.num_prompt + 3
    h.run()
    assert h.tokens["a"] == expected[:3]
    assert h.finished["a"].stop_token == expected[3]


def test_cancel_while_waiting_running_and_between_schedule_and_update(harness) -> None:
    h = harness(max_running=2)
    for name in "abc":
        h.add(name, 6, max_tokens=8)
    h.step()
    h.scheduler.cancel("c", "cancelled", h.now)
    h.scheduler.cancel("a", "stop", h.now)
    h.scheduler.cancel("nobody", "cancelled", h.now)
    plan, order = h.scheduler.schedule(h.now)
    result = h.worker.execute(order)
    h.scheduler.cancel("b", "cancelled", h.now)
    output = h.scheduler.update(plan, result, h.now, 0.01)
    assert result.sampled.keys() == {"b"}
    assert output.tokens == {}
    assert {name: finish.reason for name, finish in output.finished.items()} == {
        "a": "stop",
        "b": "cancelled",
        "c": "cancelled",
    }
    assert h.pool.num_available == h.pool.num_blocks
    assert not h.scheduler.has_work()
    h.add("d", 3, max_tokens=1)
    h.step()
    assert h.worker.known.keys() == {"d"}, "the worker was told to forget the others"


def test_a_cancel_while_idle_is_flushed(harness) -> None:
    h = harness()
    assert h.scheduler.flush(h.now) is None
    h.add("a", 6)
    h.scheduler.cancel("a", "cancelled", h.now)
    assert not h.scheduler.has_work()
    assert h.scheduler.schedule(h.now) is None
    output = h.scheduler.flush(h.now)
    assert output.finished["a"].reason == "cancelled"
    assert h.scheduler.flush(h.now) is None


def test_deadlines_end_requests_in_order(harness) -> None:
    h = harness(max_running=1)
    h.add("a", 5, max_tokens=100, deadline=1010.0)
    h.add("b", 5, max_tokens=100, deadline=1005.0)
    h.add("c", 5, max_tokens=2)
    assert h.scheduler.next_deadline() == 1005.0
    h.step()
    h.scheduler.expire(1004.9)
    assert len(h.scheduler.requests) == 3
    h.scheduler.expire(1005.0)
    assert h.scheduler.requests.keys() == {"a", "c"}
    assert h.scheduler.next_deadline() == 1010.0
    h.scheduler.cancel("a", "deadline", 1006.0)
    assert h.scheduler.next_deadline() is None
    h.run()
    for name in "ab":
        assert h.finished[name].error.kind == "DeadlineError"
        assert h.finished[name].error.request_id == name
    assert "1 tokens" in h.finished["a"].error.message
    assert h.finished["c"].reason == "length"


def test_deadlines_of_ended_requests_do_not_pile_up(harness) -> None:
    h = harness()
    for number in range(500):
        h.add(f"r{number}", 2, max_tokens=1, deadline=9999.0)
        h.run()
    assert len(h.scheduler._intake._deadlines) < 100


def test_an_error_of_one_request_leaves_the_others_alone(harness) -> None:
    h = harness()
    h.add("a", 5, max_tokens=3)
    h.add("b", 5, max_tokens=3)
    h.step()
    h.worker.fail["a"] = ErrorInfo(kind="PluginError", message="no", plugin="p", hook="adjust_logits")
    h.run()
    assert h.finished["a"].error.plugin == "p"
    assert len(h.tokens["a"]) == 1
    assert h.finished["b"].reason == "length"


def test_a_failed_step_ends_its_requests_and_repeats_what_the_worker_missed(harness) -> None:
    h = harness(on=("chunked_prefill",), max_running=2)
    for name in "abc":
        h.add(name, 5, max_tokens=5)
    h.step()
    h.scheduler.cancel("a", "cancelled", h.now)
    h.switch(chunked_prefill=False)
    plan, order = h.scheduler.schedule(h.now)
    assert order.dropped == ["a"]
    assert order.features == ()
    h.take(h.scheduler.fail_step(plan, ErrorInfo(kind="WorkerError", message="out of luck"), h.now))
    assert {n: f.reason for n, f in h.finished.items()} == {"a": "cancelled", "b": "error", "c": "error"}
    assert h.finished["b"].error.message == "out of luck"
    assert h.pool.num_available == h.pool.num_blocks
    h.add("d", 3, max_tokens=1)
    _, order = h.scheduler.schedule(h.now)
    assert sorted(order.dropped) == ["a", "b", "c"]
    assert order.features == ()


def test_a_second_schedule_before_the_update_is_refused(harness) -> None:
    h = harness()
    h.add("a", 5)
    h.scheduler.schedule(h.now)
    with pytest.raises(RuntimeError, match="neither been updated nor failed"):
        h.scheduler.schedule(h.now)


def test_reports_add_up(harness) -> None:
    h = harness()
    h.add("a", 10, max_tokens=3)
    h.step()
    h.add("b", 1, max_tokens=2)
    h.run()
    reports = [output.report for output in h.outputs if output.report is not None]
    assert sum(report.prompt_tokens for report in reports) == 11
    assert sum(report.decode_tokens for report in reports) == 2 + 1
    assert [report.step_id for report in reports] == [1, 2, 3]
    assert reports[-1].running == reports[-1].waiting == 0
    assert reports[-1].free_blocks == reports[-1].num_blocks == 64
    assert reports[0].duration == 0.01
    assert reports[0].started == 1000.0


def test_ends_without_a_step_report_how_things_stand(harness) -> None:
    """Gauges would go on showing what the last step saw."""
    h = harness()
    h.add("a", 10, max_tokens=3)
    h.step()
    assert h.outputs[-1].report.running == 1
    h.scheduler.cancel("a", "cancelled", h.now)
    output = h.scheduler.flush(h.now)
    assert output is not None
    assert output.finished.keys() == {"a"}
    assert (output.report.num_requests, output.report.running, output.report.free_blocks) == (0, 0, 64)
    assert h.scheduler.flush(h.now) is None


@pytest.mark.parametrize(("prompt", "limit"), [(100, 64), (64, 64)])
def test_c27_what_can_never_fit_is_refused_with_the_real_limit(harness, prompt: int, limit: int) -> None:
    h = harness(num_blocks=16, block_size=4, max_model_len=512)
    h.add("a", prompt, max_tokens=10)
    h.add("b", 10, max_tokens=3)
    h.run()
    assert h.finished["a"].error.kind == "ContextLengthError"
    assert str(limit) in h.finished["a"].error.message
    assert h.finished["b"].reason == "length"
    assert len(h.tokens["b"]) == 3


def test_c27_growth_to_the_pools_end_ends_with_length(harness) -> None:
    h = harness(num_blocks=16, block_size=4, max_model_len=512)
    h.add("a", 60, max_tokens=32)
    h.add("b", 10, max_tokens=3)
    h.run()
    assert h.finished["a"].reason == h.finished["b"].reason == "length"
    assert len(h.tokens["a"]) == 4
    assert len(h.tokens["b"]) == 3


def test_kv_waste_is_below_four_percent(harness) -> None:
    h = harness(num_blocks=4000, block_size=16, max_running=64, token_budget=100_000)
    for number in range(64):
        h.add(f"r{number}", 200 + number * 800 // 64, max_tokens=20)
    shares = []
    while h.step() is not None:
        requests = h.scheduler.requests.values()
        allocated = sum(request.capacity for request in requests)
        if allocated:
            shares.append((allocated - sum(request.computed for request in requests)) / allocated)
    assert len(shares) >= 19
    assert sum(shares) / len(shares) < 0.04
