"""Which requests may have killed the engine, and which one has. Pure logic: it knows ids and positions, nothing else.

A request that was run, or was being taken in, when the engine died is a suspect. Suspects are run one at a time, with nothing else in the
engine, until each has given a token (or two, where steps are planned ahead: recovery.py counts): that clears it, whatever the death's
cause was. One that is alone when the engine dies, twice at the same position (the runs of the two steps overlap) and without being cleared
in between, is the cause.

So one poisoned request costs three restarts at most (with the others, alone, alone again), and nobody else ends for it.
"""

from __future__ import annotations

from collections.abc import Mapping

Run = tuple[int, int]
"""(first, last): tokens[first:last] of a request were being run."""
TAKEN_IN: Run = (-1, 0)
"""No token of it had been run yet."""


class Quarantine:
    def __init__(self) -> None:
        self._suspects: dict[str, list[Run]] = {}
        """With the runs in which each was alone when the engine died; in the order in which they are to be tried."""

    def blame(self, running: Mapping[str, Run]) -> str | None:
        """The engine died in a step with these runs. The request that is to be ended for it, no suspect any more; None: all of them are
        suspects now."""
        if len(running) != 1:
            for request_id in running:
                self._suspects.setdefault(request_id, [])
            return None
        ((request_id, run),) = running.items()
        deaths = self._suspects.pop(request_id, [])
        if any(run[0] < last and first < run[1] for first, last in deaths):
            return request_id
        self._suspects[request_id] = [*deaths, run]  # last in line: the others get their turn first
        return None

    def clear(self, request_id: str) -> None:
        """It has given a token, or has ended. Ids that are no suspects are ignored."""
        self._suspects.pop(request_id, None)

    def next(self) -> str | None:
        """The suspect to run now, alone; None when there is none."""
        return next(iter(self._suspects), None)

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._suspects
