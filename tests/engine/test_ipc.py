from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import pytest

from tokenbus.core.config import Config
from tokenbus.core.host import Switches
from tokenbus.core.ipc import MAGIC, Channel, WireError, open_channel
from tokenbus.core.messages import (
    PROTOCOL_VERSION,
    Add,
    Cancel,
    EngineMessage,
    Finish,
    FrontMessage,
    Heartbeat,
    Hello,
    Reply,
    StepOutput,
)
from tokenbus.core.plan import TokenLogprobs
from tokenbus.core.request import AdmittedRequest

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def pair(**options) -> AsyncIterator[tuple[Channel, Channel]]:
    """(front's end, engine's end)"""
    a, b = socket.socketpair()
    front, engine = await open_channel(a, EngineMessage, **options), await open_channel(b, FrontMessage, **options)
    try:
        yield front, engine
    finally:
        front.abort()
        engine.abort()
        await anyio.lowlevel.checkpoint()  # let the transports close their sockets


@asynccontextmanager
async def against_bytes() -> AsyncIterator[tuple[socket.socket, Channel]]:
    """(a plain socket, the engine's end of it)"""
    a, b = socket.socketpair()
    channel = await open_channel(b, FrontMessage)
    try:
        with a:
            yield a, channel
    finally:
        channel.abort()
        await anyio.lowlevel.checkpoint()


PREAMBLE = MAGIC + struct.pack(">I", PROTOCOL_VERSION)


async def test_messages_arrive_as_they_were_sent():
    request = AdmittedRequest(
        request_id="r1", prompt=[1, 2, 3], max_tokens=5, fields={"logit_bias": {7: -1.5}, "stop": ["é"]}, features=("a", "b")
    )
    output = StepOutput(
        step_id=3,
        tokens={"r1": [4, 5]},
        logprobs={"r1": [TokenLogprobs(4, -0.25, 1, [4], [-0.25])]},
        finished={"r1": Finish(reason="stop", stop_token=2)},
    )
    async with pair() as (front, engine):
        for message in (
            Hello(PROTOCOL_VERSION, Config(), Switches(frozenset({"x"}), {"y": "why"})),
            Add([request]),
            Cancel(["r1"], "stop"),
        ):
            await front.send(message)
            assert await engine.receive() == message
        for message in (output, Heartbeat(1, 0.5, 0.0), Reply(7, {"ok": True})):
            await engine.send(message)
            assert await front.receive() == message


async def test_the_end_of_the_stream_is_none_and_ends_iteration():
    async with pair() as (front, engine):
        await front.send(Cancel(["a"]))
        front.close()
        assert [message async for message in engine] == [Cancel(["a"])]
        assert await engine.receive() is None


async def test_a_message_cut_short_is_the_end():
    async with against_bytes() as (sock, channel):
        sock.sendall(PREAMBLE + struct.pack(">I", 100) + b"half")
        sock.close()
        assert await channel.receive() is None


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "does not speak this protocol"),
        (MAGIC + struct.pack(">I", PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1} .* version {PROTOCOL_VERSION}"),
        (PREAMBLE + struct.pack(">I", 2**31), "over the limit"),
        (PREAMBLE + struct.pack(">I", 3) + b"\xc1\xc1\xc1", "none of the expected types"),
        # a well-formed message of the other direction, and one with a field of a wrong type
        (PREAMBLE + struct.pack(">I", 12) + b"\x81\xa4type\xa5Ready", "none of the expected types"),
        (PREAMBLE + struct.pack(">I", 31) + b"\x82\xa4type\xa6Cancel\xabrequest_ids\xa5hello", "none of the expected types"),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_told_apart(sent: bytes, words: str):
    async with against_bytes() as (sock, channel):
        sock.sendall(sent)
        with pytest.raises(WireError, match=words):
            await channel.receive()


async def test_a_message_that_is_too_long_is_the_senders_error():
    async with pair(max_frame=1000) as (front, engine):
        with pytest.raises(ValueError, match=r"Cancel of .* bytes is over the wire's limit of 1000"):
            await front.send(Cancel(["x" * 1000]))
        await front.send(Cancel(["short"]))  # the channel is still good
        assert await engine.receive() == Cancel(["short"])


async def test_a_slow_reader_makes_the_sender_wait():
    message = Cancel(["x" * 1_000_000])
    sent = 0
    stuck = anyio.Event()

    async with pair() as (front, engine):

        async def send_all() -> None:
            nonlocal sent
            for _ in range(20):
                await front.send(message)
                sent += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all)
            tasks.start_soon(_when_still, lambda: sent, stuck)
            await stuck.wait()
            before_reading = sent
            for _ in range(20):
                assert await engine.receive() == message
        assert before_reading < 10
        assert sent == 20


async def _when_still(count, event: anyio.Event) -> None:
    """Set the event once `count()` has stayed the same for many rounds of the event loop."""
    last, rounds = count(), 0
    while rounds < 200:
        await anyio.sleep(0.0005)
        rounds = rounds + 1 if count() == last else 0
        last = count()
    event.set()


async def test_large_frames_of_several_senders_stay_whole_also_when_one_is_cancelled():
    async with pair() as (front, engine):
        large = [Cancel(["x" * (5 << 20) + str(i)]) for i in range(3)]
        got: list[str] = []
        scope = anyio.CancelScope()

        async def send(message: Cancel, within: anyio.CancelScope) -> None:
            with within:
                await front.send(message)

        async def receive() -> None:
            while len(got) < 6:
                message = await engine.receive()
                assert isinstance(message, Cancel)
                got.append(message.request_ids[0][-1])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send, large[0], scope)
            for message in (*large[1:], *(Cancel([f"small{i}"]) for i in "678")):
                tasks.start_soon(send, message, anyio.CancelScope())
            await anyio.wait_all_tasks_blocked()
            scope.cancel()  # it has begun, and nobody reads yet
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(20):
                await receive()
        assert scope.cancelled_caught
        assert got == ["0", "1", "2", "6", "7", "8"]
