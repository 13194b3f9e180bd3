"""Two orders at a time: they run in order, and what counts on a step that failed does not run."""

from __future__ import annotations

import asyncio
import os
import signal

import msgspec
import pytest
from test_workers import PROMPT, make
from worker_fakes import ALL, config, make_runner

from tokenbus.core.errors import EngineDiedError, WorkerError
from tokenbus.core.plan import StepInput, WorkerRequest
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.core.worker.thread import ThreadWorker
from tokenbus.core.worker.turns import Turns

pytestmark = pytest.mark.anyio

ROUNDS = 12


def joining(name: str, first_block: int = 0) -> WorkerRequest:
    return WorkerRequest(
        request_id=name, tokens=PROMPT, num_prompt_tokens=len(PROMPT), num_computed=0, blocks=list(range(first_block, first_block + 5)),
        temperature=1.0, seed=3, choice=0, features=ALL, fields={},
    )  # fmt: skip


def order(step_id: int, *, ahead: bool = False, count: int = 1, names: str = "a", **values) -> StepInput:
    return StepInput(step_id=step_id, num_tokens=dict.fromkeys(names, count), ahead=ahead, **values)


def orders() -> list[StepInput]:
    first = order(1, count=len(PROMPT), new=[joining("a")])
    return [first, *(order(step_id, ahead=True) for step_id in range(2, ROUNDS + 1))]


@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_orders_sent_ahead_give_what_those_sent_one_by_one_give(kind: str):
    results = []
    for ahead in (False, True):
        worker = make(kind)
        await worker.load()
        await worker.allocate(64)
        if ahead:  # all are sent before the first one has run
            steps = [asyncio.ensure_future(worker.execute(one)) for one in orders()]
            found = await asyncio.gather(*steps)
        else:
            found = [await worker.execute(one) for one in orders()]
        assert [result.step_id for result in found] == list(range(1, ROUNDS + 1))
        results.append([result.sampled["a"] for result in found])
        assert found[0].phases["idle"] == 0.0
        assert all(result.phases["idle"] > 0 for result in found[1:])
        await worker.close()
    assert results[0] == results[1]


def failing_at(*steps: int) -> ModelRunner:
    runner = make_runner(config(), ALL)
    run = runner.run

    def fails(given: StepInput):
        if given.step_id in steps:
            run(msgspec.structs.replace(given, num_tokens={}))
            raise WorkerError(f"step {given.step_id} fails")
        return run(given)

    runner.run = fails
    return runner


def turns_of(runner: ModelRunner) -> Turns:
    runner.load()
    runner.allocate(64)
    return Turns(runner)


def test_a_step_that_counts_on_a_failed_one_takes_over_requests_and_runs_nothing():
    plain = turns_of(make_runner(config(), ALL))
    wanted = [plain.run(one).sampled for one in (order(1, count=5, names="b", new=[joining("b")]), order(2, names="b"))]
    turns = turns_of(failing_at(1))
    with pytest.raises(WorkerError, match="step 1"):
        turns.run(order(1, count=len(PROMPT), new=[joining("a", 10)]))
    both = StepInput(step_id=2, num_tokens={"a": 1, "b": 5}, new=[joining("b")], ahead=True)
    result = turns.run(both)
    assert (result.void, result.sampled, result.errors) == (True, {}, {})
    result = turns.run(order(3, names="b", count=5, dropped=["a"]))
    assert (result.void, result.sampled) == (False, wanted[0])
    assert turns.run(order(4, names="b", ahead=True)).sampled == wanted[1]


def test_a_step_that_counts_on_nothing_runs_after_a_failed_one():
    turns = turns_of(failing_at(1, 2))
    for step_id in (1, 2):
        with pytest.raises(WorkerError, match=f"step {step_id}"):
            turns.run(order(step_id, count=len(PROMPT), names="x", new=[joining("x")]))
    result = turns.run(order(3, count=len(PROMPT), new=[joining("a", 10)]))
    assert not result.void
    assert len(result.sampled["a"]) == 1


async def test_a_thread_worker_fails_one_order_and_voids_the_next():
    worker = ThreadWorker(config(), ALL, lambda *_: failing_at(1))
    await worker.load()
    await worker.allocate(64)
    steps = [asyncio.ensure_future(worker.execute(one)) for one in orders()[:2]]
    with pytest.raises(WorkerError, match="step 1"):
        await steps[0]
    assert (await steps[1]).void
    await worker.close()


async def test_every_call_to_a_process_that_dies_says_so():
    worker = make("process")
    await worker.load()
    await worker.allocate(64)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    steps = [asyncio.ensure_future(worker.execute(one)) for one in orders()[:2]]
    await asyncio.sleep(0)
    os.kill(worker.pid, signal.SIGKILL)
    for step in steps:
        with pytest.raises(EngineDiedError, match="signal 9"):
            await step
    await worker.close()
