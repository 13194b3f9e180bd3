"""What changes between steps from outside: requests that come, are cancelled, or run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from ..errors import ContextLengthError, DeadlineError, TokenbusError
from ..request import AdmittedRequest, Request, StopRule
from .batch import Batch
from .live_switches import LiveSwitches
from .spans import check_spans_fit


class Intake:
    def __init__(
        self,
        batch: Batch,
        live: LiveSwitches,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        token_budget: Callable[[], int],
    ) -> None:
        self._batch = batch
        self._live = live
        self._max_model_len = max_model_len
        self._token_budget = token_budget
        self._eos_token_ids = eos_token_ids
        self._deadlines: list[tuple[float, str]] = []

    def add(self, admitted: AdmittedRequest, now: float) -> None:
        request_id = admitted.request_id
        if request_id in self._batch.requests:
            raise ValueError(f"request id {request_id!r} is open already")
        try:
            self._check_length(admitted)
            check_spans_fit(admitted, self._token_budget())
            features = self._live.features_of(admitted)
        except TokenbusError as error:
            self._batch.refuse(request_id, error.to_wire(), admitted.features)
            return
        request = Request(admitted, self._live.table(features, admitted.fields))
        request.features = features
        request.kernels = self._live.kernels(features)
        request.limit = min(request.limit, self._max_model_len)
        self._batch.requests[request_id] = request
        try:
            self._ask_plugins(request)
        except TokenbusError as error:
            self._batch.end(request, "error", now, error=error.to_wire())
            return
        if request.deadline is not None:
            self._watch(request.deadline, request_id)
        self._batch.line.add(request, preempted=False, now=now)

    def _check_length(self, admitted: AdmittedRequest) -> None:
        """Admission has done this with the same limits; a request that can never fit must not wait for ever all the same."""
        limit = self._max_model_len
        known = len(admitted.prompt) + (0 if admitted.resumed is None else len(admitted.resumed.tokens))
        needed = known + min(1, admitted.max_tokens)
        if not admitted.prompt:
            raise ContextLengthError("the prompt is empty", request_id=admitted.request_id)
        if needed > limit:
            raise ContextLengthError(
                f"prompt and output have {known} tokens; with what is still to come a request has room for {limit}",
                request_id=admitted.request_id,
            )

    def _ask_plugins(self, request: Request) -> None:
        hooks = request.hooks
        for impl in hooks.request_added:
            impl(request=request)
        rule = hooks.first("stop_rule", request=request, eos_token_ids=self._eos_token_ids)
        if rule is None:
            rule = StopRule(token_ids=self._eos_token_ids)
        request.stop_ids = rule.token_ids
        request.stop_min_len = request.num_prompt + rule.min_tokens
        request.prompt_logits = bool(hooks.first("wants_prompt_logits", request=request))
        if request.prompt_logits:
            for impl in hooks.match_prefix:
                request.notes[impl.plugin] = "not read: prompt logprobs need every prompt position to be run"

    def cancel(self, request_id: str, reason: str, now: float) -> None:
        request = self._batch.requests.get(request_id)
        if request is None:
            return
        if reason == "deadline":
            self._batch.end(request, "error", now, error=_deadline_error(request, now).to_wire())
        else:
            self._batch.end(request, "stop" if reason == "stop" else "cancelled", now)

    def expire(self, now: float) -> None:
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self._batch.requests[request_id]
            self._batch.end(request, "error", now, error=_deadline_error(request, now).to_wire())

    def next_deadline(self) -> float | None:
        heap, requests = self._deadlines, self._batch.requests
        while heap and heap[0][1] not in requests:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def _watch(self, deadline: float, request_id: str) -> None:
        if (
            len(self._deadlines) > 2 * len(self._batch.requests) + 64
        ):  # entries of requests that ended long before their deadline
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._batch.requests]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request_id))


def _deadline_error(request: Request, now: float) -> DeadlineError:
    return DeadlineError(
        f"the request's time was up after {now - request.arrival:.1f} s, with {request.num_output} tokens generated",
        request_id=request.request_id,
    )
