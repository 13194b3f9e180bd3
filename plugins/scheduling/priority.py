"""Priority classes with ageing. The request field `priority` is a class from -100 to 100, default 0; the lower number goes first.

One order decides everything: a request's rank is its time of arrival plus `age_seconds` for each class; the lower rank is first,
equal ranks go by arrival. So every `age_seconds` since its arrival lift a request by one class over those who come now: nobody starves.
Within a class it is first come, first served.

    line           lowest rank first; a preempted request is back at its old place
    blocks run out the running request of the highest rank gives way
    batch or pool  the head of the line displaces the running request of the highest rank, if that one is of a less urgent class and
    is full        of a higher rank (so not one that arrived long enough before)

A rank never changes, so no two requests displace each other in turn, and the one of the lowest rank always advances.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...core.errors import FieldError
from ...core.plugin import Plugin, PluginInfo, hookimpl
from ...core.policy import ORDER, OrderedPolicy, SchedulingPolicy

if TYPE_CHECKING:
    from ...core.contexts import AdmissionContext
    from ...core.request import Request

LOWEST, HIGHEST = -100, 100


class PrioritySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    age_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Seconds since arrival that are worth one class."""


class PriorityPolicy(OrderedPolicy):
    def __init__(self, age_seconds: float) -> None:
        super().__init__()
        self._age_seconds = age_seconds

    def rank(self, request: Request) -> float:
        return request.arrival + class_of(request) * self._age_seconds

    def victim(self, running: Sequence[Request], now: float) -> Request:
        return max(running, key=self._place)

    def displaces(self, waiting: Request, running: Sequence[Request], now: float) -> Request | None:
        victim = max(running, key=self._place)
        return victim if class_of(waiting) < class_of(victim) and self.rank(waiting) < self.rank(victim) else None

    def _place(self, request: Request) -> tuple[float, int]:
        return self.rank(request), request.stash.get(ORDER) or 0


def class_of(request: Request) -> int:
    return request.fields.get("priority", 0)


class Priority(Plugin):
    info = PluginInfo(
        name="scheduling.priority",
        summary="priority classes with ageing; urgent requests displace less urgent ones",
        scope="step",
        lossless=True,
        slot="scheduling",
        claims={"priority"},
    )
    Settings = PrioritySettings

    @hookimpl
    def check_fields(self, fields: dict[str, Any], request: AdmissionContext) -> None:
        value = fields["priority"]
        if not isinstance(value, int) or isinstance(value, bool) or not LOWEST <= value <= HIGHEST:
            raise FieldError("priority", f"must be a whole number from {LOWEST} (first) to {HIGHEST} (last), got {value!r}")

    @hookimpl
    def scheduling_policy(self) -> SchedulingPolicy:
        return PriorityPolicy(self.settings.age_seconds)
