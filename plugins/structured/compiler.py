"""The front's side of compiling: a process that does it, its limits, and a cache of what it said."""

from __future__ import annotations

import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...core.errors import UnavailableError, shorten

if TYPE_CHECKING:
    from ...core.contexts import Vocabulary

START_SECONDS = 60.0
"""Wall time that the process may take to start and read the vocabulary."""
WALL_FACTOR, WALL_EXTRA = 5.0, 5.0
"""A compilation's wall time is bounded by its CPU seconds times the one, plus the other: then the machine is too busy for it."""
CHUNK = 1 << 16


class GrammarError(Exception):
    """The grammar is refused; the message says why."""


class Source(NamedTuple):
    kind: str
    """json (text of a schema), regex, lark, or grammar (Lark or GBNF)."""
    text: str


class _EndedError(Exception):
    """The process is gone."""


class Compiler:
    """Compiles with one process, which is started when first needed and again after it was killed. Safe on any thread; blocking."""

    def __init__(self, *, seconds: float, memory_mb: int, cache_entries: int) -> None:
        """seconds: CPU time for one grammar. memory_mb: MiB for it, beyond what the idle process has."""
        self._seconds = seconds
        self._memory_mb = memory_mb
        self._cache_entries = cache_entries
        self._cache: OrderedDict[Source, str | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.started = 0
        """Processes started so far."""
        self.asked = 0
        """Grammars that a process was asked to compile."""

    def compile(self, source: Source, vocabulary: Vocabulary) -> str:
        """The grammar in the library's form, known to compile within the limits. GrammarError when it is refused; the same answer comes
        from the cache the next time. UnavailableError when the machine is too busy to tell."""
        with self._lock:
            known = self._cache.get(source)
            if known is None:
                known = self._ask(source, vocabulary)
                self._cache[source] = known
                while len(self._cache) > self._cache_entries:
                    self._cache.popitem(last=False)
            else:
                self._cache.move_to_end(source)
        if isinstance(known, GrammarError):
            raise GrammarError(str(known))
        return known

    def close(self) -> None:
        """End the process. It is started again when needed."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, source: Source, vocabulary: Vocabulary) -> str | GrammarError:
        process = self._running(vocabulary)
        self.asked += 1
        question = {"kind": source.kind, "text": source.text, "seconds": self._seconds}
        try:
            told = _exchange(process, question, self._seconds * WALL_FACTOR + WALL_EXTRA)
        except TimeoutError:
            self.close()
            raise UnavailableError("the machine is too busy to compile a grammar now", retry_after=5.0) from None
        except (_EndedError, OSError):
            self.close()
            if process.returncode == -signal.SIGPROF:
                return GrammarError(f"takes more than {self._seconds:g} s of CPU time to compile: make it smaller or simpler")
            return GrammarError(f"can't be compiled within {self._memory_mb} MiB of memory: make it smaller or simpler")
        return told["grammar"] if "grammar" in told else GrammarError(shorten(told["error"], 400))

    def _running(self, vocabulary: Vocabulary) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self.close()
        script = Path(__file__).with_name("compile_process.py")
        process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is for the server
            bufsize=0,
        )
        self.started += 1
        hello = {
            "tokens": list(vocabulary.tokens),
            "special_ids": sorted(vocabulary.special_ids),
            "eos_token_ids": list(vocabulary.eos_token_ids),
            "memory_mb": self._memory_mb,
        }
        try:
            _exchange(process, hello, START_SECONDS)
        except (TimeoutError, _EndedError, OSError):
            _end(process)
            raise UnavailableError("the process that compiles grammars does not start", retry_after=5.0) from None
        self._process = process
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _exchange(process: subprocess.Popen[bytes], message: Any, seconds: float) -> Any:
    """Send a message, wait for the answer. TimeoutError, or _EndedError when the process ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    body = msgspec.msgpack.encode(message)
    left = memoryview(struct.pack("<I", len(body)) + body)
    poll = select.poll()
    poll.register(process.stdin, select.POLLOUT)
    while left:
        _wait(poll, deadline)
        left = left[process.stdin.write(left[: select.PIPE_BUF]) :]
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)

    def read(size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            _wait(poll, deadline)
            part = process.stdout.read(min(CHUNK, size - len(parts)))  # pyright: ignore[reportOptionalMemberAccess]
            if not part:
                raise _EndedError
            parts += part
        return bytes(parts)

    return msgspec.msgpack.decode(read(struct.unpack("<I", read(4))[0]))


def _wait(poll: select.poll, deadline: float) -> None:
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
