"""The client against real engine processes whose worker is a fake (engine_fakes.py): life, death, and everything in between."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import engine_fakes
import pytest
from engine_fakes import BLOCK_LOOP, BREAK, CRASH, FAIL_STEP, HANG, following
from engine_harness import request

from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.errors import (
    EngineDiedError,
    ModelError,
    OverloadedError,
    RequestError,
    StartupError,
    UnavailableError,
    WorkerError,
)
from tokenbus.core.front.client import EngineClient, TokenStream
from tokenbus.core.front.events import EngineDied, EngineStarted, LoopLag
from tokenbus.core.host import Switches, make_host
from tokenbus.core.media import MediaItem
from tokenbus.core.messages import StepReport

pytestmark = pytest.mark.anyio

COMMAND = (sys.executable, "-P", str(Path(engine_fakes.__file__)))


def settings(kind: str = "fake", **sections: dict[str, Any]) -> Config:
    base = {"model": {"model": kind}, "cache": {"num_blocks": 64, "block_size": 4}, "supervision": {"restart_backoff": 0.05}}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return from_mapping(base, "test")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def client(config: Config | None = None, *, on: tuple[str, ...] = (), wait: bool = True) -> AsyncIterator[EngineClient]:
    config = config or settings()
    c = EngineClient(config, Bus(), make_host("front", config), Switches(frozenset(on)), command=COMMAND)
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: c.run(task_status=task_status))
        pids: list[int] = []
        c.bus.listen(lambda event: pids.append(event.info.pid), EngineStarted)
        try:
            if wait:
                await c.wait_ready()
            yield c
        finally:
            with anyio.CancelScope(shield=True):
                await c.close()
        assert c.state == "stopped"
        assert not [pid for pid in pids if alive(pid)]


def ignored(pid: int) -> int:
    """Signals that a process ignores, a bit each."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)


async def read(stream: TokenStream) -> list[int]:
    return [token async for chunk in stream for token in chunk.tokens]


async def first_token(stream: TokenStream) -> None:
    assert (await anext(stream)).tokens


async def test_requests_are_answered_and_steps_reported():
    async with client() as c:
        reports: list[StepReport] = []
        c.bus.listen(reports.append, StepReport)
        a, b = c.submit([request("a", [1, 2, 3], 20), request("b", [7], 5)])
        assert await read(a) == following([3], 20)
        assert await read(b) == following([7], 5)
        assert a.finish is not None
        assert a.finish.reason == "length"
        assert c.ready() == (True, "ok")
        assert c.open_requests == len(c.journal) == 0
        assert len(reports) == 20
        info = c.info
        assert info is not None
        assert (info.model, info.max_model_len, info.num_blocks) == ("fake", 256, 64)
        assert list(info.phases) == ["process", "plugins", "model", "kv", "model.imports", "model.weights"]
        stats = await c.query("stats")
        assert (stats["open"], stats["free_blocks"]) == (0, 64)
        assert len((await c.query("plans", last=3))["plans"]) == 3


async def test_the_engine_has_a_group_in_our_session_and_minds_no_terminal():
    """In another session its share of the CPU would not depend on the priorities in ours; Ctrl-C and `stty tostop` are not for it."""
    async with client() as c:
        pid = c.engine_pid
        assert pid is not None
        assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)
        assert all(ignored(pid) >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTTOU))


async def test_a_cancelled_stream_ends_once_and_frees_its_blocks():
    async with client() as c:
        (stream,) = c.submit([request("a", max_tokens=200)])
        await first_token(stream)
        stream.cancel()
        stream.cancel()
        await read(stream)
        assert stream.finish is not None
        assert stream.finish.reason == "cancelled"
        stream.cancel()
        assert (await c.query("stats"))["free_blocks"] == 64
        with c.submit([request("b", max_tokens=200)])[0] as left_early:
            await first_token(left_early)
        await read(left_early)
        assert left_early.finish is not None


async def test_killed_mid_stream_the_streams_go_on():
    async with client() as c:
        deaths: list[EngineDied] = []
        c.bus.listen(deaths.append, EngineDied)
        streams = c.submit([request("a", max_tokens=200), request("b", max_tokens=200)])
        begun = [(await anext(stream)).tokens for stream in streams]
        assert c.engine_pid is not None
        os.kill(c.engine_pid, signal.SIGKILL)
        await until(lambda: c.state == "restarting")
        assert c.ready() == (False, "the engine died and is being restarted")
        with pytest.raises(UnavailableError, match="being restarted") as refused:
            c.submit([request("c")])
        assert refused.value.retry_after is not None
        assert refused.value.retry_after >= 1
        with pytest.raises(UnavailableError):
            await c.query("stats")
        for stream, tokens in zip(streams, begun, strict=True):
            assert tokens + await read(stream) == following([30], 200)
            assert stream.resumptions == 1
            assert stream.finish is not None
            assert stream.finish.reason == "length"
        assert c.restarts == 1
        assert await read(c.submit([request("a", [5], 3)])[0]) == [6, 7, 8]
        assert [(death.open_requests, death.restart_in, death.ended_requests) for death in deaths] == [(2, 0.05, 0)]


