"""How many drafts are worth a wider step.

A draft that is right with probability p gives p more tokens for the time of one more row. It is worth it as long as

    p > row * rate

with `row` the seconds that one more token adds to a step and `rate` the tokens a second that steps give without it. The i-th draft in a row
is right only if all before it are: with q the share of drafts that were right lately, its p is q ** i.

row and rate come from live steps without prompts (least squares of seconds over tokens, old steps forgotten exponentially); q from each
request's own verified drafts, and in its beginning from those of all requests. After a wrong draft, twice as many as were right are the
most. Where drafts fail again and again, or don't pay, they are tried now and then, so that text which becomes predictable is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...core.plugin import Plugin, hookimpl

if TYPE_CHECKING:
    from ...core.plan import StepPlan, StepResult
    from ...core.plugin import Role

FORGET = 0.98
"""Weight that a step keeps with each later one."""
KEEP = 0.9
"""Weight that a request's verified drafts keep with each later verification."""
FIRST_ROW = 0.05
"""Share of a step's time that one more token is thought to take, until steps of different widths were seen."""
FIRST_CAP, LARGEST_CAP = 8, 256
"""Drafts of a request in one step at first, and ever."""
PATIENCE = 3
"""Verifications without a right draft after which steps are left out: 2, then 4, 8 ... between two tries."""
SHORT_PAUSE, LONGEST_PAUSE = 8, 64
"""Steps left out where drafts don't pay; and at most."""


class StepCost:
    """seconds = base + row * tokens, from live steps."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._squares = self._products = 0.0

    def learn(self, tokens: int, seconds: float) -> None:
        for name, value in (
            ("_weight", 1.0),
            ("_tokens", tokens),
            ("_seconds", seconds),
            ("_squares", tokens * tokens),
            ("_products", tokens * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def threshold(self, requests: int, extra: float = 0.0) -> float:
        """The least probability at which a draft pays, with so many requests decoding (one token each without drafts). extra: seconds
        that it takes to propose one draft for each of them."""
        if not self._weight:
            return FIRST_ROW
        mean_tokens, mean_seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - mean_tokens**2
        if spread > 1e-6 * mean_tokens**2:
            row = (self._products / self._weight - mean_tokens * mean_seconds) / spread
        else:
            row = FIRST_ROW * mean_seconds / mean_tokens
        row = min(max(row, 0.002 * mean_seconds / mean_tokens), mean_seconds / mean_tokens)
        plain = max(mean_seconds + row * (requests - mean_tokens), row * requests)
        return min(1.0, (row * requests + extra) / plain)


class Record:
    """Verified drafts, old ones forgotten."""

    __slots__ = ("right", "tried")

    def __init__(self, right: float = 0.0, tried: float = 0.0) -> None:
        self.right = right
        self.tried = tried

    def add(self, right: int, wrong: int, keep: float = KEEP) -> None:
        self.right = keep * self.right + right
        self.tried = keep * self.tried + right + wrong

    def share(self, prior: float, weight: float = 1.0) -> float:
        return (self.right + weight * prior) / (self.tried + weight)


class Length:
    """How many drafts one request should run, by how good it and others of its kind were."""

    __slots__ = ("_all", "_cap", "_failures", "_record", "_wait")

    def __init__(self, everybody: Record) -> None:
        self._all = everybody
        self._record = Record()
        self._cap = FIRST_CAP
        """Doubles while all drafts are right; else twice as many as were."""
        self._failures = 0
        """Verifications in a row that accepted nothing."""
        self._wait = 0
        """Steps until drafts are tried again."""

    def wanted(self, most: int, threshold: float, pause: int = SHORT_PAUSE) -> int:
        """0 ... most. pause: steps left out where drafts don't pay."""
        if self._wait > 0:
            self._wait -= 1
            return 0
        share = min(self._record.share(self._all.share(0.5)), 0.995)
        if share <= threshold:
            self._wait = pause
            return 1
        return min(most, self._cap, max(1, int(math.log(threshold) / math.log(share))) if threshold > 0 else most)

    def verified(self, proposed: int, accepted: int) -> None:
        wrong = int(accepted < proposed)
        self._record.add(accepted, wrong)
        self._all.add(accepted, wrong, 0.995)
        self._cap = min(2 * max(accepted, 1 if wrong else self._cap), LARGEST_CAP)
        self._failures = 0 if accepted else self._failures + 1
        if self._failures >= PATIENCE:
            self._wait = min(LONGEST_PAUSE, 2 ** (self._failures - PATIENCE + 1))


class Proposer(Plugin):
    """What proposers share: the cost of a wider step, and how good drafts were."""

    def __init__(self, settings: Any, role: Role) -> None:
        super().__init__(settings, role)
        self.cost = StepCost()
        self.everybody = Record()
        self._decoding = 1
        """Requests in the last step without prompts."""

    def worth(self, drafts: list[int], length: Length) -> list[int]:
        """The first of `drafts`, as many as pay."""
        return drafts[: length.wanted(len(drafts), self.cost.threshold(self._decoding))] if drafts else drafts

    @hookimpl
    def step_finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        if plan.num_tokens and not plan.num_prompt_tokens:
            self._decoding = len(plan.num_tokens)
            self.cost.learn(sum(plan.num_tokens.values()), max(0.0, seconds - result.phases.get("encode", 0.0)))


def lengths(places: Sequence[int], tokens: Sequence[int], longest: int) -> dict[int, int]:
    """By place in `tokens`: how many tokens before it, up to `longest`, are those at the end."""
    end, found = len(tokens), {}
    for place in places:
        size = 0
        while size < longest and size < place and tokens[place - 1 - size] == tokens[end - 1 - size]:
            size += 1
        found[place] = size
    return found
