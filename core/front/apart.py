"""Which requests are kept out of each other's steps, because engines die when they run together. Pure logic: it knows ids, nothing else.

What kills by itself is the quarantine's matter (quarantine.py): there each suspect has run alone and has given a token. What is left are
requests that do no harm alone, and kill together: always, or from some state on. So deaths are counted for each pair that was in the step,
and forgotten once a step has given both of them a token.

    1   both go on as before
    2   they join one at a time: whoever died with somebody that runs goes in only when the one before it has run with all of those
    3   the engine has died again as one of the two had joined: it waits until the other has ended

So what kills only together costs three restarts, one more for each further request that has to wait, and the time of running one after
the other. A request that has died with nobody is never kept waiting by this, and nobody is ended for it.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet

ONE_BY_ONE = 2
ONE_AFTER_THE_OTHER = 3


class Apart:
    def __init__(self) -> None:
        self._deaths: dict[str, dict[str, int]] = {}
        """Deaths of each pair, under both of its ids; pairs without any are not there."""
        self._newcomer = ""
        """Who joined last of those that go one by one."""

    def died(self, together: Collection[str]) -> None:
        """The engine died while it ran all of these."""
        for one in together:
            for other in together:
                if other != one:
                    deaths = self._deaths.setdefault(one, {})
                    deaths[other] = deaths.get(other, 0) + 1

    def survived(self, together: AbstractSet[str]) -> None:
        """One step gave each of these a token."""
        for one in together & self._deaths.keys():
            for other in together & self._deaths[one].keys():
                del self._deaths[one][other]
            if not self._deaths[one]:
                del self._deaths[one]

    def ended(self, request_id: str) -> None:
        """It is open no more."""
        for other in self._deaths.pop(request_id, {}):
            del self._deaths[other][request_id]
            if not self._deaths[other]:
                del self._deaths[other]

    def may_join(self, request_id: str, inside: AbstractSet[str]) -> bool:
        """Whether it may go to the engine, which has those inside."""
        deaths = self._worst(request_id, inside)
        if deaths == ONE_BY_ONE:
            return self._newcomer not in inside or self._worst(self._newcomer, inside) < ONE_BY_ONE
        return deaths < ONE_AFTER_THE_OTHER

    def joins(self, request_id: str, inside: AbstractSet[str]) -> None:
        """It goes in."""
        if self._worst(request_id, inside) == ONE_BY_ONE:
            self._newcomer = request_id

    def _worst(self, request_id: str, inside: AbstractSet[str]) -> int:
        """Deaths together with the one of those inside with which there were most."""
        return max((deaths for other, deaths in self._deaths.get(request_id, {}).items() if other in inside), default=0)

    def __len__(self) -> int:
        """Pairs of which one waits until the other has ended."""
        return sum(deaths >= ONE_AFTER_THE_OTHER for row in self._deaths.values() for deaths in row.values()) // 2
