"""Blame and recovery by themselves, with an engine that is a few lines: whoever poisons it ends, and nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from engine_harness import request
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus.core.front.apart import Apart
from tokenbus.core.front.journal import Journal
from tokenbus.core.front.quarantine import TAKEN_IN, Quarantine
from tokenbus.core.front.recovery import Recovery
from tokenbus.core.host import PluginHost
from tokenbus.core.messages import Add, Finish, StepBegins
from tokenbus.core.request import AdmittedRequest

AT_INTAKE = -1
"""Where a request kills the engine: as it is taken in, or when it has so many new tokens."""


def test_suspects_are_tried_in_turn_and_ended_only_for_dying_alone_twice_at_one_position():
    quarantine = Quarantine()
    assert quarantine.blame({}) is None
    assert quarantine.next() is None
    assert quarantine.blame({"a": (4, 5), "b": (6, 7)}) is None
    assert (len(quarantine), quarantine.next(), "b" in quarantine) == (2, "a", True)
    assert quarantine.blame({"a": (0, 3)}) is None
    assert quarantine.next() == "b", "who died alone goes last"
    quarantine.clear("b")
    assert quarantine.blame({"a": (3, 5)}) is None, "another position"
    assert quarantine.blame({"a": TAKEN_IN}) is None, "yet another"
    assert quarantine.blame({"a": (2, 3)}) == "a", "part of the first"
    assert (len(quarantine), quarantine.next()) == (0, None)


def test_a_token_in_between_takes_the_blame_away():
    quarantine = Quarantine()
    for _ in range(5):
        assert quarantine.blame({"a": (4, 5)}) is None
        quarantine.clear("a")
    for run in (TAKEN_IN, (4, 5)):
        assert quarantine.blame({"a": run}) is None
    assert quarantine.blame({"a": (0, 5)}) == "a"


def test_who_died_together_twice_joins_one_at_a_time_and_after_the_third_waits_for_the_others_end():
    apart = Apart()
    for _ in range(2):
        assert all(apart.may_join(name, {"a", "b", "c", "d"} - {name}) for name in "abcd")
        apart.died(["a", "b", "c", "d"])
    apart.joins("a", set())
    assert apart.may_join("b", {"a"})
    apart.joins("b", {"a"})
    assert not apart.may_join("c", {"a", "b"}), "b has not run with a yet"
    assert apart.may_join("new", {"a", "b"})
    apart.survived({"a", "b", "new"})
    assert apart.may_join("c", {"a", "b"})
    apart.joins("c", {"a", "b"})
    apart.died({"a", "b", "c"})
    assert not apart.may_join("c", {"a", "b"})
    assert len(apart) == 2
    assert apart.may_join("b", {"a"}), "they have run together in between"
    apart.joins("b", {"a"})
    assert apart.may_join("d", {"a", "b"}), "its turn has come"
    apart.survived({"a", "b", "d"})
    apart.ended("a")
    assert not apart.may_join("c", {"b", "d"})
    apart.ended("b")
    assert apart.may_join("c", {"d"})
    apart.survived({"c", "d"})
    assert len(apart) == 0
    assert apart._deaths == {}


def test_deaths_with_a_common_step_in_between_keep_nobody_apart():
    apart = Apart()
    for _ in range(5):
        apart.died(["a", "b"])
        apart.survived({"a"})
        assert apart.may_join("b", {"a"})
        apart.survived({"a", "b"})
    assert len(apart) == 0


@dataclass
class Engine:
    """Runs everything it has in each step, prompts in chunks; one token each once the prompt is done."""

    poison: dict[str, int]
    pairs: list[tuple[str, str, int]]
    """Two that kill together, from so many new tokens of the first on."""
    chunk: int
    inside: dict[str, AdmittedRequest] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    """Of all that ever were inside."""
    known: dict[str, int] = field(default_factory=dict)
    run: dict[str, int] = field(default_factory=dict)
    taken: int = 0
    flight: StepBegins | None = None
    """The step that was planned while the last one computed."""

    def add(self, request: AdmittedRequest) -> bool:
        """Whether it lives on."""
        if self.poison.get(request.request_id) == AT_INTAKE:
            return False
        self.taken += 1
        self.inside[request.request_id] = request
        self.prompts[request.request_id] = request.prompt
        self.known[request.request_id] = len(request.prompt) + (len(request.resumed.tokens) if request.resumed else 0)
        self.run[request.request_id] = 0
        return True

    def begins(self, step_id: int) -> StepBegins:
        self.chunk = self.chunk % 40 + 1  # another one in each step
        runs = {name: (self.run[name], min(self.known[name], self.run[name] + self.chunk)) for name in self.inside}
        return StepBegins(step_id=step_id, runs=runs, taken=self.taken)

    def begins_behind(self, step: StepBegins) -> StepBegins:
        """The step after one that computes; `runs` may be empty."""
        self.chunk = self.chunk % 40 + 1
        runs = {}
        for name, admitted in self.inside.items():
            first, known = step.runs.get(name, (0, self.run[name]))[1], self.known[name]
            if name in step.runs and first == known:
                known += 1
                if known - len(admitted.prompt) >= self._most(admitted):
                    continue
            runs[name] = (first, min(known, first + self.chunk))
        return StepBegins(step_id=step.step_id + 1, runs=runs, taken=self.taken)

    def dies(self, step: StepBegins, behind: StepBegins | None = None) -> bool:
        """Whether it does in this step; in the one behind another, when that is given."""
        known = (
            self.known
            if behind is None
            else {name: n + (behind.runs.get(name, (0, 0))[1] == n) for name, n in self.known.items()}
        )
        new = {name: known[name] - len(self.prompts[name]) for name in step.runs}
        return any(
            last == known[name] and new[name] == self.poison.get(name, -2) for name, (_, last) in step.runs.items()
        ) or any({a, b} <= step.runs.keys() and new[a] >= at for a, b, at in self.pairs)

    def _new(self, name: str) -> int:
        return self.known[name] - len(self.inside[name].prompt)

    def _most(self, admitted: AdmittedRequest) -> int:
        until = admitted.resumed.until if admitted.resumed else None
        return min(admitted.max_tokens, admitted.max_tokens if until is None else until)

    def finish(self, step: StepBegins) -> tuple[dict[str, int], dict[str, Finish]]:
        tokens: dict[str, int] = {}
        ends: dict[str, Finish] = {}
        for name, (_, last) in step.runs.items():
            if name not in self.inside:
                continue  # it has ended since
            self.run[name] = last
            if last < self.known[name]:
                continue
            tokens[name] = 1000 + self._new(name)
            self.known[name] += 1
            if self._new(name) >= self._most(self.inside[name]):
                ends[name] = Finish(reason="length")
                del self.inside[name]
        return tokens, ends


def both(step: StepBegins, behind: StepBegins) -> StepBegins:
    """What is told of two steps in flight."""
    runs = dict(step.runs)
    for name, (first, last) in behind.runs.items():
        runs[name] = (runs.get(name, (first, last))[0], last)
    return StepBegins(step_id=behind.step_id, runs=runs, taken=behind.taken, steps=2)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    poison=st.dictionaries(st.integers(0, 11), st.integers(AT_INTAKE, 11), max_size=4),
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), st.integers(0, 6)), max_size=4),
    chunk=st.integers(1, 40),
    outside=st.sets(st.integers(0, 60), max_size=4),
    late=st.dictionaries(st.integers(0, 80), st.tuples(st.integers(1, 30), st.integers(1, 12)), max_size=4),
    batch=st.integers(1, 12),
    cancels=st.dictionaries(st.integers(0, 40), st.integers(0, 11), max_size=4),
    ahead=st.booleans(),
    unsent=st.integers(1, 4),
)
def test_only_poison_ends_all_others_get_every_token_and_restarts_are_bounded(
    lengths: list[tuple[int, int]],
    poison: dict[int, int],
    pairs: list[tuple[int, int, int]],
    chunk: int,
    outside: set[int],
    late: dict[int, tuple[int, int]],
    batch: int,
    cancels: dict[int, int],
    ahead: bool,
    unsent: int,
):
    """pairs: which two kill whenever they run together, from when on; outside: steps before which somebody kills the engine, whatever
    it does; late: requests that come at such steps; batch: of those that are there from the beginning, so many are handed over at once;
    cancels: who is given up by its client, and when; ahead: each step is planned and told while the one before it computes; unsent: when a
    step begins to kill, the output of the one before it has not gone out, every so many steps."""
    journal = Journal()
    inbox: list[AdmittedRequest] = []
    alone_and_killed: list[set[str]] = []

    def post(message: Add) -> bool:
        inbox.extend(message.requests)
        return True

    recovery = Recovery(journal, PluginHost("front"), post)
    everything = {f"r{i}": (prompt, tokens) for i, (prompt, tokens) in enumerate(lengths)}
    poisoned = {f"r{i}": at for i, at in poison.items() if i < len(lengths) and at < lengths[i][1]}
    quarrels = [(f"r{a}", f"r{b}", at) for a, b, at in pairs if a != b]
    given_out: dict[str, list[int]] = {name: [] for name in everything}
    errors: set[str] = set()
    finished: set[str] = set()
    left: set[str] = set()

    def end(name: str, finish: Finish) -> None:
        journal.end(name)
        recovery.ended(name)
        {"error": errors, "cancelled": left, "length": finished}[finish.reason].add(name)

    def cancel(name: str) -> bool:
        """Whether the engine must be told."""
        entry = journal.get(name)
        if entry is None or entry.cancel_reason is not None:
            return False
        entry.cancel_reason = "cancelled"
        if recovery.holds(name):
            end(name, recovery.cancelled(name))
            return False
        return True

    def admit(names: list[str]) -> None:
        made = [request(name, list(range(1, everything[name][0] + 1)), everything[name][1]) for name in names]
        journal.admit(made)
        recovery.submit(made)

    recovery.started()
    names = list(everything)
    for first in range(0, len(names), batch):
        admit(names[first : first + batch])
    engine, deaths, step_id = Engine(poisoned, quarrels, chunk), 0, 0
    while len(journal) or any(at > step_id for at in late):
        step_id += 1
        assert step_id < 5000
        if step_id in late:
            name = f"late{step_id}"
            everything[name], given_out[name] = late[step_id], []
            admit([name])
        given_up = f"r{cancels[step_id]}" if step_id in cancels else ""
        told = cancel(given_up)
        alive = all(engine.add(inbox.pop(0)) for _ in range(len(inbox)))
        if (
            alive
            and told
            and engine.inside.pop(given_up, None)
            and (finish := recovery.finished(given_up, Finish(reason="cancelled")))
        ):
            end(given_up, finish)
        step = None
        if alive and engine.inside:
            step = engine.flight or engine.begins(step_id)
            behind = engine.flight = engine.begins_behind(step) if ahead else None
            step = msgspec.structs.replace(step, steps=1 + ahead)
            recovery.step_begins(step if behind is None else both(step, behind))
            alive = not engine.dies(step)
            if alive and behind is not None and step_id % unsent == 0:
                alive = not engine.dies(behind, step)
            if behind is not None and not behind.runs:
                engine.flight = None
        if alive and step_id in outside:
            alive = False
            alone_and_killed.append(set(engine.inside))
        if not alive:
            deaths += 1
            inbox.clear()
            for name, finish in recovery.died("it died").items():
                assert finish.error is None or "twice at the same position" in finish.error.message
                end(name, finish)
            engine = Engine(poisoned, quarrels, chunk)
            recovery.started()
        elif step is not None:
            tokens, ends = engine.finish(step)
            for name, token in tokens.items():
                recovery.emitted(name, [token], None)
                given_out[name].append(token)
            for name, given_back in ends.items():
                if (finish := recovery.finished(name, given_back)) is not None:
                    end(name, finish)
        assert recovery.advance() == {}
    unlucky = {name for names in alone_and_killed if len(names) == 1 for name in names}
    assert poisoned.keys() - left <= errors <= poisoned.keys() | unlucky
    assert finished == everything.keys() - errors - left
    assert len(left) <= len(cancels)
    for name in finished:
        assert given_out[name] == [1000 + i for i in range(everything[name][1])]
    assert deaths <= 3 * len(poisoned) + 2 * len(outside) + 3 * len({frozenset(pair[:2]) for pair in quarrels})
    assert len(recovery.apart) == len(recovery.quarantine) == 0


@pytest.mark.parametrize("reason", ["cancelled", "stop"])
def test_a_request_given_up_while_it_is_being_given_back_ends(reason: str):
    journal, posted = Journal(), []
    recovery = Recovery(journal, PluginHost("front"), lambda message: posted.append(message) or True)
    made = [request(name, [1], 9) for name in ("a", "b")]
    journal.admit(made)
    recovery.submit(made)
    recovery.step_begins(StepBegins(step_id=1, runs={"a": (0, 1), "b": (0, 1)}, taken=2))
    assert recovery.died("x") == {}
    recovery.started()
    recovery.advance()
    (again,) = posted[-1].requests
    assert (again.request_id, again.resumed.until) == ("a", 1)
    entry = journal.get("a")
    assert entry is not None
    entry.cancel_reason = reason
    recovery.emitted("a", [5], None)
    finish = recovery.finished("a", Finish(reason="length"))
    assert finish is not None
    assert finish.reason == reason


def test_suspects_go_in_one_at_a_time_for_a_token_and_then_everybody():
    journal, posted = Journal(), []
    recovery = Recovery(journal, PluginHost("front"), lambda message: posted.append(message.requests) or True)

    def admit(*names: str) -> None:
        made = [request(name, [1, 2], 9) for name in names]
        journal.admit(made)
        recovery.submit(made)

    def sent() -> list[tuple[str, list[int], int | None]]:
        assert recovery.advance() == {}
        out = [(r.request_id, r.resumed.tokens, r.resumed.until) if r.resumed else (r.request_id, [], None) for (r,) in posted]
        posted.clear()
        return out

    admit("a", "b", "waits")
    posted.clear()
    recovery.step_begins(StepBegins(step_id=1, runs={"a": (0, 2), "b": (0, 2)}, taken=3))
    recovery.emitted("a", [7], None)
    recovery.emitted("b", [8], None)
    assert recovery.died("x") == {}
    assert sent() == [], "no engine yet"
    recovery.started()
    assert sent() == [("a", [7], 2)]
    admit("new")
    assert sent() == [], "one at a time"
    recovery.step_begins(StepBegins(step_id=1, runs={"a": (0, 3)}, taken=1))
    recovery.emitted("a", [9], None)
    assert len(recovery.quarantine) == 1, "its token has cleared it"
    assert recovery.finished("a", Finish(reason="length")) is None
    assert sent() == [("b", [8], None)], "the last one stays"
    recovery.step_begins(StepBegins(step_id=2, runs={"b": (0, 3)}, taken=2))
    assert sent() == []
    recovery.emitted("b", [9], None)
    assert len(recovery.quarantine) == 0
    assert sent() == [("a", [7, 9], None), ("waits", [], None), ("new", [], None)]
    assert not any(recovery.holds(name) for name in ("a", "b", "waits", "new"))


def test_preemptions_and_notes_of_a_dead_engine_are_kept():
    journal, posted = Journal(), []
    recovery = Recovery(journal, PluginHost("front"), lambda message: posted.append(message) or True)
    made = [request(name, [1], 9) for name in ("a", "b")]
    journal.admit(made)
    recovery.submit(made)
    recovery.step_begins(StepBegins(step_id=1, runs={"a": (0, 1), "b": (0, 1)}, taken=2))
    recovery.step_begins(StepBegins(step_id=2, runs={"a": (1, 2)}, taken=2, preempted=("b",)))
    recovery.step_begins(StepBegins(step_id=3, runs={"b": (0, 2)}, taken=2, preempted=("a",)))
    recovery.step_begins(StepBegins(step_id=4, runs={"a": (0, 2), "b": (2, 3)}, taken=2, preempted=("gone",)))
    recovery.died("x")
    recovery.started()
    recovery.advance()
    (again,) = posted[-1].requests
    assert (again.request_id, again.resumed.preemptions, again.resumed.notes) == ("a", 1, {})
    recovery.emitted("a", [5], None)
    assert recovery.finished("a", Finish(reason="length", preemptions=4, notes={"p": "why"})) is None
    recovery.emitted("b", [5], None)
    recovery.advance()
    (again,) = posted[-1].requests
    assert (again.request_id, again.resumed.preemptions, again.resumed.notes) == ("b", 1, {})
    recovery.died("x")
    entry = journal.get("a")
    assert entry is not None
    entry.cancel_reason = "cancelled"
    finish = recovery.cancelled("a")
    assert (finish.preemptions, finish.notes) == (4, {"p": "why"})
