"""Requests that are in experiments and have not ended: what was decided about them, until their rows are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import TokenbusError
from ..front.admission import ParsedRequest
from ..front.events import EngineStarted, RequestRecord
from ..messages import StepReport
from .running import Decision, Experiment, Life


@dataclass(slots=True)
class _Ticket:
    decisions: Sequence[Decision]
    choices: int
    """Rows to come for each decision, reserved with its experiment's writer."""
    engine: str
    """Key of the engine that it goes to."""
    failures: int
    """Allocation failures of all that engine's lives when it was admitted."""


@dataclass(slots=True)
class _Engine:
    """What is known of one engine, over its lives."""

    pid: int = 0
    life: int = 0
    failures: int = 0
    failures_of_life: int = 0


class OpenRequests:
    def __init__(self, experiments: Mapping[str, Experiment]) -> None:
        self._experiments = experiments
        self._tickets: dict[str, _Ticket] = {}
        """By API request."""
        self._engines: dict[str, _Engine] = defaultdict(_Engine)
        """By the arm that has it for its own; "": the server's."""

    def admit(self, group: str, decisions: Sequence[Decision], choices: int) -> None:
        """Takes the place of what was decided about the same request before. Its rows have been reserved."""
        self.dropped(group)
        if decisions:
            engine = next((decision.engine for decision in decisions if decision.engine), "")
            self._tickets[group] = _Ticket(decisions, choices, engine, self._engines[engine].failures)

    def dropped(self, group: str) -> None:
        """There will be no row. Unknown ones are ignored."""
        if (ticket := self._tickets.pop(group, None)) is not None:
            for decision in ticket.decisions:
                self._experiments[decision.experiment].writer.give_back(ticket.choices)

    def not_given(self, group: str) -> None:
        """It runs without the switches of its arms. Where there were none to give, that changes nothing."""
        ticket = self._tickets[group]
        ticket.decisions = [replace(d, excluded=d.excluded or "failed") if d.own else d for d in ticket.decisions]

    def refused(self, parsed: ParsedRequest, error: TokenbusError, now: float) -> None:
        """One row for the API request, whatever its choices."""
        if (ticket := self._tickets.pop(parsed.group, None)) is None:
            return
        life = self._life(ticket)
        for decision in ticket.decisions:
            experiment = self._experiments[decision.experiment]
            experiment.writer.put(experiment.refused(decision, parsed, error, now, life))
            experiment.writer.give_back(ticket.choices - 1)

    def ended(self, record: RequestRecord) -> None:
        """One choice has ended."""
        if (ticket := self._tickets.get(record.group)) is None:
            return
        ticket.choices -= 1
        if not ticket.choices:
            del self._tickets[record.group]
        life = self._life(ticket)
        for decision in ticket.decisions:
            experiment = self._experiments[decision.experiment]
            experiment.writer.put(experiment.ended(decision, record, life))

    def step(self, step: StepReport, key: str = "") -> None:
        """The engine's count of allocation failures only grows, and begins anew with each life."""
        engine = self._engines[key]
        engine.failures += max(0, step.allocation_failures - engine.failures_of_life)
        engine.failures_of_life = step.allocation_failures

    def engine_started(self, started: EngineStarted, key: str = "") -> None:
        engine = self._engines[key]
        engine.pid, engine.life, engine.failures_of_life = started.info.pid, started.restarts, 0

    def _life(self, ticket: _Ticket) -> Life:
        engine = self._engines[ticket.engine]
        return Life(engine.pid, engine.life, engine.failures - ticket.failures)
