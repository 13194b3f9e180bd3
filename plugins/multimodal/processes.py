"""The front's side of processing: the process that forks a process for each job (job_main.py), and what becomes of a job."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...core.errors import OverloadedError, UnavailableError
from .jobs import Done, Hello, Job, Ready, receive, send

START_SECONDS = 120.0
"""Wall time that the process may take to import what it needs: some seconds, on a machine that is not busy."""
WALL_FACTOR, WALL_EXTRA = 5.0, 5.0
"""A job's wall time is bounded by its CPU seconds times the one, plus the other: then the machine is too busy for it."""
PATIENCE = 5.0
"""Seconds that a job in idle time may take. Then it is begun anew beside all others, and so are those that come in the next"""
HURRY = 30.0
"""seconds: the machine has no idle time."""
SLACK = 2.0
"""Seconds that the front waits longer than the job may take."""
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""A process that forks must have one thread."""


class CannotProcessError(Exception):
    """Media can't be processed for this model; the message says why."""


class Processes:
    """Safe on any thread; blocking. Nothing is started before it is needed, or `warm_up`."""

    def __init__(self, *, folder: str, config: Mapping[str, Any], count: int, cpu_seconds: float, memory_mb: int) -> None:
        """count: jobs at the same time. cpu_seconds, memory_mb: what one may take."""
        wall = cpu_seconds * WALL_FACTOR + WALL_EXTRA
        self._hello = Hello(folder, dict(config), memory_mb, cpu_seconds, wall)
        self._free = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._problem: str | None = None
        self._hurry_until = 0.0
        self.started = 0
        """Forking processes started so far."""
        self.jobs = 0
        """Jobs begun."""
        self.hurried = 0
        """Of these, those that were not done in idle time."""

    def run(self, job: Job, seconds: float) -> Done:
        """Have a job done. seconds: until its turn has to come, else OverloadedError. CannotProcessError; UnavailableError when the machine
        is too busy, or the process takes longer to start."""
        deadline = time.monotonic() + seconds
        if not self._free.acquire(timeout=max(0.0, seconds)):
            raise OverloadedError("too many images and sounds are waiting to be processed", retry_after=2.0)
        try:
            return self._run(job, deadline)
        finally:
            self._free.release()

    def _run(self, job: Job, deadline: float) -> Done:
        if time.monotonic() >= self._hurry_until:
            with contextlib.suppress(TimeoutError):
                return self._ask(replace(job, in_idle_time=True), deadline, PATIENCE)
            self._hurry_until = time.monotonic() + HURRY
        self.hurried += 1
        try:
            return self._ask(job, deadline, self._hello.wall_seconds + SLACK)
        except TimeoutError:
            raise UnavailableError("the machine is too busy to process an image or sound now", retry_after=5.0) from None

    def _ask(self, job: Job, deadline: float, patience: float) -> Done:
        """TimeoutError after so many seconds of patience: the job has been ended."""
        with self._begin(deadline) as sock:
            began = time.monotonic()
            sock.settimeout(patience)
            try:
                send(sock, job)
                return receive(sock, Done)
            except TimeoutError:
                raise
            except (EOFError, OSError):
                return Done(refused=self._why_it_ended(time.monotonic() - began))

    def _why_it_ended(self, seconds: float) -> str:
        hello = self._hello
        if seconds >= hello.cpu_seconds:
            return f"takes more than {hello.cpu_seconds:g} s of CPU time to process: send a smaller one"
        return f"can't be decoded within {hello.memory_mb} MiB of memory, or breaks the decoder"

    def _begin(self, deadline: float) -> socket.socket:
        """The front's end of a new job's socket."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise UnavailableError("the process that processes images and sounds is still starting", retry_after=5.0)
        try:
            for _ in range(2):  # it may have ended since it was last needed
                control = self._running()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(control, [b"j"], [theirs.fileno()])
                    except OSError:
                        ours.close()
                        self._end()
                        continue
                self.jobs += 1
                return ours
        finally:
            self._lock.release()
        raise UnavailableError("the process that processes images and sounds does not stay alive", retry_after=5.0)

    def warm_up(self) -> None:
        """Start, if not started; problems are kept for the first job."""
        with contextlib.suppress(CannotProcessError, UnavailableError), self._lock:
            self._running()

    def close(self) -> None:
        """End the process, also one that is just starting. Jobs that run end by themselves. It is started again when needed."""
        if (starting := self._process) is not None:
            starting.kill()
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        if self._problem is not None:
            raise CannotProcessError(self._problem)
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.job_main", "--fd", str(fd)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(fd,),
                process_group=0,  # Ctrl-C at the terminal is for the server; in its session it gives way to the engine (supervisor.py)
                env={**os.environ, **THREADS, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
            )
        self._control = ours
        self.started += 1
        ours.settimeout(START_SECONDS)
        try:
            send(ours, self._hello)
            ready: Ready = receive(ours, Ready)
        except (EOFError, OSError):
            self._end()
            raise UnavailableError("the process that processes images and sounds does not start", retry_after=5.0) from None
        ours.settimeout(SLACK)
        if ready.error is not None:
            self._problem = ready.error
            self._end()
            raise CannotProcessError(ready.error)
        return ours

    def _end(self) -> None:
        process, self._process = self._process, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if process is not None:
            process.kill()
            process.wait()