async def test_a_picture_that_kills_engines_while_it_is_encoded_ends_its_request_alone():
    def picture(digest: str) -> dict[str, tuple[MediaItem, ...]]:
        return {"media": (MediaItem(kind="image", digest=digest, start=0, length=2),)}

    async with client(settings("encodes")) as c:
        good = c.submit([request("a", max_tokens=150), request("b", max_tokens=150, **picture("harmless"))])
        begun = [(await anext(stream)).tokens for stream in good]
        (bad,) = c.submit([request("bad", **picture("deadly"))])
        with pytest.raises(EngineDiedError, match="died twice at the same position while it ran this request alone"):
            await read(bad)
        for stream, tokens in zip(good, begun, strict=True):
            assert tokens + await read(stream) == following([30], 150)
        assert 2 <= c.restarts <= 4


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - conditions of many kinds
        await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("token", "limits", "words"),
    [
        (HANG, {"step_deadline": 1.0}, "a step took longer than 1 s"),
        (BLOCK_LOOP, {"heartbeat_deadline": 2.0}, "no sign of life for 2 s"),
        (CRASH, {}, "exited with code 3"),
    ],
)
async def test_a_stuck_or_crashing_step_is_a_death(token: int, limits: dict[str, float], words: str):
    async with client(settings(supervision=limits)) as c:
        pid = c.engine_pid
        assert pid is not None
        (stream,) = c.submit([request("bad", [token])])
        with pytest.raises(
            EngineDiedError, match=f"died twice at the same position while it ran this request alone: .*{words}"
        ):
            await read(stream)
        assert c._supervisor.starts == 2
        assert not alive(pid)
        await until(lambda: c.ready()[0])
        assert await read(c.submit([request("good", [5], 3)])[0]) == [6, 7, 8]


async def test_a_failed_step_is_no_death():
    async with client() as c:
        with pytest.raises(WorkerError, match="the fake step failed"):
            await read(c.submit([request("bad", [FAIL_STEP])])[0])
        assert c.restarts == 0
        assert await read(c.submit([request("good", [5], 3)])[0]) == [6, 7, 8]


async def test_a_model_that_cant_be_run_is_not_tried_again():
    async with client(settings("wrong"), wait=False) as c:
        with pytest.raises(ModelError, match="this model can't be run: it is a fake"):
            await c.wait_ready()
        assert c._supervisor.starts == 1
        with pytest.raises(UnavailableError):
            c.submit([request("a")])


@pytest.mark.parametrize(
    ("kind", "words", "starts"), [("crash", "exited with code 9", 3), ("bug", "ZeroDivisionError: at load", 1)]
)
async def test_a_first_start_that_fails_for_no_stated_reason_is_tried_three_times(kind: str, words: str, starts: int):
    async with client(settings(kind), wait=False) as c:
        with pytest.raises(StartupError, match=words):
            await c.wait_ready()
        assert c._supervisor.starts == starts


async def test_a_process_that_cant_be_made_is_a_death_too():
    config = settings()
    c = EngineClient(config, Bus(), make_host("front", config), Switches(frozenset()), command=("/nonexistent/engine",))
    await c.run()
    with pytest.raises(StartupError, match="can't start a process"):
        await c.wait_ready()
    assert c.state == "stopped"


async def test_a_start_that_takes_too_long_is_given_up():
    async with client(settings("stuck", supervision={"start_deadline": 3.0}), wait=False) as c:
        with pytest.raises(StartupError, match=r"not ready after 3 s, in phase 'model'"):
            await c.wait_ready()
        assert c._supervisor.starts == 1


async def test_max_model_len_beyond_the_models_is_refused():
    async with client(settings(model={"max_model_len": 10**7}), wait=False) as c:
        with pytest.raises(StartupError, match="the model takes 1000000 tokens"):
            await c.wait_ready()


async def test_closing_while_it_starts_leaves_no_process():
    async with client(settings("stuck"), wait=False) as c:
        await until(lambda: c.engine_pid is not None)
        pid = c.engine_pid
        assert pid is not None
        with pytest.raises(UnavailableError, match="starting"):
            c.submit([request("a")])
        began = time.monotonic()
        await c.close()
        assert time.monotonic() - began < 2
        assert not alive(pid)
        with pytest.raises(UnavailableError):
            await c.wait_ready()


