"""Waves of requests through an engine process, timed where a front would stand: at the other end of its socket.

The engine is whole: scheduler, KV pool, worker thread, plugins that are on by default; only its weights are random (synthetic.py), and
nobody detokenises. A wave is so many requests at once; its first steps run the prompts, capture graphs and compile, and are not counted.
On a device each wave comes twice: to be timed, and, when all have been, to see for how long the device is busy, which slows the host.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from tokenbus.core.config import Config, from_mapping
from tokenbus.core.host import make_host
from tokenbus.core.ipc import Channel, open_channel
from tokenbus.core.messages import (
    PROTOCOL_VERSION,
    Add,
    EngineInfo,
    EngineMessage,
    Failed,
    FrontMessage,
    Hello,
    Ready,
    Shutdown,
    StepOutput,
)
from tokenbus.core.request import AdmittedRequest

from .shapes import SHAPES, write_config

BLOCK = 16
WATCHED = (20, 60)
"""The steps behind the prompts in which the device's activity is recorded."""


@dataclass(frozen=True)
class Wave:
    requests: int
    prompt: int = 128
    steps: int = 160
    """Tokens that each request gets."""
    timed: tuple[float, float] = (0.3, 0.9)
    """Which steps are timed, as shares of `steps`."""

    @property
    def blocks(self) -> int:
        return self.requests * (-(-(self.prompt + self.steps + 1) // BLOCK) + 1)


@dataclass
class Measured:
    """One wave."""

    wave: Wave
    periods: list[float]
    """Seconds from one timed step's output to the next one's."""
    bytes_moved: float
    """By a timed step, on average: weights and K/V by the model's arithmetic."""
    busy: float | None
    """Seconds that the device was busy in a step; None when it could not be recorded."""
    idle: float
    """Seconds of a step in which the worker had no order, by its own clock."""

    @property
    def period(self) -> float:
        """Mean: what counts is the rate. `periods` may jump back and forth."""
        return statistics.fmean(self.periods)

    @property
    def gap(self) -> float | None:
        """Seconds of a step in which the device waits."""
        return None if self.busy is None else max(0.0, self.period - self.busy)

    @property
    def range(self) -> tuple[float, float]:
        """Smallest and largest mean of eight parts, one after the other."""
        size = max(1, len(self.periods) // 8)
        means = [statistics.fmean(self.periods[i : i + size]) for i in range(0, len(self.periods) - size + 1, size)]
        return min(means), max(means)


@dataclass
class Stream:
    """The front's end of one engine."""

    channel: Channel[EngineMessage, FrontMessage]
    features: tuple[str, ...]
    info: EngineInfo | None = None
    outputs: list[tuple[float, StepOutput]] = field(default_factory=list)

    async def next(self) -> EngineMessage:
        message = await self.channel.receive()
        if message is None:
            raise RuntimeError("the engine has ended")
        if isinstance(message, Failed):
            raise RuntimeError(f"the engine failed: {message.error.message}")  # noqa: TRY004 - the engine's message, not a mistake
        if isinstance(message, StepOutput):
            self.outputs.append((time.perf_counter(), message))
        return message

    async def ready(self) -> EngineInfo:
        while not isinstance(message := await self.next(), Ready):
            pass
        return message.info

    async def wave(self, wave: Wave, number: int, vocabulary: int) -> list[tuple[float, StepOutput]]:
        """The outputs of its steps, with their times."""
        draw = random.Random(number)
        requests = [
            AdmittedRequest(
                request_id=f"{number}-{i}",
                prompt=[draw.randrange(vocabulary) for _ in range(wave.prompt)],
                max_tokens=wave.steps,
                temperature=0.0,
                features=self.features,
                arrival=time.time(),
            )
            for i in range(wave.requests)
        ]
        self.outputs = []
        await self.channel.send(Add(requests))
        open_ids = {request.request_id for request in requests}
        while open_ids:
            message = await self.next()
            if isinstance(message, StepOutput):
                for request_id, finish in message.finished.items():
                    if finish.error is not None:
                        raise RuntimeError(f"a request failed: {finish.error.message}")
                    open_ids.discard(request_id)
        return self.outputs


def make_config(folder: Path, waves: Sequence[Wave], settings: Mapping[str, Mapping[str, Any]]) -> Config:
    most = max(wave.requests for wave in waves)
    base: dict[str, dict[str, Any]] = {
        "model": {"model": str(folder), "max_model_len": max(w.prompt + w.steps for w in waves) + 1},
        "cache": {"block_size": BLOCK, "num_blocks": max(wave.blocks for wave in waves)},
        "scheduler": {"max_running": most, "max_waiting": most, "token_budget": 8192},
        "server": {"log_level": "warning"},
    }
    for section, values in settings.items():
        base[section] = base.get(section, {}) | dict(values)
    return from_mapping(base, "the GPU suite")


def serve(
    shape: str,
    waves: Sequence[Wave],
    settings: Mapping[str, Mapping[str, Any]],
    dtype: str = "bfloat16",
    *,
    watch: bool = True,
    seconds: float = 120.0,
) -> list[Measured]:
    """Run the waves one after the other through one engine, each with another number of requests. watch: and again, for the device's
    activity. Raises RuntimeError, and TimeoutError when it takes more than `seconds`."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-gpu-") as folder:
        path = write_config(Path(folder, shape), shape, dtype)
        config = make_config(path, waves, settings)
        busy = Path(folder, "busy.json")
        again = [dataclasses.replace(wave, steps=WATCHED[1] + 5) for wave in waves] if watch else []
        options = ["--busy", str(busy), "--wave", str(len(waves))] if watch else []
        outputs = anyio.run(_serve, config, [*waves, *again], SHAPES[shape]["vocab_size"], options, seconds)
        found = json.loads(busy.read_text(encoding="utf-8")) if busy.exists() else []
    activity = {one["requests"]: one for one in found}
    return [evaluate(wave, steps, activity.get(wave.requests)) for wave, steps in zip(waves, outputs, strict=False)]


def evaluate(wave: Wave, outputs: list[tuple[float, StepOutput]], activity: dict[str, float] | None) -> Measured:
    """activity: as engine_child.py writes it."""
    decoding = [
        (at, output.report)
        for at, output in outputs
        if output.report is not None and output.report.decode_tokens == wave.requests and not output.report.prompt_tokens
    ]
    first, last = (round(share * wave.steps) for share in wave.timed)
    timed = decoding[first : last + 1]
    if len(timed) < 3:
        raise RuntimeError(f"only {len(decoding)} steps decoded all {wave.requests} requests at once")
    periods = [b - a for (a, _), (b, _) in itertools.pairwise(timed)]
    moved = statistics.fmean(report.bytes_moved for _, report in timed)
    busy = activity["busy"] / activity["steps"] if activity and activity["busy"] > 0 else None
    return Measured(wave, periods, moved, busy, statistics.fmean(report.gap for _, report in timed))


async def _serve(
    config: Config, waves: Sequence[Wave], vocabulary: int, watch: Sequence[str], seconds: float
) -> list[list[tuple[float, StepOutput]]]:
    """watch: options of engine_child.py."""
    ours, theirs = socket.socketpair()
    steps = ["--from", str(WATCHED[0]), "--steps", str(WATCHED[1] - WATCHED[0])] if watch else []
    command = [sys.executable, "-P", "-m", "gpu.engine_child", *watch, *steps, "--fd", str(theirs.fileno())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = await anyio.open_process(
            command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=2, stderr=None, env=environment
        )
    try:
        channel: Channel[EngineMessage, FrontMessage] = await open_channel(ours, EngineMessage)
        try:
            with anyio.fail_after(seconds):
                return await _drive(channel, config, waves, vocabulary)
        finally:
            channel.close()
    finally:
        with anyio.move_on_after(5, shield=True):
            await process.wait()  # it ends by itself when its front is gone
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _drive(
    channel: Channel[EngineMessage, FrontMessage], config: Config, waves: Sequence[Wave], vocabulary: int
) -> list[list[tuple[float, StepOutput]]]:
    switches = make_host("engine", config).start_switches(config.features.enable, config.features.disable)
    stream = Stream(channel, tuple(sorted(switches.names())))
    await channel.send(Hello(PROTOCOL_VERSION, config, switches))
    stream.info = await stream.ready()
    found = [await stream.wave(wave, number, vocabulary) for number, wave in enumerate(waves)]
    await channel.send(Shutdown())
    return found
