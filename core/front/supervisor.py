"""Keeps one engine process alive: starts it, watches it, ends it, starts it again. Knows nothing of requests.

    spawn ──> starting ──Ready──> ready ──┐      a life ends by: process exit, closed connection, protocol error, Failed message,
      ^                                   │      no sign of life for `heartbeat_deadline`, a step older than `step_deadline`,
      └──── back-off <── killed, reaped <─┘      a start longer than `start_deadline`, or `close`

Whatever ended it, the engine's whole process group is killed and reaped before anything else happens: no orphans. Messages in flight die
with their life; each life has an outbox of its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio
import structlog

from ..actors import Mailbox
from ..config import Config, SupervisionConfig
from ..errors import ConfigError, EngineDiedError, StartupError, TokenbusError, from_wire
from ..host import Switches
from ..ipc import Channel, FrameError, WireError, encode, open_channel
from ..messages import (
    PROTOCOL_VERSION,
    EngineInfo,
    EngineMessage,
    Failed,
    FrontMessage,
    Heartbeat,
    Hello,
    Ready,
    Shutdown,
    StepOutput,
)

log = structlog.get_logger(__name__)

ENGINE = (sys.executable, "-P", "-m", "tokenbus.core.engine.main")
"""What starts an engine; "--fd N" is added."""
TICK = 0.1
"""Seconds between two looks at the engine's signs of life."""
STOP_GRACE = 3.0
"""Seconds an engine has to stop by itself once it was asked to."""
FIRST_STARTS = 3
"""Attempts before a first start that keeps failing, for no stated reason, is given up."""


@dataclass(frozen=True, slots=True)
class Death:
    reason: str
    error: TokenbusError | None = None
    """What the engine itself said, if it could."""
    was_ready: bool = False
    lived: float = 0.0
    """Seconds from ready to the end."""
    closed: bool = False
    """It was asked to end."""

    @property
    def permanent(self) -> bool:
        """Starting again can't help: the engine itself said why it can't start, or the start took too long."""
        return not self.was_ready and self.error is not None


class Owner(Protocol):
    """Whoever is told. All methods are quick and called on the supervisor's loop."""

    def hello_switches(self) -> Switches:
        """What the next engine starts with."""
        ...

    def hello_config(self) -> Config:
        """What the next engine is configured with: the settings given at start, with live changes."""
        ...

    def engine_ready(self, info: EngineInfo, restarts: int) -> None: ...

    def engine_message(self, message: EngineMessage) -> None:
        """Everything but Ready and Failed."""
        ...

    def engine_died(self, death: Death, restart_in: float | None) -> None:
        """After the process is gone. restart_in: None when it isn't started again."""
        ...


class Vitals:
    """Signs of life of one engine, and the verdict on them.

    Time counts only while this process is awake (`tick` takes at most a second at once): a front that was itself stopped or starved doesn't
    kill an engine whose messages it hasn't read yet.
    """

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._ready = False
        self.starting = 0.0
        self.silence = 0.0
        self.step_age = 0.0
        self.phase = "spawn"

    def heard(self, message: EngineMessage) -> None:
        self.silence = 0.0
        match message:
            case Heartbeat():
                self.step_age = message.step_age
                self.phase = message.phase or self.phase
            case StepOutput():
                self.step_age = 0.0
            case Ready():
                self._ready = True

    def tick(self, seconds: float) -> None:
        seconds = min(seconds, 1.0)
        self.silence += seconds
        if self.step_age:
            self.step_age += seconds
        if not self._ready:
            self.starting += seconds

    @property
    def start_took_too_long(self) -> bool:
        return not self._ready and self.starting > self._config.start_deadline

    def verdict(self) -> str | None:
        """Why the engine counts as dead; None while it lives."""
        limits = self._config
        if self.step_age > limits.step_deadline:
            return f"a step took longer than {limits.step_deadline:g} s (supervision.step_deadline)"
        if self.silence > limits.heartbeat_deadline:
            return f"no sign of life for {limits.heartbeat_deadline:g} s (supervision.heartbeat_deadline)"
        if self.start_took_too_long:
            return f"not ready after {limits.start_deadline:g} s, in phase {self.phase!r} (supervision.start_deadline)"
        return None

    def doubt(self) -> str | None:
        """Why /ready says no although the engine isn't given up: it has been silent or stuck in a step for some time."""
        limits = self._config
        if self.silence > min(5.0, limits.heartbeat_deadline):
            return f"no sign of life from the engine for {self.silence:.1f} s"
        if self.step_age > min(10.0, limits.step_deadline / 2):
            return f"the engine's current step has taken {self.step_age:.1f} s"
        return None