async def test_overload_is_refused_all_or_none():
    async with client(settings(scheduler={"max_running": 1, "max_waiting": 2})) as c:
        streams = c.submit([request("a", max_tokens=200), request("b", max_tokens=200)])
        with pytest.raises(OverloadedError, match="queue is full") as refused:
            c.submit([request("c"), request("d")])
        assert refused.value.retry_after == 1.0
        with pytest.raises(RequestError, match="4 choices"):
            c.submit([request(f"x{i}") for i in range(4)])
        assert c.open_requests == 2
        streams += c.submit([request("e", [1], 2)])
        with pytest.raises(OverloadedError):
            c.submit([request("f")])
        for stream in streams[:2]:
            stream.cancel()
        assert await read(streams[2]) == [2, 3]


async def test_draining_lets_open_requests_finish_and_refuses_new_ones():
    async with client() as c:
        (stream,) = c.submit([request("a", [1], 50)])
        await first_token(stream)
        c.begin_drain()
        with pytest.raises(UnavailableError, match="shutting down"):
            c.submit([request("b")])
        assert not c.ready()[0]
        assert (await c.query("stats"))["open"] == 1
        assert await c.drain(10)
        assert stream.finish is not None
        assert stream.finish.reason == "length"


async def test_the_drain_limit_ends_what_is_still_open():
    async with client(settings("slow")) as c:
        (stream,) = c.submit([request("a", max_tokens=250)])
        await first_token(stream)
        assert not await c.drain(0.1)
        with pytest.raises(UnavailableError, match="shutting down"):
            await read(stream)


async def test_close_ends_open_streams():
    async with client(settings("slow")) as c:
        (stream,) = c.submit([request("a", max_tokens=250)])
        await first_token(stream)
        await c.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await read(stream)


async def test_cancelling_run_leaves_no_process():
    config = settings("slow")
    c = EngineClient(config, Bus(), make_host("front", config), Switches(frozenset()), command=COMMAND)
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: c.run(task_status=task_status))
        pid = (await c.wait_ready()).pid
        (stream,) = c.submit([request("a", max_tokens=250)])
        await first_token(stream)
        tasks.cancel_scope.cancel()
    assert not alive(pid)
    with pytest.raises(UnavailableError):
        await read(stream)


async def test_lag_of_both_event_loops_is_told():
    async with client() as c:
        seen: set[str] = set()
        c.bus.listen(lambda event: seen.add(event.process), LoopLag)
        await until(lambda: seen == {"front", "engine"})


async def test_many_streams_at_once_each_end_once():
    async with client(settings(cache={"num_blocks": 40, "block_size": 4})) as c:  # too small for all: some are preempted
        streams = c.submit([request(f"r{i}", [i + 1], 20 + i) for i in range(24)])
        results: dict[str, list[int]] = {}

        async def follow(index: int, stream: TokenStream) -> None:
            if index % 5 == 4:
                await first_token(stream)
                stream.cancel()
            results[stream.request_id] = await read(stream)

        async with anyio.create_task_group() as tasks:
            for index, stream in enumerate(streams):
                tasks.start_soon(follow, index, stream)
        for i in range(24):
            if i % 5 != 4:
                assert results[f"r{i}"] == following([i + 1], 20 + i)
        stats = await c.query("stats")
        assert (stats["open"], stats["free_blocks"]) == (0, 40)
        assert await c.query("integrity") == {"ok": True, "problem": ""}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_nothing_grows_with_the_requests_served():
    async with client(settings("zero", scheduler={"plan_history": 8}, cache={"num_blocks": 4000})) as c:
        pids = [os.getpid(), c.engine_pid]

        async def serve(rounds: int, name: str) -> list[int]:
            for i in range(rounds):
                streams = c.submit([request(f"{name}{i}-{k}", [1], 1 + k % 3) for k in range(100)])
                for k, stream in enumerate(streams):
                    if k % 10 == 0:
                        stream.cancel()
                    await read(stream)
            return [resident_bytes(pid) for pid in pids if pid is not None]

        before = await serve(10, "warm")
        after = await serve(50, "more")
        assert len(c.journal) == c.open_requests == 0
        for was, now in zip(before, after, strict=True):
            assert now - was < 6 * 2**20  # 5000 requests: 1 kB each at most
        stats = await c.query("stats")
        assert (stats["open"], stats["free_blocks"]) == (0, 4000)


async def test_an_engine_that_gives_up_says_why():
    async with client() as c:
        (stream,) = c.submit([request("bad", [BREAK])])
        with pytest.raises(EngineDiedError, match=r"died twice .*: the engine gave up: RuntimeError: a bug"):
            await read(stream)
        await until(lambda: c.ready()[0])


async def test_an_event_loop_that_knows_no_process_groups_gives_the_engine_a_session(monkeypatch: pytest.MonkeyPatch):
    """uvloop's."""
    spawn = asyncio.create_subprocess_exec

    def refuses(*words: str, **options: Any):
        if "process_group" in options:
            raise ValueError("unexpected kwargs: process_group")
        return spawn(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    async with client() as c:
        pid = c.engine_pid
        assert pid is not None
        assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
        assert await read(c.submit([request("a", [5], 3)])[0]) == [6, 7, 8]
