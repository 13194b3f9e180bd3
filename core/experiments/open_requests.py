"""Requests that are in experiments and have not ended: what was decided about them, until their rows are written."""

from __future__ import annotations

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
    failures: int
    """Allocation failures of all engines when it was admitted."""


class OpenRequests:
    def __init__(self, experiments: Mapping[str, Experiment]) -> None:
        self._experiments = experiments
        self._tickets: dict[str, _Ticket] = {}
        """By API request."""
        self._pid = 0
        self._engine = 0
        self._failures = 0
        self._failures_of_engine = 0

    def admit(self, group: str, decisions: Sequence[Decision], choices: int) -> None:
        """Takes the place of what was decided about the same request before. Its rows have been reserved."""
        self.dropped(group)
        if decisions:
            self._tickets[group] = _Ticket(decisions, choices, self._failures)

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

    def step(self, step: StepReport) -> None:
        """The engine's count of allocation failures only grows, and begins anew with each engine."""
        self._failures += max(0, step.allocation_failures - self._failures_of_engine)
        self._failures_of_engine = step.allocation_failures

    def engine_started(self, started: EngineStarted) -> None:
        self._pid, self._engine = started.info.pid, started.restarts
        self._failures_of_engine = 0

    def _life(self, ticket: _Ticket) -> Life:
        return Life(self._pid, self._engine, self._failures - ticket.failures)
