"""The real engine process with a tiny random Llama: worker as a thread and as a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
from engine_harness import request
from test_client import alive, read

from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.front.client import EngineClient
from tokenbus.core.host import make_host

pytestmark = pytest.mark.anyio


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] + [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if task.name != str(pid)
        for child in (task / "children").read_text().split()
    ]


ANSWERS: dict[str, list[list[int]]] = {}


@pytest.mark.parametrize("worker", ["thread", "process"])
async def test_a_real_engine_answers_dies_and_answers_the_same(tiny_llama: Path, worker: str):
    config = from_mapping(
        {
            "model": {"model": str(tiny_llama), "worker": worker, "threads": 1},
            "cache": {"num_blocks": 64},
            "supervision": {"restart_backoff": 0.05},
        },
        "test",
    )
    host = make_host("front", config)
    switches = host.start_switches()
    client = EngineClient(config, Bus(), host, switches)

    def ask(name: str):
        return client.submit(
            [
                request(f"{name}{i}", [1, 3 + i, 5], 40, features=switches.names(), temperature=float(i % 2), seed=7)
                for i in range(4)
            ]
        )

    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: client.run(task_status=task_status))
        try:
            info = await client.wait_ready()
            assert (info.architecture, info.dtype, info.num_blocks, info.max_model_len) == (
                "LlamaForCausalLM",
                "float32",
                64,
                512,
            )
            first = [await read(stream) for stream in ask("a")]
            victim = info.pid
            if worker == "process":
                (victim,) = children_of(info.pid)
            whole = await read(client.submit([request("whole", [1, 9], 500, features=switches.names())])[0])
            (survivor,) = client.submit([request("survivor", [1, 9], 500, features=switches.names())])
            begun = (await anext(survivor)).tokens
            os.kill(victim, signal.SIGKILL)
            assert begun + await read(survivor) == whole
            assert survivor.resumptions == 1
            assert not alive(info.pid)
            assert not alive(victim)
            assert [await read(stream) for stream in ask("b")] == first
            assert (await client.query("stats"))["open"] == 0
            assert await client.query("integrity") == {"ok": True, "problem": ""}
        finally:
            with anyio.CancelScope(shield=True):
                await client.close()
    ANSWERS[worker] = first
    assert all(answers == first for answers in ANSWERS.values())
