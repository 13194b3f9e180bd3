"""Compilation has limits that really stop it, in a process that is killed; and a cache."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import structured_kit as kit

from tokenbus.core.errors import UnavailableError
from tokenbus.plugins.structured import compiler as module
from tokenbus.plugins.structured.compiler import Compiler, GrammarError, Source
from tokenbus.plugins.structured.fields import Wish, source_of


def bomb(size):
    """A conjunction of alternatives, which is multiplied out: 2 to the power of `size` objects."""

    def one(name):
        return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}

    schema = {"allOf": [{"anyOf": [one(f"a{i}"), one(f"b{i}")]} for i in range(size)]}
    return source_of(Wish("x", "json", schema), 100_000, 10)


PLAIN = Source("regex", "a+")


@pytest.fixture
def make():
    made = []

    def start(**changes):
        made.append(Compiler(**{"seconds": 5.0, "memory_mb": 512, "cache_entries": 8, **changes}))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_a_bomb_is_killed_and_the_next_grammar_compiles(make):
    compiler = make(seconds=0.2)
    compiler.compile(PLAIN, kit.VOCABULARY)
    process = compiler._process
    started = time.monotonic()
    with pytest.raises(GrammarError, match=r"takes more than 0\.2 s of CPU time"):
        compiler.compile(bomb(10), kit.VOCABULARY)
    assert process.returncode == -signal.SIGPROF  # it is over, not abandoned
    with pytest.raises(GrammarError, match="takes more than"):
        compiler.compile(bomb(10), kit.VOCABULARY)  # from the cache
    assert (compiler.started, compiler.asked) == (1, 2)
    assert compiler.compile(Source("regex", "b+"), kit.VOCABULARY)
    assert (compiler.started, compiler.asked) == (2, 3)
    assert time.monotonic() - started < 30


def test_too_large_for_the_library_is_a_refusal(make):
    compiler = make(seconds=20.0, memory_mb=2048)
    with pytest.raises(GrammarError, match="too large"):
        compiler.compile(bomb(13), kit.VOCABULARY)


def test_memory_is_bounded(make):
    compiler = make(memory_mb=16, seconds=20.0)
    with pytest.raises(GrammarError, match="within 16 MiB"):
        compiler.compile(bomb(10), kit.VOCABULARY)
    assert compiler.compile(PLAIN, kit.VOCABULARY)


def test_answers_and_refusals_are_cached_up_to_a_number(make):
    compiler = make(cache_entries=2)
    bad = Source("regex", "(")
    for _ in range(3):
        assert compiler.compile(PLAIN, kit.VOCABULARY)
        with pytest.raises(GrammarError, match="unclosed"):
            compiler.compile(bad, kit.VOCABULARY)
    assert compiler.asked == 2
    compiler.compile(Source("regex", "b"), kit.VOCABULARY)  # the oldest goes
    compiler.compile(PLAIN, kit.VOCABULARY)
    assert compiler.asked == 4


def test_a_process_that_was_killed_from_outside_is_started_again(make):
    compiler = make()
    compiler.compile(PLAIN, kit.VOCABULARY)
    compiler._process.kill()
    compiler._process.wait()
    assert compiler.compile(Source("regex", "b"), kit.VOCABULARY)
    assert compiler.started == 2


def test_a_process_that_hangs_is_killed_and_the_client_may_come_again(make, monkeypatch):
    compiler = make(seconds=0.01)
    compiler.compile(PLAIN, kit.VOCABULARY)
    process = compiler._process
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(module, "WALL_EXTRA", 0.1)
    with pytest.raises(UnavailableError, match="too busy"):
        compiler.compile(Source("regex", "b"), kit.VOCABULARY)
    assert process.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert compiler.compile(Source("regex", "b"), kit.VOCABULARY)  # was not remembered as a refusal


def test_many_threads(make):
    compiler = make(cache_entries=64)
    found, threads = {}, []
    for i in range(24):
        source = Source("regex", "a" * (1 + i % 6))
        threads.append(
            threading.Thread(target=lambda i=i, source=source: found.update({i: compiler.compile(source, kit.VOCABULARY)}))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 24
    assert (compiler.started, compiler.asked) == (1, 6)


def test_closing_ends_the_process(make):
    compiler = make()
    compiler.compile(PLAIN, kit.VOCABULARY)
    process = compiler._process
    compiler.close()
    assert process.returncode is not None
    compiler.close()
