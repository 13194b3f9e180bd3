"""Runs the draft model: what it knows of which block, catching up with each request, and drafting several requests at once.

    filled     tokens of a request whose draft K/V is in its blocks; by block: how many of its places
    catch up   runs tokens[filled:], the last one gives the first draft
    draft      runs each draft to get the next one; their K/V goes behind, over places that are written again when the tokens are certain,
               and into scratch blocks where the request's table ends

A block that the pool hands out holds nothing (`handed_out`). One that is shared by a prefix hit keeps what it has: draft K/V that is
there counts, and what is missing (it was filled by a request without this plugin) is computed, into the same block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from ...core.errors import ModelError
from ...core.plugin import StashKey
from ...core.worker.paged import PagedModel, Piece
from ...core.worker.side import SideModel
from .adaptive import LONGEST_PAUSE, Length, Record, StepCost

if TYPE_CHECKING:
    from ...core.models.base import ModelSpec
    from ...core.models.sizing import ModelSize
    from ...core.worker.side import Beside, Ran, StepRan
    from ...core.worker.state import WorkerRequestState
    from .draft_model import DraftModelSettings

log = structlog.get_logger(__name__)

GROUP = 32
"""Requests that draft together; the others follow after them."""
FORGET = 0.9
"""Weight that the measured time of a draft keeps with each later one."""


@dataclass
class State:
    length: Length
    filled: int
    last: list[int]
    """What was proposed after the last step."""


STATE = StashKey[State]("speculative.draft_model")


@dataclass
class Job:
    """One request in the step at hand."""

    request: WorkerRequestState
    state: State
    end: int
    """Tokens that are to have draft K/V."""
    wanted: int
    """Drafts; 0: only catching up."""
    drafts: list[int]
    table: list[int]


class Drafter(SideModel):
    def __init__(self, name: str, settings: DraftModelSettings, block_size: int, size: ModelSize) -> None:
        """name: the model's, as in the settings."""
        self._name = name
        self._settings = settings
        self._block_size = block_size
        self.weights_bytes = size.weights_bytes
        self.kv_bytes_per_token = size.kv_bytes_per_token
        self._scratch_each = -(-settings.max_drafts // block_size) + 1
        self.fixed_bytes = GROUP * self._scratch_each * block_size * size.kv_bytes_per_token
        self._model: PagedModel | None = None
        self._vocab_size = 0
        self._num_blocks = 0
        self._filled: list[int] = []
        """By block: places from its beginning that hold draft K/V of what the block stands for."""
        self._cost = StepCost()
        self._everybody = Record()
        self._draft_seconds = 0.0
        """That one more draft for each of a group takes."""

    # ---- start ------------------------------------------------------------------------------------------------------------------

    def load(self, beside: Beside) -> None:
        model = beside.load(self._name)
        self._vocab_size = min(model.spec.vocab_size, beside.spec.vocab_size)
        self._check_vocabulary(beside, model.spec)
        self._model = PagedModel(model, self._block_size, beside.attention)
        self.kv_bytes_per_token = self._model.layout.bytes_per_token
        self.weights_bytes = model.spec.weights_bytes

    def _check_vocabulary(self, beside: Beside, spec: ModelSpec) -> None:
        """ModelError unless both models mean the same by each id, as far as there are tokenizers that say so."""
        try:
            mine, theirs = beside.vocabulary_of(self._name, spec), beside.vocabulary()
        except ModelError as error:
            if spec.vocab_size != beside.spec.vocab_size:
                raise self._unfit(f"it has {spec.vocab_size} token ids, the served model {beside.spec.vocab_size}") from error
            log.warning("draft_vocabulary_unchecked", model=self._name, reason=error.message)
            return
        shorter, longer = sorted((list(mine.tokens), list(theirs.tokens)), key=len)
        wrong = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), None)
        if wrong is None and any(longer[len(shorter) :]):
            wrong = len(shorter)
        if wrong is not None:
            raise self._unfit(f"its token {wrong} is another one than the served model's: they have different vocabularies")

    def _unfit(self, reason: str) -> ModelError:
        return ModelError(f"{self._name} can't draft: {reason}")

    def allocate(self, num_blocks: int) -> None:
        assert self._model is not None
        self._num_blocks = num_blocks
        self._filled = [0] * num_blocks
        self._model.allocate(num_blocks + GROUP * self._scratch_each)

    # ---- blocks -----------------------------------------------------------------------------------------------------------------

    def handed_out(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._filled[block] = 0

    def add(self, request: WorkerRequestState) -> None:
        """A request that is new to the worker, or to this plugin."""
        filled = 0
        for block in request.blocks:
            filled += self._filled[block]
            if self._filled[block] < self._block_size:
                break
        request.stash[STATE] = State(Length(self._everybody), min(filled, len(request.tokens) - 1), [])

    def _note_filled(self, job: Job, end: int) -> None:
        """Draft K/V of tokens[:end] is there now; what lies in scratch does not count."""
        size, blocks = self._block_size, job.request.blocks
        end = min(end, len(blocks) * size)
        for index in range(job.state.filled // size, -(-end // size)):
            self._filled[blocks[index]] = max(self._filled[blocks[index]], min(size, end - index * size))
        job.state.filled = max(job.state.filled, end)

    # ---- a step -----------------------------------------------------------------------------------------------------------------

    def draft(self, step: StepRan) -> dict[str, list[int]]:
        if step.decode_only:
            self._cost.learn(step.num_tokens, step.seconds)
        jobs = self._jobs(step)
        for first in range(0, len(jobs), GROUP):
            self._run(jobs[first : first + GROUP])
        for job in jobs:
            job.state.last = job.drafts
        return {job.request.request_id: job.drafts for job in jobs if job.drafts}

    def _jobs(self, step: StepRan) -> list[Job]:
        """What to run for whom, as far as there is time to catch up."""
        assert self._model is not None
        room = self._settings.catch_up_tokens + sum(len(run.hidden) for run in step.runs)
        threshold = self._cost.threshold(step.num_requests, self._draft_seconds)
        longest = self._model.model.spec.max_model_len
        jobs: list[Job] = []
        for run in step.runs:
            request, state = run.request, run.request.stash[STATE]
            _learn(state, run)
            end = len(request.tokens) if run.sampled else request.computed
            if end >= longest:
                continue
            wanted = 0
            if run.sampled:
                most = min(step.most, self._settings.max_drafts, longest - end)
                wanted = state.length.wanted(most, threshold, LONGEST_PAUSE) if self._settings.adaptive else most
                if not wanted:
                    continue
            if end - state.filled > room:
                end, wanted = min(end, state.filled + room), 0
            if end > state.filled:
                room -= end - state.filled
                jobs.append(Job(request, state, end, wanted, [], []))
        return jobs

    def _run(self, jobs: list[Job]) -> None:
        for place, job in enumerate(jobs):
            first = self._num_blocks + place * self._scratch_each
            job.table = [*job.request.blocks, *range(first, first + self._scratch_each)]
        behind = [Piece(job.request.tokens[job.state.filled : job.end], job.state.filled, job.table) for job in jobs]
        self._step(jobs, behind)
        for job in jobs:
            self._note_filled(job, job.end)
        while active := [job for job in jobs if len(job.drafts) < job.wanted]:
            began = time.perf_counter()
            self._step(active, [Piece(job.drafts[-1:], job.end + len(job.drafts) - 1, job.table) for job in active])
            self._draft_seconds = FORGET * self._draft_seconds + (1 - FORGET) * (time.perf_counter() - began)

    def _step(self, jobs: list[Job], pieces: list[Piece]) -> None:
        """Run one piece for each; those that want drafts get one more."""
        assert self._model is not None
        hidden, starts = self._model.forward(pieces)
        drafting = [i for i, job in enumerate(jobs) if len(job.drafts) < job.wanted]
        if not drafting:
            return
        logits = self._model.model.logits(hidden[[starts[i + 1] - 1 for i in drafting]])
        for i, row in zip(drafting, logits, strict=True):
            job = jobs[i]
            job.drafts.append(job.request.draw(row[: self._vocab_size], job.end + len(job.drafts)))


def _learn(state: State, run: Ran) -> None:
    """How many of the last proposal were right, as far as it was run."""
    tried, state.last = state.last[: run.drafts], []
    if not tried or not run.sampled:
        return
    came = run.request.tokens[len(run.request.tokens) - run.sampled :]
    right = next((i for i, (a, b) in enumerate(zip(tried, came, strict=False)) if a != b), min(len(tried), len(came)))
    state.length.verified(len(tried), right)
