"""The worker process: answers the engine's calls over an inherited socket, and ends when the engine is gone."""

from __future__ import annotations

import argparse
import functools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import structlog

from ..errors import TokenbusError, WorkerError
from ..logs import configure_logs
from . import wire
from .lane import POLL_SECONDS
from .thread import RunnerFactory, make_runner
from .turns import Turn, Turns

if TYPE_CHECKING:
    from ..plan import StepResult
    from .lane import Begun

T = TypeVar("T")

log = structlog.get_logger(__name__)


class Server:
    def __init__(self, sock: socket.socket, factory: RunnerFactory) -> None:
        self._sock = sock
        self._factory = factory
        self._turns: Turns | None = None

    def serve(self) -> None:
        """Answer calls until `Close` or until the engine is gone. On a device the next step is launched, if it comes in time, before the
        one before is answered; answers keep the order of calls."""
        begun: Begun[StepResult] | None = None
        while True:
            if begun is not None and not self._call_comes_before(begun):
                if not self._send(self._guarded(lambda begun=begun: wire.Executed(begun.end()), "Execute")):
                    return
                begun = None
                continue
            try:
                call = wire.receive_call(self._sock)
            except (EOFError, OSError):
                return
            turns, launched = self._turns, None
            if isinstance(call, wire.Execute) and turns is not None and turns.runner.ahead:
                launched = self._guarded(functools.partial(turns.begin, call.order), "Execute")
            if begun is not None and not self._send(self._guarded(lambda begun=begun: wire.Executed(begun.end()), "Execute")):
                return
            begun = None
            if isinstance(launched, Turn):
                begun = launched
                continue
            answer = launched or self._guarded(lambda call=call: self._answer(call), type(call).__name__)
            if not self._send(answer) or isinstance(call, wire.Close):
                return

    def _call_comes_before(self, begun: Begun[StepResult]) -> bool:
        """Whether a call is there before the step that was launched can be answered."""
        while True:
            ready = begun.ready()
            if select.select([self._sock], [], [], 0 if ready else POLL_SECONDS)[0]:
                return True
            if ready:
                return False

    def _guarded(self, work: Callable[[], T], name: str) -> T | wire.Failed:
        try:
            return work()
        except TokenbusError as error:
            return wire.Failed(error.to_wire())
        except Exception as error:
            log.exception("worker_call_failed", call=name)
            return wire.Failed(WorkerError(f"{type(error).__name__}: {error}").to_wire())

    def _send(self, answer: wire.Answer) -> bool:
        """False: the engine is gone."""
        try:
            wire.send(self._sock, answer)
        except OSError:
            return False
        return True

    def _answer(self, call: wire.Call) -> wire.Answer:
        match call:
            case wire.Load(version=version, config=config, features=features):
                if version != wire.VERSION:
                    raise WorkerError(f"the engine speaks worker protocol {version}, this worker {wire.VERSION}")
                configure_logs(config.server.log_format, config.server.log_level)
                runner = self._factory(config, features)
                self._turns = Turns(runner)
                return wire.Loaded(runner.load())
            case wire.Close():
                return wire.Done()
        if self._turns is None:
            raise WorkerError("the worker is not loaded")
        match call:
            case wire.Allocate(num_blocks=num_blocks):
                self._turns.runner.allocate(num_blocks)
                return wire.Done()
            case wire.Execute(order=order):
                return wire.Executed(self._turns.run(order))


def end_with_parent(fd: int) -> None:
    """End this process as soon as the other end of the socket is closed, also in the middle of a step."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP)
    while not any(event & (select.POLLRDHUP | select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        pass
    os._exit(0)


def main(factory: RunnerFactory | None = None, arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tokenbus.core.worker.process_main", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    fd: int = parser.parse_args(arguments).fd
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole process group; the engine decides
    sock = socket.socket(fileno=fd)
    threading.Thread(target=end_with_parent, args=(fd,), name="parent-watch", daemon=True).start()
    Server(sock, factory or functools.partial(make_runner, clock=time.process_time)).serve()


if __name__ == "__main__":
    main()
