"""Planning a step before the result of the one before it is there.

    step N   sent ── computes ────────────────────────> result ──> update
                 └─ expected(N): requests as N will leave them ──> plan N+1, sent ── waits ──> computes

What N will do to its requests is known without its result, but for the ids: a chunk advances, a request whose last known token is run
gets exactly one new token (PENDING stands for it while N+1 is planned), and one that thereby reaches its limit ends and is left out. The
worker appends sampled tokens by itself, so N+1's order needs no ids. Once N+1 is planned the requests are as they were: what everybody else
sees, and what N's update starts from, is never a guess. What stays of the planning are blocks taken and requests that have joined.

Two things can make a guess wrong. A request ends in N by a stop token, an error or a cancel: N+1 then runs some tokens in vain, and their
result is dropped. Or N fails as a whole: then the worker runs nothing of N+1 (`StepInput.ahead`).

Why blocks that an ended request gives back are safe to hand out while N+1 still writes to them: N+1 was planned before they came back,
so they can only go to N+2 or later, and the worker runs steps in order: whoever gets them writes behind N+1, and reads only what it
wrote itself, or what a cache registered. And a cache's block is never written to: a step writes at and behind its request's first token
that is not computed, and only blocks that lie wholly before it are full (`blocks_filled`).

Why a step waits for the result before it instead (`StepReport.waited`):

    drafts      a request in flight has drafts, or is likely to: how many tokens it gets, only the result says
    policy      the scheduling policy composes steps itself, from what requests have done
    blocks      there are not enough: nobody is preempted while a step is in flight
    displacing  the policy would have a running request make room for one that waits
    switches    the step in flight tells the worker of other switches or settings, which it may refuse
    failed      the step in flight will not be run
    message     something waits to be applied between two steps with nothing in flight    (the loop says so)
    plugin      a plugin has failed, and must be dealt with in the same way               (the loop says so)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..plan import StepInput, StepPlan
from ..policy import SchedulingPolicy
from ..request import PENDING, Request
from .batch import Batch

DRAFTS_EXPECTED = 8
"""New tokens for which a request whose worker has proposed drafts is expected to get more of them."""


class MustWaitError(Exception):
    """The step can't be planned before the result of the one in flight; nothing has been taken yet. Its text says why, in a word."""


@dataclass(slots=True)
class Flight:
    """A step that was planned and has no result yet."""

    plan: StepPlan
    order: StepInput
    proposers: dict[str, str]
    """Who proposed the order's drafts, by request."""
    waited: str = ""
    """Why it was not planned ahead."""
    void: bool = False
    """The step it counted on has failed."""
    discarded: int = 0
    """Tokens of it that belong to requests which ended before it began."""


def why_wait(flight: Flight, batch: Batch) -> str:
    """Why the step after this one can't be planned before its result; "": as far as can be said beforehand, it can."""
    order = flight.order
    if flight.void:
        return "failed"
    if order.features is not None or order.settings:
        return "switches"
    if type(batch.line.policy).compose is not SchedulingPolicy.compose:
        return "policy"
    requests = batch.requests
    if order.drafts or any(_may_have_drafts(requests[name]) for name in order.num_tokens if name in requests):
        return "drafts"
    return ""


def _may_have_drafts(request: Request) -> bool:
    return bool(request.hooks.propose_drafts) or len(request.tokens) < request.drafts_expected


@contextmanager
def expected(batch: Batch, order: StepInput) -> Iterator[int]:
    """While this is open requests are as the step in flight will leave them. Yields how many of them will have ended: those have no token
    to run, and keep their blocks."""
    before: list[tuple[Request, int, bool]] = []
    ending = 0
    for request_id, num_tokens in order.num_tokens.items():
        request = batch.requests.get(request_id)
        if request is None:
            continue
        computed, known = request.computed, len(request.tokens)
        goes_on = computed + num_tokens == known and known + 1 < request.limit
        before.append((request, computed, goes_on))
        request.computed = computed + num_tokens
        if goes_on:
            request.tokens.append(PENDING)
        elif request.computed == known:
            ending += 1
    try:
        yield ending
    finally:
        for request, computed, goes_on in before:
            if goes_on:
                request.tokens.pop()
            request.computed = computed
