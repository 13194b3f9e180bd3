"""An engine whose front is gone ends by itself within 5 seconds, whatever it is doing."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest
from engine_fakes import BLOCK_LOOP, HANG
from engine_harness import request
from test_client import COMMAND, settings

from tokenbus.core.host import Switches
from tokenbus.core.ipc import Channel, open_channel
from tokenbus.core.messages import PROTOCOL_VERSION, Add, EngineMessage, Heartbeat, Hello, Ready, StepOutput

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def spawned() -> AsyncIterator[tuple[subprocess.Popen[bytes], Channel]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds
            [*COMMAND, "--fd", str(theirs.fileno())], pass_fds=(theirs.fileno(),), start_new_session=True
        )
    channel = await open_channel(ours, EngineMessage)
    try:
        with process:
            try:
                yield process, channel
            finally:
                process.kill()
    finally:
        channel.abort()
        await anyio.lowlevel.checkpoint()


async def receive(channel: Channel):
    message = await channel.receive()
    assert message is not None, "the engine has ended"
    return message


async def until_ready(channel: Channel) -> None:
    while not isinstance(await receive(channel), Ready):
        pass


@pytest.mark.parametrize("doing", ["nothing", "loading", "decoding", "computing", "blocked"])
async def test_the_engine_ends_when_its_front_is_gone(doing: str):
    async with spawned() as (process, channel):
        await channel.send(Hello(PROTOCOL_VERSION, settings("stuck" if doing == "loading" else "fake"), Switches(frozenset())))
        if doing == "loading":
            while (beat := await receive(channel)).phase != "model":
                assert isinstance(beat, Heartbeat)
        else:
            await until_ready(channel)
        if doing in {"decoding", "computing", "blocked"}:
            token = {"decoding": 1, "computing": HANG, "blocked": BLOCK_LOOP}[doing]
            await channel.send(Add([request("r", [token], max_tokens=250)]))
        if doing == "decoding":
            while not isinstance(await receive(channel), StepOutput):
                pass
        if doing == "computing":
            while not (isinstance(beat := await receive(channel), Heartbeat) and beat.step_age):
                pass
        if doing == "blocked":
            with anyio.move_on_after(2.5):  # two beats' time without one: it is blocked
                while True:
                    await receive(channel)
        began = time.monotonic()
        channel.abort()
        assert await anyio.to_thread.run_sync(process.wait, 8) != 0
        assert time.monotonic() - began < 5


async def test_signals_are_the_fronts_to_give():
    async with spawned() as (process, channel):
        await channel.send(Hello(PROTOCOL_VERSION, settings(), Switches(frozenset())))
        await until_ready(channel)
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        await channel.send(Add([request("r", [1], 3)]))
        while not (isinstance(message := await receive(channel), StepOutput) and message.finished):
            pass
        assert process.poll() is None


def test_a_front_that_is_killed_takes_its_engine_with_it(tmp_path):
    """The front here is a process of its own, killed with SIGKILL: it can't tell its engine anything."""
    script = tmp_path / "front.py"
    script.write_text(
        "import anyio, test_client as t\n"
        "async def main():\n"
        "    async with t.client() as c:\n"
        "        print(c.engine_pid, flush=True)\n"
        "        await anyio.sleep(600)\n"
        "anyio.run(main)\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    front = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path})
    with front:
        assert front.stdout is not None
        try:
            pid = next(int(line) for line in front.stdout if line.strip().isdigit())
            descriptor = os.pidfd_open(pid)
        finally:
            front.kill()
        began = time.monotonic()
        try:
            assert select.select([descriptor], [], [], 8)[0], "the engine is still there"
        finally:
            os.close(descriptor)
        assert time.monotonic() - began < 5
