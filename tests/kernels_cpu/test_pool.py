from __future__ import annotations

import ctypes
import multiprocessing
import threading
from collections import Counter

import pytest
import torch

from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear


def run(library, tasks, body):
    """tb_run with a Python function; exceptions of any worker are raised here."""
    failed = []

    def guarded(_, index, worker):
        try:
            body(index, worker)
        except Exception as error:
            failed.append(error)

    library.c.tb_run(tasks, lib.TASK(guarded), None)
    if failed:
        raise failed[0]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("tasks", [0, 1, 2, 4, 5, 100])
def test_every_task_runs_once(count, tasks, library, threads):
    threads(count)
    seen = []
    run(library, tasks, lambda index, worker: seen.append((index, worker)))
    assert sorted(index for index, _ in seen) == list(range(tasks))
    assert all(0 <= worker < count for _, worker in seen)
    if tasks <= count:
        assert all(index == worker for index, worker in seen)


def test_the_caller_is_worker_0_and_others_are_not(library, threads):
    threads(3)
    who = {}
    run(library, 3, lambda index, worker: who.setdefault(worker, threading.get_ident()))
    assert who[0] == threading.get_ident()
    assert len(set(who.values())) == 3


def test_a_barrier_holds_everybody(library, threads):
    threads(4)
    reached = Counter()
    lock = threading.Lock()

    def body(index, worker):
        for phase in range(50):
            with lock:
                reached[phase] += 1
            library.c.tb_barrier()
            assert reached[phase] == 4

    run(library, 4, body)
    assert reached == dict.fromkeys(range(50), 4)


def test_a_stage_is_over_without_those_that_come_late(library, threads):
    threads(3)
    library.declare({name: ([ctypes.c_uint], ctypes.c_int) for name in ("tb_stage_done", "tb_stage_wait", "tb_stage_over")})
    late, order = threading.Event(), []

    def body(index, worker):
        if index == 0:  # does both stages alone
            for stage in (1, 2):
                assert not library.c.tb_stage_over(stage)
                order.append(stage)
                library.c.tb_stage_done(stage)
            late.set()
        elif index == 1:  # waits for the second
            library.c.tb_stage_wait(2)
            assert order == [1, 2]
        else:  # held up until all is over
            assert late.wait(30)
            assert library.c.tb_stage_over(1)
            library.c.tb_stage_wait(1)
            library.c.tb_stage_wait(2)

    for _ in range(20):
        order.clear()
        late.clear()
        run(library, 3, body)  # stages count anew


def test_sleeping_workers_wake(library, threads):
    """Without any spinning every wait goes through the kernel's sleep."""
    threads(4)
    library.c.tb_set_spin(0)
    try:
        done = Counter()
        for _ in range(300):
            run(library, 4, lambda index, worker: (done.update([index]), library.c.tb_barrier()))
        assert done == dict.fromkeys(range(4), 300)
    finally:
        library.c.tb_set_spin(50)


def test_a_run_within_a_task_stays_on_its_worker(library, threads):
    threads(2)
    seen = []

    def outer(index, _):
        me = threading.get_ident()
        run(library, 3, lambda inner, worker: seen.append((index, inner, worker, threading.get_ident() == me)))

    run(library, 2, outer)
    assert sorted(seen) == [(i, j, 0, True) for i in range(2) for j in range(3)]


def test_callers_take_turns(library, threads):
    threads(2)
    x, weight = torch.randn(40, 64), torch.randn(96, 64)
    layer = CpuLinear(weight)
    want, wrong = layer(x), []

    def caller():
        wrong.extend(i for i in range(200) if not torch.equal(layer(x), want))

    callers = [threading.Thread(target=caller) for _ in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


def _after_fork(library, results):
    seen = set()
    run(library, 3, lambda index, worker: seen.add(worker))
    results.send(sorted(seen))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(library, threads):
    threads(3)
    run(library, 3, lambda index, worker: None)
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_after_fork, args=(library, theirs), daemon=True)
    child.start()
    assert ours.poll(30)
    assert ours.recv() == [0, 1, 2]
    child.join(30)
    assert child.exitcode == 0
    run(library, 3, lambda index, worker: None)


def test_thread_counts(library, threads):
    for count in (1, 3, 2):
        threads(count)
        assert lib.threads() == count
    with pytest.raises(ValueError, match="at least one"):
        threads(0)
    library.c.tb_set_threads(100000)
    assert lib.threads() == 256
