"""Smaller steps after one that the device had no memory for.

too large     a step may run half the tokens of the one that failed; running requests that no longer fit in are preempted
good steps    after RECOVERY of them it may run twice as many, until that is no limit any more
no smaller    one request is left, and it runs one token, or a prompt that nobody chunks: it ends with an error
"""

from __future__ import annotations

from ..plan import StepPlan

RECOVERY = 64
"""Good steps before a larger one is tried."""


class Relief:
    def __init__(self) -> None:
        self.limit: int | None = None
        """Tokens that a step may run, and so requests; None: as the settings say."""
        self.preempted: list[str] = []
        """Requests that gave way, for the next plan to tell."""
        self._good = 0

    def shrink(self, plan: StepPlan) -> bool:
        """There was no memory for `plan`. False when a smaller step is of no use."""
        tokens, requests = sum(plan.num_tokens.values()), len(plan.num_tokens)
        kept_to_budget = tokens <= plan.budget
        if not requests or (requests == 1 and (tokens == 1 or not kept_to_budget)):
            return False
        smaller = (
            tokens // 2 if kept_to_budget else min(tokens, requests) // 2
        )  # the budget bounds no prompt that isn't chunked
        self.limit, self._good = max(1, smaller), 0
        return True

    def went_well(self, settled: int) -> None:
        """A step gave a result. settled: the token budget of the settings."""
        if self.limit is None:
            return
        self._good += 1
        if self._good >= RECOVERY:
            self._good = 0
            self.limit = None if 2 * self.limit >= settled else 2 * self.limit