class EngineProcess:
    """One engine: a process in a group of its own, and the channel to it.

    It stays in this process's session. Where the kernel shares CPU time among sessions first (Linux's autogroups), processes that should
    give way to it, like those that decode pictures, do so only inside one."""

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel[EngineMessage, FrontMessage]) -> None:
        self._process = process
        self.channel = channel
        self.pid = process.pid

    @classmethod
    async def spawn(cls, command: Sequence[str]) -> EngineProcess:
        """Modules are found in the engine as they are here: it gets this process's import path."""
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        with theirs:
            try:
                process = await _spawn([*command, "--fd", str(theirs.fileno())], theirs.fileno(), path)
            except BaseException:
                ours.close()
                raise
        return cls(process, await open_channel(ours, EngineMessage))

    async def wait(self) -> str:
        """Wait for its exit; says how it ended."""
        code = await self._process.wait()
        if code >= 0:
            return f"the engine process exited with code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the engine process was killed by {name}"

    async def end(self) -> None:
        """Kill the whole group and reap. Idempotent."""
        self.channel.abort()
        if self._process.returncode is None:
            self._kill_group()
            await self._process.wait()
        self._kill_group()

    def _kill_group(self) -> None:
        """A worker process that outlives its engine is in the same group."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nobody is left in it
            return


async def _spawn(command: Sequence[str], fd: int, path: str) -> asyncio.subprocess.Process:
    def spawn(**group: Any) -> Coroutine[Any, Any, asyncio.subprocess.Process]:
        return asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what the engine or a library prints never mixes with the front's own output
            pass_fds=(fd,),
            env={**os.environ, "PYTHONPATH": path},
            **group,
        )

    try:
        return await spawn(process_group=0)
    except ValueError:  # uvloop knows no process groups
        return await spawn(start_new_session=True)


class Supervisor:
    def __init__(self, config: Config, owner: Owner, *, outbox_size: int, command: Sequence[str] = ENGINE) -> None:
        self._command = command
        self._config = config
        self._owner = owner
        self._outbox_size = outbox_size
        self._outbox: Mailbox[bytearray] | None = None
        self._closing = anyio.Event()
        self.vitals: Vitals | None = None
        """Of the engine that lives now."""
        self.pid: int | None = None
        """Of the engine that lives now."""
        self.starts = 0

    def post(self, message: FrontMessage) -> bool:
        """Send to the engine that lives now. False when there is none, or when its outbox is full. FrameError when it can't be sent at
        all: it is encoded here, so that this is its sender's problem and nobody else's."""
        return self._outbox is not None and self._outbox.offer(encode(message))

    def close(self) -> None:
        """Have `run` end: the engine is asked to stop, then killed. Idempotent."""
        self._closing.set()

    async def run(self) -> None:
        """Until `close`, cancellation, or a first start that can't succeed."""
        deaths, ever_ready, limits = 0, False, self._config.supervision
        while not self._closing.is_set():
            life = _Life(self)
            self.starts += 1
            death = await life.live()
            ever_ready = ever_ready or death.was_ready
            deaths = 1 if death.lived > limits.restart_backoff_max else deaths + 1
            if self._closing.is_set() or (not ever_ready and (death.permanent or deaths >= FIRST_STARTS)):
                self._owner.engine_died(death, None)
                return
            delay = min(limits.restart_backoff * 2 ** min(deaths - 1, 30), limits.restart_backoff_max)
            log.error("engine_died", reason=death.reason, restart_in=delay, deaths_in_a_row=deaths)
            self._owner.engine_died(death, delay)
            with anyio.move_on_after(delay):
                await self._closing.wait()


