"""Journal, stream and vitals by themselves."""

from __future__ import annotations

import anyio
import pytest
from engine_harness import request

from tokenbus.core.config import SupervisionConfig
from tokenbus.core.errors import DeadlineError
from tokenbus.core.front.journal import Journal
from tokenbus.core.front.stream import TokenStream, failed
from tokenbus.core.front.supervisor import Death, Vitals, death_error, startup_error
from tokenbus.core.messages import Finish, Heartbeat, Reply, StepOutput
from tokenbus.core.plan import TokenLogprobs


def test_the_journal_knows_where_every_open_request_stands():
    journal = Journal()
    a, b = request("a", [1, 2], features=("x",)), request("b", [3], features=("x", "y"))
    journal.admit([a, b])
    journal.emit("a", [7, 8])
    journal.emit("a", [9])
    assert [(entry.admitted, entry.tokens) for entry in journal] == [(a, [7, 8, 9]), (b, [])]
    assert journal.features_in_use() == {"x", "y"}
    ended = journal.end("a")
    assert ended is not None
    assert ended.tokens == [7, 8, 9]
    assert journal.end("a") is None
    assert ("a" in journal, "b" in journal, len(journal)) == (False, True, 1)
    with pytest.raises(KeyError):
        journal.emit("a", [1])


def test_the_journal_admits_all_or_none():
    journal = Journal()
    journal.admit([request("a")])
    for doubled in ([request("b"), request("a")], [request("c"), request("c")]):
        with pytest.raises(ValueError, match="in use"):
            journal.admit(doubled)
    assert len(journal) == 1


def stream() -> tuple[TokenStream, list[tuple[str, str]]]:
    cancelled: list[tuple[str, str]] = []
    return TokenStream("r", lambda request_id, reason: cancelled.append((request_id, reason))), cancelled


@pytest.mark.anyio
async def test_a_slow_reader_gets_fewer_longer_chunks_in_order():
    s, _ = stream()
    entry = [TokenLogprobs(1, -0.5, 1)]
    s.push([], None, entry)
    s.push([1], entry, None)
    s.push([2, 3], entry * 2, None)
    chunk = await anext(s)
    assert (chunk.tokens, chunk.logprobs, chunk.prompt_logprobs) == ([1, 2, 3], entry * 3, entry)
    s.push([4], None, None)
    s.end(Finish(reason="length"))
    assert [c.tokens async for c in s] == [[4]]
    assert [c.tokens async for c in s] == []
    assert s.finish == Finish(reason="length")


@pytest.mark.anyio
async def test_a_stream_ends_once_and_an_error_comes_after_the_tokens():
    s, cancelled = stream()
    s.push([1], None, None)
    s.end(failed(DeadlineError("too late", request_id="r")))
    with pytest.raises(RuntimeError, match="ended twice"):
        s.end(Finish(reason="stop"))
    assert (await anext(s)).tokens == [1]
    with pytest.raises(DeadlineError, match="too late"):
        await anext(s)
    s.cancel()
    assert cancelled == []


@pytest.mark.anyio
async def test_a_waiting_reader_wakes():
    s, cancelled = stream()
    got: list[int] = []

    async def read() -> None:
        with s:
            async for chunk in s:
                got.extend(chunk.tokens)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        s.push([1], None, None)
        await anyio.wait_all_tasks_blocked()
        assert got == [1]
        tasks.cancel_scope.cancel()
    assert cancelled == [("r", "cancelled")]


def test_vitals_count_only_time_in_which_the_front_was_awake():
    vitals = Vitals(SupervisionConfig(heartbeat_deadline=3, step_deadline=5, start_deadline=100))
    vitals.tick(3600)  # the front was stopped for an hour
    assert vitals.silence == 1.0
    for _ in range(2):
        vitals.tick(1)
    assert vitals.verdict() is None
    vitals.tick(0.5)
    assert vitals.verdict() == "no sign of life for 3 s (supervision.heartbeat_deadline)"
    assert vitals.doubt() is not None
    vitals.heard(Reply(1))
    assert vitals.verdict() is vitals.doubt() is None


def test_a_step_ages_between_heartbeats_until_its_output_comes():
    vitals = Vitals(SupervisionConfig(step_deadline=5))
    vitals.heard(Heartbeat(1, 4.5, 0.0))
    assert vitals.verdict() is None
    assert vitals.doubt() == "the engine's current step has taken 4.5 s"
    vitals.tick(0.6)
    assert vitals.verdict() == "a step took longer than 5 s (supervision.step_deadline)"
    vitals.heard(StepOutput(step_id=1))
    assert vitals.verdict() is vitals.doubt() is None


def test_what_a_death_means_for_whom():
    death = Death("the engine process was killed by SIGKILL", was_ready=True)
    assert death_error(death, 0).message.endswith("while this request was open: the engine process was killed by SIGKILL")
    assert "open, and 3 attempts to start another one failed: the engine process" in death_error(death, 3).message
    assert startup_error(death).message == "the engine can't be started: the engine process was killed by SIGKILL"
    assert not death.permanent
