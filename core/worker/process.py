"""A worker in a process of its own, reached over a Unix socket pair (see wire.py)."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import msgspec

from ..config import Config
from ..errors import EngineDiedError, WorkerError, from_wire
from ..plan import StepInput, StepResult
from . import wire
from .base import Worker, WorkerInfo
from .lane import Lane

CHILD = (sys.executable, "-m", "tokenbus.core.worker.process_main")
CLOSE_SECONDS = 5.0
"""How long a worker that was told to close may take before it is killed."""

A = TypeVar("A", wire.Loaded, wire.Done, wire.Executed)


class ProcessWorker(Worker):
    """command: what starts the child; "--fd N" is added.

    A call is sent at once, also while the child is busy with another one, which it answers first: so it never waits for an order that is
    there already. One thread sends, one receives.

    A child that ends on its own makes the call in flight and all later ones raise EngineDiedError.
    """

    def __init__(self, config: Config, features: tuple[str, ...], command: Sequence[str] = CHILD) -> None:
        self._config = config
        self._features = features
        self._command = tuple(command)
        self._lane = Lane("tokenbus-worker-answers")
        self._outgoing = Lane("tokenbus-worker-calls")
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None before `load`."""
        return self._process.pid if self._process else None

    async def load(self) -> WorkerInfo:
        call = wire.Load(wire.VERSION, self._config, self._features)
        return (await self._lane.call(lambda: self._start(call))).info

    async def allocate(self, num_blocks: int) -> None:
        await self._call(wire.Allocate(num_blocks), wire.Done)

    async def execute(self, order: StepInput) -> StepResult:
        return (await self._call(wire.Execute(order), wire.Executed)).result

    async def close(self) -> None:
        self._closed = True
        await self._outgoing.close()
        await self._lane.close(self._stop)

    async def _call(self, call: wire.Call, expected: type[A]) -> A:
        if self._closed:
            raise WorkerError("the worker is closed")
        sent = self._outgoing.submit(lambda: self._post(call))
        return await self._lane.call(lambda: self._answer(sent, call, expected))

    # ---- on the lanes' threads --------------------------------------------------------------------------------------------------

    def _start(self, call: wire.Load) -> wire.Loaded:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen([*self._command, "--fd", str(fd)], stdin=subprocess.DEVNULL, pass_fds=(fd,))
        self._sock = ours
        return self._answer(self._outgoing.submit(lambda: self._post(call)), call, wire.Loaded)

    def _link(self) -> socket.socket:
        if self._sock is None:
            raise WorkerError("the worker is not loaded")
        return self._sock

    def _post(self, call: wire.Call) -> None:
        wire.send(self._link(), call)

    def _answer(self, sent: Future[None], call: wire.Call, expected: type[A]) -> A:
        """Receive the answer to a call, once all before it were answered."""
        try:
            sent.result()
            answer = wire.receive_answer(self._link())
        except (EOFError, OSError, msgspec.DecodeError) as error:
            raise EngineDiedError(f"the worker process {self._end()}") from error
        if isinstance(answer, wire.Failed):
            raise from_wire(answer.error)
        if not isinstance(answer, expected):
            raise WorkerError(f"the worker answered {type(answer).__name__} to {type(call).__name__}")
        return answer

    def _end(self) -> str:
        """Make sure that the child has ended, and say how."""
        assert self._process is not None
        try:
            code = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return f"{self._process.pid} broke the connection and was killed"
        return f"{self._process.pid} ended with " + (f"signal {-code}" if code < 0 else f"exit status {code}")

    def _stop(self) -> None:
        if self._process is None or self._sock is None:
            return
        with contextlib.suppress(EOFError, OSError, msgspec.DecodeError):
            wire.send(self._sock, wire.Close())
            wire.receive_answer(self._sock)
        self._sock.close()
        self._sock = None
        self._end()