class _Life:
    """One engine process, from spawn to reaping. The first cause of death that is declared counts."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._config = supervisor._config
        self._owner = supervisor._owner
        self._vitals = Vitals(supervisor._config.supervision)
        self._outbox: Mailbox[bytearray] = Mailbox(supervisor._outbox_size)
        """Frames."""
        self._over = anyio.Event()
        self._reason = ""
        self._error: TokenbusError | None = None
        self._ready_at: float | None = None

    async def live(self) -> Death:
        try:
            hello = encode(Hello(PROTOCOL_VERSION, self._owner.hello_config(), self._owner.hello_switches(), time.time()))
        except FrameError as error:
            self._outbox.destroy()
            return Death(
                "the settings can't be sent to an engine", ConfigError(f"the settings can't be sent to the engine: {error}")
            )
        try:
            engine = await EngineProcess.spawn(self._supervisor._command)
        except OSError as error:
            self._outbox.destroy()
            return Death(f"can't start a process: {error}")
        self._supervisor.vitals, self._supervisor._outbox, self._supervisor.pid = self._vitals, self._outbox, engine.pid
        self._outbox.offer(hello)
        try:
            async with anyio.create_task_group() as tasks:
                for task in (self._read, self._write, self._await_exit, self._watch, self._stop_when_closing):
                    tasks.start_soon(task, engine)
                await self._over.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._supervisor.vitals = self._supervisor._outbox = self._supervisor.pid = None
            self._outbox.destroy()
            with anyio.CancelScope(shield=True):
                await engine.end()
        lived = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
        return Death(self._reason, self._error, self._ready_at is not None, lived, self._supervisor._closing.is_set())

    def _declare_over(self, reason: str) -> None:
        if not self._over.is_set():
            self._reason = reason
            self._over.set()

    async def _read(self, engine: EngineProcess) -> None:
        try:
            async for message in engine.channel:
                self._take(message)
        except WireError as error:
            self._declare_over(f"wire: {error}")
            return
        with anyio.move_on_after(1):  # its exit status says more than the end of its stream
            self._declare_over(await engine.wait())
        self._declare_over("the engine process closed its connection")

    def _take(self, message: EngineMessage) -> None:
        self._vitals.heard(message)
        match message:
            case Ready(info=info):
                if info.version != PROTOCOL_VERSION:
                    self._declare_over(f"the engine speaks protocol version {info.version}, this process {PROTOCOL_VERSION}")
                    return
                self._ready_at = time.monotonic()
                self._owner.engine_ready(info, self._supervisor.starts - 1)
            case Failed(error=error):
                self._error = from_wire(error)
                self._declare_over(f"the engine gave up: {error.message}")
            case _:
                self._owner.engine_message(message)

    async def _write(self, engine: EngineProcess) -> None:
        try:
            while True:
                await engine.channel.send_frame(await self._outbox.receive())
        except OSError:
            return  # the reader finds out why

    async def _await_exit(self, engine: EngineProcess) -> None:
        how = await engine.wait()
        await anyio.sleep(0.5)  # let the reader take what the process sent before its end
        self._declare_over(how)

    async def _watch(self, _engine: EngineProcess) -> None:
        then = time.monotonic()
        while (verdict := self._vitals.verdict()) is None:
            await anyio.sleep(TICK)
            now = time.monotonic()
            self._vitals.tick(now - then)
            then = now
        if self._vitals.start_took_too_long:
            self._error = StartupError(verdict)
        self._declare_over(verdict)

    async def _stop_when_closing(self, _engine: EngineProcess) -> None:
        await self._supervisor._closing.wait()
        if self._ready_at is None:  # it doesn't listen yet
            self._declare_over("closed")
        self._outbox.offer(encode(Shutdown()))
        await anyio.sleep(STOP_GRACE)
        self._declare_over("closed")


def death_error(death: Death, failed_starts: int) -> EngineDiedError:
    """What a request ends with that no engine will go on with. failed_starts: attempts since the engine died that had it."""
    tried = f", and {failed_starts} attempts to start another one failed" if failed_starts else ""
    return EngineDiedError(f"the engine ended while this request was open{tried}: {death.reason}")


def startup_error(death: Death) -> StartupError:
    """What a server that can't start ends with: the engine's own words where there are some."""
    if isinstance(death.error, StartupError):
        return death.error
    return StartupError(f"the engine can't be started: {death.reason}")
