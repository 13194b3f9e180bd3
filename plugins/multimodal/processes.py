"""The front's side of processing: the process that forks a process for each job (job_main.py), and what becomes of a job."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...core.errors import OverloadedError, UnavailableError
from .jobs import BESIDE_OTHERS, IN_IDLE_TIME, Begun, Done, Hello, Job, Ready, receive, send

START_SECONDS = 120.0
"""Wall time that the process may take to import what it needs: some seconds, on a machine that is not busy."""
WALL_FACTOR, WALL_EXTRA = 5.0, 5.0
"""A job's wall time is bounded by its CPU seconds times the one, plus the other: then the machine is too busy for it."""
IDLE_TIME = hasattr(os, "SCHED_IDLE")
"""Whether processes can be had that take only CPU time that nobody else wants."""
PATIENCE = 5.0
"""Seconds in which a job in idle time has to get on (`BUSY`). When it does not the machine has no idle time; it is then ended, and begun
anew beside all others."""
NO_IDLE_TIME_SECONDS = 30.0
"""For so long other jobs are begun in that way too."""
BUSY = 0.1
"""Share of a core that a job in idle time gets at least."""
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
        self._no_idle_time_until = 0.0
        self.started = 0
        """Forking processes started so far."""
        self.jobs = 0
        """Jobs begun; one that is begun anew counts twice."""
        self.beside_others = 0
        """Of these, those that did not only take idle time."""

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
        if IDLE_TIME and time.monotonic() >= self._no_idle_time_until:
            try:
                return self._ask(job, IN_IDLE_TIME, deadline, PATIENCE)
            except TimeoutError:
                self._no_idle_time_until = time.monotonic() + NO_IDLE_TIME_SECONDS
        try:
            return self._ask(job, BESIDE_OTHERS, max(deadline, time.monotonic() + SLACK), self._hello.wall_seconds + SLACK)
        except TimeoutError:
            raise UnavailableError("the machine is too busy to process an image or sound now", retry_after=5.0) from None

    def _ask(self, job: Job, when: bytes, deadline: float, patience: float) -> Done:
        """TimeoutError when the job does next to nothing for so many seconds: it has been ended."""
        with self._begin(when, deadline) as sock:
            began = time.monotonic()
            sock.settimeout(patience)
            try:
                send(sock, job)
                pid: int = receive(sock, Begun).pid
                _wait(sock, pid, patience)
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

    def _begin(self, when: bytes, deadline: float) -> socket.socket:
        """The front's end of a new job's socket."""
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise UnavailableError("the process that processes images and sounds is still starting", retry_after=5.0)
        try:
            for _ in range(2):  # it may have ended since it was last needed
                control = self._running()
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(control, [when], [theirs.fileno()])
                    except OSError:
                        ours.close()
                        self._end()
                        continue
                self.jobs += 1
                self.beside_others += when == BESIDE_OTHERS
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


def _wait(sock: socket.socket, pid: int, patience: float) -> None:
    """Until there is something to read, the other end's being closed included. TimeoutError when the process does next to nothing."""
    used = _cpu_seconds(pid)
    while not _readable(sock, patience):
        before, used = used, _cpu_seconds(pid)
        if used - before < BUSY * patience:
            raise TimeoutError


def _cpu_seconds(pid: int) -> float:
    """That a process has used; 0.0 when it is gone, or the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _readable(sock: socket.socket, seconds: float) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(seconds * 1000))
