"""The waiting line as the scheduler sees it: a policy behind a guard.

Whatever a policy does - raise, answer nonsense, lose a request - the line goes on: core's first-come-first-served takes over with every
request that waits, and the failure is told once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import structlog

from ..errors import PluginError, plain_text
from ..policy import FcfsPolicy, SchedulingPolicy, Work
from ..request import Request

log = structlog.get_logger(__name__)

FailureCallback = Callable[[str, PluginError], None]


class WaitingLine:
    """`owner` is the plugin that holds the slot ("" for core's default); `on_failure(owner, error)` is told when it is dropped."""

    def __init__(self, on_failure: FailureCallback) -> None:
        self.policy: SchedulingPolicy = FcfsPolicy()
        self.owner = ""
        self._on_failure = on_failure
        self._members: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._members

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def swap(self, policy: SchedulingPolicy, owner: str, now: float) -> None:
        """Move everybody to another policy; when it can't take them, core's takes them."""
        self.policy, self.owner = policy, owner
        try:
            for request in self._members.values():
                policy.add(request, preempted=request.preemptions > 0, now=now)
        except Exception as error:
            self._fall_back(error, now)

    def add(self, request: Request, *, preempted: bool, now: float) -> None:
        self._members[request.request_id] = request
        try:
            self.policy.add(request, preempted=preempted, now=now)
        except Exception as error:
            self._fall_back(error, now)

    def peek(self, now: float) -> Request | None:
        """The request to try next; None only when nobody waits."""
        if not self._members:
            return None
        try:
            return self._member(self.policy.peek(now))
        except Exception as error:
            self._fall_back(error, now)
            return self.policy.peek(now)

    def _member(self, head: Request | None) -> Request:
        if head is None or self._members.get(head.request_id) is not head:
            raise RuntimeError(f"peek gave {head!r} while {len(self._members)} wait")
        return head

    def admit(self, request: Request, now: float) -> None:
        """Take out the head: it joins the batch."""
        del self._members[request.request_id]
        try:
            self.policy.pop(request)
        except Exception as error:
            self._fall_back(error, now)

    def remove(self, request: Request, now: float) -> None:
        """Take out anybody: the request has ended."""
        del self._members[request.request_id]
        try:
            self.policy.remove(request)
        except Exception as error:
            self._fall_back(error, now)

    def victim(self, running: Sequence[Request], now: float) -> Request:
        try:
            return _one_of(running, self.policy.victim(running, now))
        except Exception as error:
            self._fall_back(error, now)
            return self.policy.victim(running, now)

    def displaces(self, waiting: Request, running: Sequence[Request], now: float) -> Request | None:
        try:
            victim = self.policy.displaces(waiting, running, now)
            return None if victim is None else _one_of(running, victim)
        except Exception as error:
            self._fall_back(error, now)
            return None

    def compose(self, running: Sequence[Request], now: float) -> tuple[Work, ...]:
        """What to try for the next step, in order; everything comes last."""
        try:
            return (*_kinds(self.policy.compose(running, now)), Work.ALL)
        except Exception as error:
            self._fall_back(error, now)
            return (Work.ALL,)

    def reserve(self, request: Request) -> int:
        """Tokens that a request wants room for, 0 or more."""
        try:
            return _tokens(self.policy.reserve(request))
        except Exception as error:
            self._fall_back(error, time.time())
            return 0

    def give_up(self, why: str, now: float) -> None:
        """The policy contradicts itself: core's takes over."""
        self._fall_back(RuntimeError(why), now)

    def _fall_back(self, error: Exception, now: float) -> None:
        owner, self.owner = self.owner, ""
        if not owner:
            raise error
        failure = PluginError(
            f"plugin {owner!r} failed in scheduling_policy: {type(error).__name__}: {plain_text(error)}; "
            "first come, first served from now on",
            plugin=owner,
            hook="scheduling_policy",
        )
        failure.__cause__ = error
        log.error("scheduling_policy_failed", plugin=owner, error=failure.message, waiting=len(self._members), exc_info=error)
        self.swap(FcfsPolicy(), "", now)
        self._on_failure(owner, failure)

    def check_integrity(self) -> None:
        """RuntimeError unless the policy holds exactly those that wait."""
        held: dict[str, Any] = {request.request_id: request for request in self.policy}
        if held.keys() != self._members.keys() or len(self.policy) != len(self._members):
            raise RuntimeError(f"waiting line: policy {sorted(held)} != members {sorted(self._members)}")


def _kinds(answer: Sequence[Work]) -> Sequence[Work]:
    if answer and not all(type(kind) is Work and kind for kind in answer):
        raise RuntimeError(f"compose gave {answer!r:.80}")
    return answer


def _tokens(answer: int) -> int:
    if type(answer) is not int or answer < 0:
        raise RuntimeError(f"reserve gave {answer!r:.40}")
    return answer


def _one_of(running: Iterable[Request], answer: Request) -> Request:
    if not any(request is answer for request in running):
        raise RuntimeError(f"answered {answer!r}, which is not running")
    return answer
