"""Workers on a device: the next step is launched before the one before is collected, if it is there in time. Order is kept."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest
from device_fakes import AheadDriver, on_device
from worker_fakes import ALL, Driver, Spec, config, loaded

from tokenbus.core.errors import from_wire
from tokenbus.core.plan import StepInput, StepResult
from tokenbus.core.worker import wire
from tokenbus.core.worker.lane import Begun, Lane
from tokenbus.core.worker.process_main import Server
from tokenbus.core.worker.thread import ThreadWorker

PROMPT = [5, 9, 33, 2, 17]


class Half(Begun[str]):
    """Ends once it is allowed to."""

    def __init__(self, name: str, log: list[str], allowed: threading.Event, error: Exception | None = None) -> None:
        self.name, self.log, self.allowed, self.error = name, log, allowed, error
        log.append(f"{name} begins")

    def ready(self) -> bool:
        return self.allowed.is_set()

    def end(self) -> str:
        assert self.allowed.wait(30)
        self.log.append(f"{self.name} ends")
        if self.error is not None:
            raise self.error
        return self.name


async def _until(there: Callable[[], bool]) -> None:
    while not there():  # noqa: ASYNC110 - another thread says it
        await asyncio.sleep(0)


def open_gate() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


@pytest.mark.anyio
async def test_the_next_begins_before_the_one_before_ends():
    lane, log, gates = Lane("test"), [], [threading.Event() for _ in range(3)]
    calls = [asyncio.ensure_future(lane.call_in_two(lambda i=i: Half(str(i), log, gates[i]))) for i in range(3)]
    await _until(lambda: len(log) == 2)
    assert log == ["0 begins", "1 begins"]
    for gate in gates:
        gate.set()
    assert await asyncio.gather(*calls) == ["0", "1", "2"]
    assert log == ["0 begins", "1 begins", "0 ends", "2 begins", "1 ends", "2 ends"]
    await lane.close()


@pytest.mark.anyio
async def test_whole_calls_wait_for_what_has_begun():
    lane, log = Lane("test"), []
    gate = threading.Event()
    first = asyncio.ensure_future(lane.call_in_two(lambda: Half("first", log, gate)))
    second = asyncio.ensure_future(lane.call(lambda: log.append("second")))
    await _until(lambda: bool(log))
    gate.set()
    await asyncio.gather(first, second)
    assert log == ["first begins", "first ends", "second"]
    await lane.close(lambda: log.append("last"))
    assert log[-1] == "last"


@pytest.mark.anyio
async def test_what_fails_in_either_half_is_its_own():
    lane, log = Lane("test"), []

    def fails() -> Begun[str]:
        raise ValueError("at once")

    calls = [
        lane.call_in_two(lambda: Half("a", log, open_gate(), KeyError("late"))),
        lane.call_in_two(fails),
        lane.call_in_two(lambda: Half("c", log, open_gate())),
    ]
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, KeyError)
    assert isinstance(second, ValueError)
    assert third == "c"
    await lane.close()


def specs() -> list[Spec]:
    return [Spec(f"r{i}", [*PROMPT, i], 7, chunk=2 + i, temperature=0.5 * (i % 2), seed=i) for i in range(4)]


class QueuedDriver(AheadDriver):
    """Sends the next order before the worker has answered the last one."""

    async def run_queued(self, worker: ThreadWorker) -> None:
        flying: list[tuple[asyncio.Future[StepResult], list[tuple[Spec, int]]]] = []
        while self.open or flying:
            if self.open and len(flying) < self.depth:
                order = self.plan()
                flying.append((asyncio.ensure_future(worker.execute(order)), self._count_on(order)))
                continue
            step, expected = flying.pop(0)
            self._know(await step, expected)


@pytest.mark.anyio
async def test_thread_worker_with_orders_queued():
    runner = on_device()
    launched, flying = [], 0
    launch, collect = runner.launch, runner.collect

    def launching(order: StepInput):
        nonlocal flying
        flying += 1
        launched.append(flying)
        return launch(order)

    def collecting(pending):
        nonlocal flying
        flying -= 1
        return collect(pending)

    runner.launch, runner.collect = launching, collecting
    worker = ThreadWorker(config(), ALL, lambda *_: runner)
    info = await worker.load()
    assert info.ahead
    await worker.allocate(512)
    mine = specs()
    await QueuedDriver(mine).run_queued(worker)
    await worker.close()
    plain = specs()
    Driver(plain).run(loaded())
    assert [spec.tokens for spec in mine] == [spec.tokens for spec in plain]
    assert max(launched) == 2, "no step was launched before the one before was collected"


@pytest.mark.parametrize("queued", [1, 2], ids=["one call at a time", "calls in a row"])
def test_child_answers_in_order(queued):
    """The worker process's loop, in a thread: calls that are there already are launched ahead; a failed one is answered in its place."""
    runner, most, flying = on_device(), 0, 0
    launch, collect = runner.launch, runner.collect

    def launching(order: StepInput):
        nonlocal most, flying
        pending = launch(order)
        flying += 1
        most = max(most, flying)
        return pending

    def collecting(pending):
        nonlocal flying
        flying -= 1
        return collect(pending)

    runner.launch, runner.collect = launching, collecting
    ours, theirs = socket.socketpair()
    server = Server(theirs, lambda *_: runner)
    thread = threading.Thread(target=server.serve)
    thread.start()
    with ours, theirs:
        ours.settimeout(60)
        wire.send(ours, wire.Load(wire.VERSION, config(), ALL))
        assert isinstance(wire.receive_answer(ours), wire.Loaded)
        wire.send(ours, wire.Allocate(512))
        assert isinstance(wire.receive_answer(ours), wire.Done)
        mine, answers, sent = specs(), 0, 0
        driver = AheadDriver(mine)
        expected = []
        while driver.open or answers < sent:
            while driver.open and sent - answers < queued:
                order = driver.plan()
                expected.append(driver._count_on(order))
                wire.send(ours, wire.Execute(order))
                sent += 1
            answer = wire.receive_answer(ours)
            assert isinstance(answer, wire.Executed)
            driver._know(answer.result, expected[answers])
            answers += 1
        wire.send(ours, wire.Execute(StepInput(step_id=99, num_tokens={"nobody": 1})))
        wire.send(ours, wire.Execute(StepInput(step_id=100, num_tokens={}, features=("no.such.plugin",))))
        wire.send(ours, wire.Close())
        unknown, failed, closed = (wire.receive_answer(ours) for _ in range(3))
        assert isinstance(unknown, wire.Executed)
        assert "unknown to the worker" in unknown.result.errors["nobody"].message
        assert isinstance(failed, wire.Failed)
        assert "no.such.plugin" in from_wire(failed.error).message
        assert isinstance(closed, wire.Done)
    thread.join(30)
    assert not thread.is_alive()
    plain = specs()
    Driver(plain).run(loaded())
    assert [spec.tokens for spec in mine] == [spec.tokens for spec in plain]
    assert most == queued
