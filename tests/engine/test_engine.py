from __future__ import annotations

import time

import anyio
import msgspec
import pytest
from engine_fakes import BREAK, EOS, FAIL_STEP, WORKER_DIES, FakeWorker, following
from engine_harness import engine, request

from tokenbus.core.config import SchedulerConfig
from tokenbus.core.errors import EngineDiedError, FieldError, NotFoundError, StepMemoryError
from tokenbus.core.messages import Cancel, Failed, Heartbeat, Query, Shutdown
from tokenbus.core.plan import StepInput, StepPlan, StepResult

pytestmark = pytest.mark.anyio


class Gate:
    """Stops the worker in each step until the test lets it go on."""

    def __init__(self) -> None:
        self.entered = anyio.Event()
        self.go = anyio.Event()

    async def __call__(self, _order: StepInput) -> None:
        self.entered.set()
        await self.go.wait()

    async def step(self) -> None:
        """Let the step that waits run; the next one will wait again."""
        self.entered, go, self.go = anyio.Event(), self.go, anyio.Event()
        go.set()


async def test_requests_run_to_their_end_with_their_own_tokens():
    async with engine() as e:
        await e.add(request("a", [1, 2, 3], 5), request("b", [50], 2), request("c", [898], 9))
        await e.until_finished("a", "b", "c")
        assert e.tokens == {"a": following([3], 5), "b": [51, 52], "c": [899]}
        assert [e.finished[r].reason for r in "abc"] == ["length", "length", "stop"]
        assert e.finished["c"].stop_token == EOS
        assert sorted(e.ends) == ["a", "b", "c"]


async def test_every_step_is_told_on_the_bus_and_kept_as_a_plan():
    async with engine(scheduler=SchedulerConfig(plan_history=2)) as e:
        told: list[StepPlan | StepResult] = []
        e.core.bus.listen(told.append, StepPlan, StepResult)
        await e.add(request("a", [1, 2, 3], 3))
        await e.until_finished("a")
        assert [type(event) for event in told] == [StepPlan, StepResult] * 3
        assert [plan.num_tokens for plan in told if isinstance(plan, StepPlan)] == [{"a": 3}, {"a": 1}, {"a": 1}]
        plans = (await e.query("plans"))["plans"]
        assert [plan["num_tokens"] for plan in plans] == [{"a": 1}, {"a": 1}]  # the history's bound
        assert {"step_id", "num_tokens", "budget", "free_blocks", "preempted"} <= plans[0].keys()
        assert (await e.query("plans", last=1))["plans"] == plans[1:]
        assert (await e.query("plans", last=0))["plans"] == []
        assert len(e.outputs) == 3  # one message a step
        assert all(output.report is not None for output in e.outputs)


async def test_wrong_questions_are_answered_with_an_error():
    async with engine() as e:
        with pytest.raises(NotFoundError, match="answers: plans, integrity, stats"):
            await e.query("weather")
        with pytest.raises(FieldError, match="last"):
            await e.query("plans", last="all")
        assert await e.query("integrity") == {"ok": True, "problem": ""}


async def test_requests_join_the_line_while_a_step_computes_and_changes_wait_for_its_end():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate)) as e:
        await e.add(request("a", max_tokens=100))
        await gate.entered.wait()
        await e.add(request("b", max_tokens=100))
        await e.channel.send(Cancel(["a"]))
        await e.add(request("c", max_tokens=100))
        await e.arrived(2)
        assert list(e.core.scheduler.requests) == ["a", "b"]  # the cancel waits, and what came after it
        assert e.core.scheduler.num_waiting == 1
        await gate.step()
        await gate.entered.wait()
        assert e.worker.orders[1].num_tokens == {"b": 3, "c": 3}
        assert e.worker.orders[1].dropped == ["a"]
        await e.channel.send(Cancel(["b", "c"]))
        await e.arrived(1)
        await gate.step()
        await e.until_finished("a", "b", "c")
        assert [e.finished[r].reason for r in "abc"] == ["cancelled"] * 3
        assert len(e.worker.orders) == 2


async def test_a_steps_output_goes_out_while_the_next_one_computes_and_ahead_of_any_answer():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate)) as e:
        await e.add(request("a", max_tokens=3))
        for held in (1, 2):
            await gate.entered.wait()
            assert len(e.worker.orders) == held
            await e.until(lambda held=held: len(e.tokens.get("a", ())) == held - 1)
            await e.channel.send(Query(held, "stats", {}))
            await e.arrived(1)
            await gate.step()
            await e.until(lambda held=held: len(e.others) == held)
            assert e.tokens["a"] == following([30], held)
        await gate.entered.wait()
        await gate.step()
        await e.until_finished("a")
        assert len(e.outputs) == 3


async def test_cancel_at_every_stage_frees_everything():
    gate = Gate()
    limits = SchedulerConfig(max_running=1, token_budget=4)
    async with engine(worker=FakeWorker(before=gate), scheduler=limits) as e:
        start = await e.query("stats")
        for stage in ("waiting", "prefill", "decode"):
            mine, other = f"{stage}-mine", f"{stage}-other"
            if stage == "waiting":
                await e.add(request(other, max_tokens=100), request(mine, max_tokens=100))
                await gate.entered.wait()
            else:
                await e.add(request(mine, max_tokens=100))
                await gate.entered.wait()
                if stage == "decode":
                    await gate.step()
                    await gate.entered.wait()
            assert e.core.scheduler.num_waiting == (1 if stage == "waiting" else 0)
            await e.channel.send(Cancel([mine, other, "unknown"]))
            await e.arrived(1)
            await gate.step()
            await e.until_finished(mine)
            after = await e.query("stats")
            assert {**after, "step_id": 0} == {**start, "step_id": 0}, stage
            assert await e.query("integrity") == {"ok": True, "problem": ""}
        assert sorted(e.ends) == ["decode-mine", "prefill-mine", "waiting-mine", "waiting-other"]


