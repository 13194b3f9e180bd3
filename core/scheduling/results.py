"""What a step's result does to its requests: tokens are appended, ends found, filled blocks and drafts told."""

from __future__ import annotations

from ..errors import TokenbusError
from ..messages import StepOutput
from ..plan import StepPlan, StepResult, TokenLogprobs
from ..request import Request, Status
from .ahead import DRAFTS_EXPECTED, Flight
from .batch import Batch


class Results:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def take(self, flight: Flight, result: StepResult, output: StepOutput, now: float) -> None:
        """Take in what a step gave, but for its errors; `output` gets what clients are to see. A request that has ended since the step was
        planned gets nothing of it."""
        plan, drafts = flight.plan, flight.order.drafts
        if result.prompt_logprobs:
            output.prompt_logprobs = self._prompt_logprobs(plan, result.prompt_logprobs)
        if drafts:
            self._count_drafts(drafts, result)
        self._advance(plan, result, output, now)
        if drafts:
            self._settle_drafts(flight, result, now)
        for request_id, proposed in result.drafts.items():
            if (request := self._batch.requests.get(request_id)) is not None:
                request.proposed = len(request.tokens), proposed
                request.drafts_expected = len(request.tokens) + DRAFTS_EXPECTED

    def _advance(self, plan: StepPlan, result: StepResult, output: StepOutput, now: float) -> None:
        """Append what was sampled, check for the end, note filled blocks. The hot loop: one pass over the plan."""
        batch = self._batch
        requests, block_size = batch.requests, batch.block_size
        sampled = result.sampled
        stale: list[str] | None = None
        ending: list[tuple[Request, str, int | None]] | None = None
        filled: list[tuple[Request, int, int]] | None = None
        for request_id, num_tokens in plan.num_tokens.items():
            request = requests.get(request_id)
            if request is None:
                stale = stale or []
                stale.append(request_id)
                continue
            before = request.computed
            new = sampled.get(request_id)
            if new is None:
                computed = before + num_tokens
            else:
                tokens = request.tokens
                known = len(tokens)
                if len(new) == 1 and known + 1 < request.limit and new[0] not in request.stop_ids:
                    computed = known
                    tokens.append(new[0])
                else:
                    kept, reason, stop_token = accept(request, new)
                    computed = min(known + len(new) - 1, len(tokens))
                    if reason is not None:
                        ending = ending or []
                        ending.append((request, reason, stop_token))
                        if len(kept) < len(new):
                            _trim(output, result, request_id, kept)
            request.computed = computed
            if computed // block_size != before // block_size and request.hooks.blocks_filled:
                filled = filled or []
                filled.append((request, before // block_size, computed // block_size))
        if filled is not None:
            self._blocks_filled(filled, now)
        if ending is not None:
            for request, reason, stop_token in ending:
                if request.status is not Status.FINISHED:
                    batch.end(request, reason, now, stop_token=stop_token, keep_in_running=True)
            batch.sweep()
        if stale is not None:
            for request_id in stale:
                _trim(output, result, request_id, [])

    def _count_drafts(self, ran: dict[str, list[int]], result: StepResult) -> None:
        """Before any of its requests ends."""
        for request_id, drafts in ran.items():
            request, new = self._batch.requests.get(request_id), result.sampled.get(request_id)
            if request is not None and new is not None:
                request.draft_tokens += len(drafts)
                request.accepted_tokens += len(new) - 1

    def _settle_drafts(self, flight: Flight, result: StepResult, now: float) -> None:
        """Give back what drafts took, and tell who proposed them how good they were."""
        counters = self._batch.counters
        for request_id, drafts in flight.order.drafts.items():
            new, plugin = result.sampled.get(request_id), flight.proposers[request_id]
            if new is None:
                continue
            accepted = len(new) - 1
            names = [
                "verified_steps",
                *(f"proposed_at.{i}" for i in range(len(drafts))),
                *(f"accepted_at.{i}" for i in range(accepted)),
            ]
            for name, count in (
                ("proposed_tokens", len(drafts)),
                ("accepted_tokens", accepted),
                *((name, 1) for name in names),
            ):
                counters[f"{plugin}.{name}"] = counters.get(f"{plugin}.{name}", 0) + count
            request = self._batch.requests.get(request_id)
            if request is None or request.status is not Status.RUNNING:
                continue
            self._batch.shrink(request)
            try:
                for impl in request.hooks.drafts_verified:
                    if impl.plugin == plugin:
                        impl(request=request, proposed=len(drafts), accepted=accepted)
            except TokenbusError as error:
                self._batch.end(request, "error", now, error=error.to_wire())

    def _blocks_filled(self, filled: list[tuple[Request, int, int]], now: float) -> None:
        pool = self._batch.pool
        for request, first, last in filled:
            try:
                for impl in request.hooks.blocks_filled:
                    impl(request=request, first=first, last=last, pool=pool)
            except TokenbusError as error:
                self._batch.end(request, "error", now, error=error.to_wire())

    def _prompt_logprobs(self, plan: StepPlan, given: dict[str, list[TokenLogprobs]]) -> dict[str, list[TokenLogprobs]]:
        """Those not sent before: after a preemption the prompt runs again, its logprobs go out once."""
        fresh: dict[str, list[TokenLogprobs]] = {}
        for request_id, entries in given.items():
            request = self._batch.requests.get(request_id)
            if request is None or request_id not in plan.num_tokens:
                continue
            entries = entries[max(0, request.prompt_logprobs_sent - request.computed) :]  # noqa: PLW2901
            if entries:
                request.prompt_logprobs_sent += len(entries)
                fresh[request_id] = entries
        return fresh


def accept(request: Request, new: list[int]) -> tuple[list[int], str | None, int | None]:
    """Append sampled tokens until one ends the request: (tokens to show, why it ends or None, the stop token).

    A stop token is not appended and not shown. What was sampled behind the end is discarded.
    """
    tokens = request.tokens
    for index, token in enumerate(new):
        if len(tokens) >= request.limit:
            return new[:index], "length", None
        if token in request.stop_ids and len(tokens) >= request.stop_min_len:
            return new[:index], "stop", token
        tokens.append(token)
    return new, "length" if len(tokens) >= request.limit else None, None


def _trim(output: StepOutput, result: StepResult, request_id: str, kept: list[int]) -> None:
    """Show only `kept` of a request's tokens. The result's own dictionaries stay as they came: others read them."""
    if output.tokens is result.sampled:
        output.tokens = dict(result.sampled)
        output.logprobs = dict(result.logprobs)
    if kept:
        output.tokens[request_id] = kept
    else:
        output.tokens.pop(request_id, None)
    if (entries := output.logprobs.get(request_id)) is not None:
        if kept:
            output.logprobs[request_id] = entries[: len(kept)]
        else:
            del output.logprobs[request_id]
