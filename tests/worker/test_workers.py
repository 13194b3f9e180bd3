from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from worker_fakes import ALL, SAMPLING, Driver, Spec, config, make_runner

from tokenbus.core.errors import EngineDiedError, ModelError, WorkerError
from tokenbus.core.worker import wire
from tokenbus.core.worker.make import make_worker
from tokenbus.core.worker.process import ProcessWorker
from tokenbus.core.worker.thread import ThreadWorker

CHILD = (sys.executable, str(Path(__file__).with_name("fake_child.py")))
PROMPT = [5, 9, 33, 2, 17]


def make(kind: str):
    if kind == "thread":
        return ThreadWorker(config(), ALL, make_runner)
    return ProcessWorker(config(), ALL, CHILD)


def specs() -> list[Spec]:
    options = {"temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1, "frequency_penalty": 0.5}
    return [Spec(f"r{i}", [*PROMPT, i], 6, chunk=1 + i, **(options if i % 2 else {})) for i in range(6)]


@pytest.mark.anyio
async def test_thread_and_process_give_the_same():
    results = []
    for kind in ("thread", "process"):
        worker, mine = make(kind), specs()
        info = await worker.load()
        assert (info.model, info.eos_token_ids) == ("fake", (0,))
        await worker.allocate(128)
        driver = Driver(mine)
        await driver.run_async(worker)
        assert driver.results[0].phases["cpu"] > 0
        await worker.close()
        await worker.close()
        with pytest.raises(WorkerError, match="closed"):
            await worker.execute(driver.plan())
        results.append([(s.output, s.logprobs, s.prompt_logprobs, s.error) for s in mine])
    assert results[0] == results[1]
    assert all(len(output) == 6 for output, *_ in results[0])


@pytest.mark.anyio
async def test_loop_stays_free_while_a_step_computes():
    entered, go_on = threading.Event(), threading.Event()

    def factory(settings, features):
        runner = make_runner(settings, features)
        run = runner.run

        def slow(order):
            entered.set()
            assert go_on.wait(30)
            return run(order)

        runner.run = slow
        return runner

    worker = ThreadWorker(config(), ALL, factory)
    await worker.load()
    await worker.allocate(16)
    driver = Driver([Spec("a", PROMPT, 1)])
    step = asyncio.create_task(worker.execute(driver.plan()))
    await asyncio.to_thread(entered.wait, 30)
    assert not step.done()
    go_on.set()
    assert len((await step).sampled["a"]) == 1
    await worker.close()


@pytest.mark.anyio
async def test_death_of_the_process_is_noticed():
    worker = make("process")
    await worker.load()
    await worker.allocate(16)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="signal 9"):
        await worker.execute(Driver([Spec("a", PROMPT, 1)]).plan())
    await worker.close()


@pytest.mark.anyio
async def test_child_that_cannot_start_is_noticed():
    worker = ProcessWorker(config(), ALL, (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(EngineDiedError, match="exit status 7"):
        await worker.load()
    await worker.close()


@pytest.mark.timeout(60)
def test_child_ends_when_the_parent_is_gone():
    """The parent is killed; the child's end is seen as the end of a pipe that only the child still holds."""
    program = (
        "import asyncio, sys, os\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from worker_fakes import ALL, config\n"
        "from tokenbus.core.worker.process import ProcessWorker\n"
        f"worker = ProcessWorker(config(), ALL, {CHILD!r})\n"
        "asyncio.run(worker.load())\n"
        "print(worker.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) > 0
        parent.kill()
        assert parent.stdout.read() == ""


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["thread", "process"])
async def test_a_model_that_is_not_there(kind, tmp_path):
    settings = config(model={"model": str(tmp_path / "none"), "worker": kind})
    worker = make_worker(settings, ())
    with pytest.raises(ModelError, match="none"):
        await worker.load()
    await worker.close()


@pytest.mark.anyio
async def test_close_before_load():
    for kind in ("thread", "process"):
        worker = make(kind)
        await worker.close()
        with pytest.raises((WorkerError, RuntimeError)):
            await worker.load()


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory) -> Path:
    import torch
    import transformers

    torch.manual_seed(1)
    settings = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(settings).save_pretrained(folder)
    return folder


@pytest.mark.anyio
async def test_a_real_model_with_the_real_child(tiny_llama):
    """The same tokens and logprobs from thread and process, and from a batch whose requests are cut and preempted otherwise."""
    results = []
    for kind in ("thread", "process"):
        worker = make_worker(config(model={"model": str(tiny_llama), "worker": kind, "threads": 2}), SAMPLING)
        info = await worker.load()
        assert (info.architecture, info.eos_token_ids, info.lossless) == ("LlamaForCausalLM", (0,), True)
        await worker.allocate(256)
        mine = [
            Spec(s.name, s.prompt * 3, 6, chunk=s.chunk, features=SAMPLING, temperature=s.temperature, seed=s.seed, **s.fields)
            for s in specs()
        ]
        if kind == "process":
            for i, spec in enumerate(mine):
                spec.chunk, spec.preempt_at = 3, i
        await Driver(mine).run_async(worker)
        await worker.close()
        results.append([(s.output, s.logprobs, s.prompt_logprobs, s.error) for s in mine])
    assert results[0] == results[1]
    assert all(len(output) == 6 for output, *_ in results[0])


def test_making_a_worker_imports_no_torch():
    program = (
        "import sys\n"
        "from tokenbus.core.config import Config\n"
        "from tokenbus.core.worker.make import make_worker\n"
        "make_worker(Config(), ())\n"
        "import tokenbus.core.worker.process, tokenbus.core.worker.process_main\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys(), 'heavy'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wire_refuses_what_it_does_not_know():
    import socket

    import msgspec

    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(ours, wire.Done())
        with pytest.raises(msgspec.ValidationError):
            wire.receive_call(theirs)
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(EOFError, match="limit"):
            wire.receive_call(theirs)