async def test_200_cancel_cycles_return_to_the_start():
    async with engine(num_blocks=16) as e:
        start = await e.query("stats")
        for i in range(200):
            await e.add(request(f"r{i}", max_tokens=50))
            if i % 2:
                await e.until(lambda name=f"r{i}": name in e.tokens)
            await e.channel.send(Cancel([f"r{i}", f"r{i}"]))
            await e.until_finished(f"r{i}")
        end = await e.query("stats")
        assert {**end, "step_id": 0} == {**start, "step_id": 0}
        assert e.ends == [f"r{i}" for i in range(200)]
        await e.add(request("normal"))
        await e.until_finished("normal")
        assert e.tokens["normal"] == following([30], 3)


async def test_a_deadline_ends_a_request_while_nothing_else_happens():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), scheduler=SchedulerConfig(max_running=1)) as e:
        deadline = time.time() + 0.5
        await e.add(request("a", deadline=deadline, arrival=time.time()))
        await gate.entered.wait()
        await e.add(request("b", max_tokens=1))
        await gate.step()
        await gate.entered.wait()
        await anyio.sleep(max(0.0, deadline + 0.01 - time.time()))
        gate.go.set()
        gate.go = anyio.Event()
        gate.go.set()
        await e.until_finished("a", "b")
        error = e.finished["a"].error
        assert error is not None
        assert error.kind == "DeadlineError"
        assert e.finished["b"].reason == "length"


async def test_a_failed_step_ends_its_requests_and_the_loop_goes_on():
    async with engine() as e:
        await e.add(request("bad", [FAIL_STEP, 1]), request("with-it", [5]))
        await e.until_finished("bad", "with-it")
        for request_id in ("bad", "with-it"):
            error = e.finished[request_id].error
            assert error is not None
            assert (error.kind, error.message) == ("WorkerError", "the fake step failed")
        await e.add(request("next", [7], 2))
        await e.until_finished("next")
        assert e.tokens == {"next": [8, 9]}
        assert (await e.query("stats"))["free_blocks"] == 64
        assert await e.query("integrity") == {"ok": True, "problem": ""}


@pytest.mark.parametrize(
    ("token", "error", "words"),
    [(WORKER_DIES, EngineDiedError, "worker process 1 ended with signal 9"), (BREAK, RuntimeError, "RuntimeError: a bug")],
)
async def test_an_error_of_the_engine_itself_is_told_and_ends_it(token: int, error: type[Exception], words: str):
    async with engine(expect=error) as e:
        await e.add(request("bad", [token, 1]))
        failed = await e.receive()
        assert isinstance(failed, Failed)
        assert words in failed.error.message
        assert e.finished == {}


async def test_the_engine_stops_when_the_front_closes_its_end():
    async with engine(shutdown=False) as e:
        await e.query("stats")
        e.channel.close()
    assert e.worker.closed


async def test_shutdown_stops_after_the_current_step():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate), shutdown=False) as e:
        await e.add(request("a", max_tokens=100))
        await gate.entered.wait()
        await e.channel.send(Shutdown())
        await e.arrived(1)
        gate.go.set()
    assert len(e.worker.orders) == 1
    assert e.worker.closed


async def test_heartbeats_tell_the_age_of_a_step_that_computes():
    gate = Gate()
    async with engine(worker=FakeWorker(before=gate)) as e:
        await e.add(request("a", max_tokens=1))
        await gate.entered.wait()
        beats = [message async for message in _beats(e.channel, 2)]
        assert beats[-1].step_age > 0.5
        assert beats[-1].step_id == e.worker.orders[0].step_id
        assert beats[-1].cpu_seconds > 0
        gate.go.set()


async def _beats(channel, count: int):
    """Heartbeats, the last of which was sent at least a second after the first."""
    seen = 0
    while seen < count:
        message = await channel.receive()
        if isinstance(message, Heartbeat):
            seen += 1
            yield message


class Tight(FakeWorker):
    """Has memory for steps of `most` tokens."""

    most = 6

    async def execute(self, order: StepInput) -> StepResult:
        if sum(order.num_tokens.values()) > self.most:
            self._run(msgspec.structs.replace(order, num_tokens={}))
            raise StepMemoryError(f"there is no memory for a step of {sum(order.num_tokens.values())} tokens")
        return await super().execute(order)


async def test_a_device_without_memory_gets_smaller_steps():
    """No request ends for it, but one that can't run alone."""
    async with engine(worker=Tight()) as e:
        prompts = {name: [30 * i + 1, 30 * i + 2] for i, name in enumerate("abcdefgh")}
        await e.add(*(request(name, prompt, 7) for name, prompt in prompts.items()), request("long", [1] * 7, 2))
        await e.until_finished(*prompts, "long")
        assert e.tokens == {name: following(prompt, 7) for name, prompt in prompts.items()}
        assert e.finished["long"].error.kind == "StepMemoryError"
        assert (
            "a request can't run, not even alone: there is no memory for a step of 7 tokens" in e.finished["long"].error.message
        )
        assert max(sum(order.num_tokens.values()) for order in e.worker.orders) <= Tight.most
        assert (await e.query("integrity"))["ok"]
        assert (await e.query("stats"))["free_blocks"] == 64
