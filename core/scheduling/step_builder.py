"""How one step's plan is made. One pass, in this order, within one token budget:

    1. decodes           every running request that has one token to run; blocks for all of them at once
       drafts            what the worker or `propose_drafts` gives for them, as far as budget and free blocks go
    2. running prompts   chunks, oldest first, as large as `limit_chunk` allows
    3. waiting requests  in the policy's order, as long as blocks, batch and budget have room

A policy may want less than all of it in a step (`SchedulingPolicy.compose`). What it wants is tried in turn until something is planned.

A prompt with pictures or sounds runs up to the first that is not encoded yet, where encoding takes long (encoding.py): its request joins
the batch, if need be without a token to run, and the step's order says what is encoded beside the tokens.

With `ending` the step is planned while another one computes (ahead.py): there are no drafts then, nobody is preempted or displaced or
ends for lack of room, and an empty plan is no fault. What would have to be done in that case is done in the next step that waits.

Blocks are taken as tokens are planned. When they run out in 1 or 2 the policy names a victim, which loses its blocks, leaves this
plan and goes back to the line. A waiting request joins only when its known tokens and what everybody needs soon fit together: so
a request that was just resumed is not the next victim. The request that the policy never names always advances, hence no plan is
empty while there is work (but for one that only encodes), and preemptions are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..config import SchedulerConfig
from ..contexts import PrefixMatch, StepView
from ..errors import ContextLengthError, TokenbusError
from ..plan import EncodeOrder, StepPlan, WorkerRequest
from ..policy import Work
from ..request import Request, Status
from .ahead import MustWaitError
from .batch import Batch
from .encoding import Encoding
from .relief import Relief
from .spans import beginning, begun_tokens, cut_match, fitting_chunk


class StepBuilder:
    def __init__(self, batch: Batch, config: SchedulerConfig, encoding: Encoding) -> None:
        self.step_id = 0
        """Of the plan made last."""
        self.relief = Relief()
        self.encoding = encoding
        self.encode: EncodeOrder | None = None
        """Of the plan made last."""
        self._batch = batch
        self.configure(config)
        # of the step that is being planned
        self._num_tokens: dict[str, int] = {}
        self._new: list[WorkerRequest] = []
        self._new_blocks: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        """Of the plan made last."""
        self.proposers: dict[str, str] = {}
        """The plugin that proposed them, by request."""
        self._preempted: list[str] = []
        self._starved = False
        """Blocks ran out: nobody joins in this step."""
        self.next_waits = ""
        """Why the step after the one planned last must not be planned ahead."""
        self._ahead = False
        self._ending = 0
        """Running requests that the step in flight ends."""
        self._headroom: int | None = None
        """Blocks that the running requests will soon want beside theirs: counted when somebody wants to join, then kept up to date."""
        self._view = StepView(step_id=0, budget=0, num_decodes=0, prompt_tokens=0, waiting=0)
        self._media: dict[str, int] = {}
        """Tokens of items that begin in this step, by request."""

    def configure(self, config: SchedulerConfig) -> None:
        """Between two steps. Requests that run go on, also when they are more than the new limits allow."""
        self.config = config
        self._most_drafts = config.max_drafts
        self._set_sizes()

    def _set_sizes(self) -> None:
        config, limit = self.config, self.relief.limit
        self._budget = config.token_budget if limit is None else min(config.token_budget, limit)
        self._max_running = min(config.max_running, self._budget)
        """Every decode fits into the budget, but for those that joined under a larger one."""

    def build(
        self, now: float, *, ending: int | None = None
    ) -> tuple[StepPlan, list[WorkerRequest], dict[str, list[int]]] | None:
        """(plan, requests new to the worker, blocks added to the tables of those it knows), or None when there is nothing to run.

        Requests may end in here (a plugin raised on them), and blocks are taken also when None is returned. ending: planned ahead, and how
        many running requests the step in flight ends; MustWaitError when it has to wait, with nothing taken.
        """
        batch = self._batch
        if not (batch.running or batch.line):
            return None
        self.step_id += 1
        self._ahead, self._ending, self.next_waits = ending is not None, ending or 0, ""
        self._set_sizes()
        self._new, self._new_blocks, self._preempted, self._starved = [], {}, [], False
        self.drafts, self.proposers, self._media = {}, {}, {}
        self.encoding.begin_step(self.config.encoder_slice_ms)
        for kind in batch.line.compose(batch.running, now):
            self._plan_work(kind, now)
            if self._num_tokens:
                break
        else:
            if not self._ahead:
                self._plan_prompts(Work.ALL, now, least=1)
        num_tokens, view = self._num_tokens, self._view
        encodes = self.encoding.order(alone=not num_tokens)
        encodes_for, self.encode = encodes or (None, None)
        if not num_tokens and not encodes:
            if not self._ahead and (batch.running or batch.line):
                raise RuntimeError(f"nothing to run with {len(batch.running)} running and {len(batch.line)} waiting requests")
            return None
        plan = StepPlan(
            step_id=self.step_id,
            num_tokens=num_tokens,
            budget=self._budget,
            free_blocks=batch.pool.num_available,
            preempted=(*self.relief.preempted, *self._preempted),
            num_prompt_tokens=view.prompt_tokens,
            num_draft_tokens=sum(map(len, self.drafts.values())),
            num_media_tokens=sum(self._media.values()),
            encodes_for=encodes_for,
            waiting=len(batch.line),
            running=len(batch.running) - self._ending,
        )
        self.relief.preempted = []
        return plan, self._new, self._new_blocks

    def _plan_work(self, kind: Work, now: float) -> None:
        """Plan one kind of step; nothing is planned so far."""
        batch = self._batch
        self._num_tokens = num_tokens = (
            {request.request_id: 1 for request in batch.running if _decodes(request)} if Work.DECODES in kind else {}
        )
        self._grow_decodes(now)
        self._view = StepView(
            step_id=self.step_id,
            budget=max(0, self._budget - len(num_tokens)),
            num_decodes=len(num_tokens),
            prompt_tokens=0,
            waiting=len(batch.line),
        )
        if not self._starved and not self._ahead:
            self._plan_drafts([r for r in batch.running if _may_have_drafts(r) and r.request_id in num_tokens], now)
        if batch.line or len(num_tokens) < len(batch.running):
            self._plan_prompts(kind, now, least=0)

    # ---- decodes ----------------------------------------------------------------------------------------------------------------

    def _grow_decodes(self, now: float) -> None:
        batch, num_tokens = self._batch, self._num_tokens
        growing = [r for r in batch.running if r.computed >= r.capacity and r.request_id in num_tokens]
        if not growing:
            return
        size = batch.block_size
        if batch.pool.num_available >= len(growing):
            blocks = batch.pool.allocate(len(growing))
            assert blocks is not None
            for request, block in zip(growing, blocks, strict=True):
                request.blocks.append(block)
                request.capacity += size
                self._new_blocks[request.request_id] = [block]
            return
        if self._ahead:
            self.step_id -= 1
            raise MustWaitError("blocks")
        for request in growing:
            if request.status is Status.RUNNING and not self._take(request, 1, now):
                self._unplan(request)

    def _take(self, request: Request, num_tokens: int, now: float) -> bool:
        """Blocks for `num_tokens` more tokens of a running request, from others if need be. False: it lost its own place (it was the
        victim, or it is alone and the pool is not enough for it), or it is left out of a step that is planned ahead."""
        batch = self._batch
        needed = batch.blocks_for(request.computed + num_tokens) - len(request.blocks)
        if needed <= 0:
            return True
        if self._ahead and needed > batch.pool.num_available:
            self._starved, self.next_waits = True, "blocks"
            return False
        while (blocks := batch.pool.allocate(needed)) is None:
            if len(batch.running) == 1:
                self._end_for_lack_of_room(request, now)
                return False
            victim = batch.line.victim(batch.running, now)
            self._starved = True
            self._preempt(victim, now)
            if victim is request:
                return False
        batch.grow(request, blocks)
        if request.worker_knows:
            self._new_blocks.setdefault(request.request_id, []).extend(blocks)
        return True

    def _end_for_lack_of_room(self, request: Request, now: float) -> None:
        if request.num_output:
            self._batch.end(request, "length", now)
            return
        error = ContextLengthError(
            f"KV memory has room for {self._batch.capacity_tokens} tokens", request_id=request.request_id
        )
        self._batch.end(request, "error", now, error=error.to_wire())

    def _preempt(self, victim: Request, now: float) -> None:
        self._unplan(victim)
        self._batch.preempt(victim, now)
        self._preempted.append(victim.request_id)

    def _unplan(self, request: Request) -> None:
        """Take a request out of the plan in the making."""
        request_id = request.request_id
        planned = self._num_tokens.pop(request_id, 0)
        self._new_blocks.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self._media.pop(request_id, None)
        if not planned:
            return
        self._view.budget += planned
        new = [order for order in self._new if order.request_id != request_id]
        if len(new) == len(self._new) and request.computed >= request.num_prompt and request.remaining == 1:
            self._view.num_decodes -= 1
        else:
            self._view.prompt_tokens -= planned
        self._new = new

    # ---- drafts -----------------------------------------------------------------------------------------------------------------

    def _plan_drafts(self, requests: list[Request], now: float) -> None:
        """Behind decodes, where there is room: nobody gives way to drafts."""
        view = self._view
        for request in requests:
            most = min(view.budget, request.limit - len(request.tokens) - 1, self._most_drafts)
            if most < 1:
                continue
            try:
                drafts = self._fitting(request, self._proposed(request, most))
            except TokenbusError as error:
                self._unplan(request)
                self._batch.end(request, "error", now, error=error.to_wire())
                continue
            if drafts:
                self.drafts[request.request_id] = drafts
                self._num_tokens[request.request_id] += len(drafts)
                view.budget -= len(drafts)

    def _proposed(self, request: Request, most: int) -> list[int]:
        """The worker's drafts; or, if they are none or its beginning, the first answer of a plugin here."""
        given: list[int] = []
        if request.proposed is not None:
            (length, drafts), request.proposed = request.proposed, None
            if length == len(request.tokens) and drafts.plugin in request.features:
                self.proposers[request.request_id] = drafts.plugin
                given = drafts.tokens[:most]
        for impl in request.hooks.propose_drafts:
            if answer := impl(request=request, most=most):
                if len(answer) <= len(given) or list(answer[: len(given)]) != given:
                    break
                self.proposers[request.request_id] = impl.plugin
                return list(answer)
        return given

    def _fitting(self, request: Request, drafts: list[int]) -> list[int]:
        """Those that there are blocks for, which are taken."""
        pool, known = self._batch.pool, len(request.tokens)
        needed = self._batch.blocks_for(known + len(drafts)) - len(request.blocks)
        if needed > pool.num_available:
            return drafts[: request.capacity - known]
        if needed > 0:
            blocks = pool.allocate(needed)
            assert blocks is not None
            self._batch.grow(request, blocks)
            self._new_blocks.setdefault(request.request_id, []).extend(blocks)
        return drafts

    # ---- prompts ----------------------------------------------------------------------------------------------------------------

    def _plan_prompts(self, kind: Work, now: float, *, least: int) -> None:
        """Running prompts, then waiting requests, as far as `kind` has them. least=1: nothing is planned yet; the first one runs whatever
        `limit_chunk` says."""
        batch, planned = self._batch, self._num_tokens
        self._headroom = None
        if Work.PROMPTS in kind and len(planned) < len(batch.running):
            for request in tuple(batch.running):
                if request.status is not Status.RUNNING or request.request_id in planned or _decodes(request):
                    continue
                if request.remaining:  # none: the step in flight ends it
                    self._continue_prompt(request, now, least if not planned else 0)
        if Work.JOINING not in kind:
            return
        while batch.line and (not self._starved or not planned) and self._admit_next(now, least if not planned else 0):
            pass

    def _continue_prompt(self, request: Request, now: float, least: int) -> None:
        try:
            num_tokens = self._chunk(request, least)
        except TokenbusError as error:
            self._batch.end(request, "error", now, error=error.to_wire())
            return
        if num_tokens and self._take(request, num_tokens, now):
            self._plan(request, num_tokens)

    def _admit_next(self, now: float, least: int) -> bool:
        """Try the head of the line; False when it must wait, and with it everybody behind it."""
        batch = self._batch
        request = batch.line.peek(now)
        if request is None or (self._view.budget <= 0 and not least):
            return False
        try:
            match = None
            while len(batch.running) - self._ending >= self._max_running or not self._fits(
                request, match := self._match(request)
            ):
                if self._waits_for_encoder(request, match) or not self._displace(request, now):
                    return False
                if batch.line.peek(now) is not request:
                    return True  # the line has another head now: start over with it
            if batch.line.peek(now) is not request:
                return True  # the policy failed meanwhile, and core's has another order
            return self._start(request, match, now, least)
        except TokenbusError as error:
            batch.end(request, "error", now, error=error.to_wire())
            return True

    def _displace(self, request: Request, now: float) -> bool:
        """Whether the policy made a running request give way to a waiting one: each at most once a step, so that it can't go in circles."""
        batch = self._batch
        victim = batch.line.displaces(request, batch.running, now) if batch.running else None
        if victim is None:
            return False
        if self._ahead:
            self.next_waits = "displacing"
            return False
        if victim.request_id in self._preempted:
            batch.line.give_up(f"it displaced {victim.request_id!r} twice in one step", now)
            return False
        if self._headroom is not None:
            self._headroom -= batch.headroom(victim)
        self._preempt(victim, now)
        return True

    def _match(self, request: Request) -> PrefixMatch | None:
        if request.prompt_logits:
            return None
        for impl in request.hooks.match_prefix:
            if impl.plugin in self._batch.distrusted:
                continue
            match: PrefixMatch | None = impl(request=request, pool=self._batch.pool)
            if match is not None and match.blocks:
                return cut_match(request, match, self._batch.block_size) if request.admitted.media else match
        return None

    def _fits(self, request: Request, match: PrefixMatch | None) -> bool:
        batch = self._batch
        shared = match.blocks if match is not None else ()
        free = batch.pool.num_available - sum(batch.pool.refs(block) == 0 for block in shared)
        if not batch.running:
            return batch.blocks_for(len(request.tokens)) - len(shared) <= free
        needed = batch.soon(request) - len(shared)
        if needed > free:
            return False
        if self._headroom is None:
            self._headroom = sum(map(batch.headroom, batch.running))
        return needed + self._headroom <= free

    def _start(self, request: Request, match: PrefixMatch | None, now: float, least: int) -> bool:
        """Admit the head of the line, with its first chunk or to wait for the encoder; False when `limit_chunk` leaves it out of this
        step."""
        batch = self._batch
        with _matched(request, match):
            num_tokens = self._chunk(request, least)
        if not num_tokens and not self._waits_for_encoder(request, match):
            return False
        if match is not None:
            batch.pool.share(match.blocks)
            batch.grow(request, list(match.blocks))
            request.computed = match.num_tokens
        needed = batch.blocks_for(request.computed + num_tokens) - len(request.blocks)
        if needed > 0:
            blocks = batch.pool.allocate(needed)
            assert blocks is not None, "_fits has counted them"
            batch.grow(request, blocks)
        self._count_hits(request)
        batch.admit(request, now)
        if self._headroom is not None:
            self._headroom += batch.headroom(request)
        if num_tokens:
            self._plan(request, num_tokens)
        return True

    def _waits_for_encoder(self, request: Request, match: PrefixMatch | None) -> bool:
        """Whether a waiting request could run nothing yet, for all the room there may be."""
        if not request.admitted.media:
            return False
        with _matched(request, match):
            return not self._encoded(request, 1)

    def _count_hits(self, request: Request) -> None:
        if request.cached_tokens is not None:
            return
        request.cached_tokens = min(request.computed, request.num_prompt)
        if request.hooks.match_prefix and not request.prompt_logits:
            counters, name = self._batch.counters, request.hooks.match_prefix[0].plugin
            counters[f"{name}.query_tokens"] = counters.get(f"{name}.query_tokens", 0) + request.num_prompt
            counters[f"{name}.hit_tokens"] = counters.get(f"{name}.hit_tokens", 0) + request.cached_tokens

    def _chunk(self, request: Request, least: int) -> int:
        """How many of a request's known tokens run in this step, `least` or more; 0: none, it is left out."""
        view = self._view
        remaining = len(request.tokens) - request.computed
        wanted = min(remaining, max(0, view.budget))
        if request.admitted.media:
            encoded = self._encoded(request, max(wanted, 1))
            if not encoded:
                return 0
            wanted = min(wanted, encoded)
        answer: int | None = None
        for impl in request.hooks.limit_chunk:
            limit = impl(request=request, wanted=wanted, step=view)
            if limit is not None:
                answer = limit if answer is None else min(answer, limit)
        if answer is not None:
            chunk = max(least, min(answer, wanted))
            return self._around_media(request, chunk) if chunk and request.admitted.media else chunk
        if remaining > view.budget and view.prompt_tokens:
            return 0
        return 0 if request.admitted.media and self._encoded(request, remaining) < remaining else remaining

    def _around_media(self, request: Request, chunk: int) -> int:
        view = self._view
        budget = (
            view.budget if view.prompt_tokens else max(view.budget, request.remaining)
        )  # the first prompt's span may pass it
        begun = sum(self._media.values())
        return fitting_chunk(request, chunk, budget=budget, encoder_budget=self.config.encoder_budget, begun=begun)

    def _encoded(self, request: Request, count: int) -> int:
        """How many of its next `count` tokens come before an item that has to be encoded first."""
        for item in beginning(request, count):
            if self.encoding.holds_back(request, item):
                return max(0, item.start - request.computed)
        return count

    def _plan(self, request: Request, num_tokens: int) -> None:
        view, request_id = self._view, request.request_id
        if request.admitted.media and (begun := begun_tokens(request, num_tokens)):
            self._media[request_id] = begun
        self._num_tokens[request_id] = num_tokens
        view.budget -= num_tokens
        view.prompt_tokens += num_tokens
        view.waiting = len(self._batch.line)
        if request.worker_knows:
            return
        request.worker_knows = True
        admitted = request.admitted
        self._new.append(
            WorkerRequest(
                request_id=request_id,
                tokens=list(request.tokens),
                num_prompt_tokens=request.num_prompt,
                num_computed=request.computed,
                blocks=list(request.blocks),
                temperature=admitted.temperature,
                seed=admitted.seed,
                choice=admitted.choice,
                features=tuple(sorted(request.features)),
                fields=request.fields,
                pinned=tuple(request.pinned),
                prompt_logits=request.prompt_logits,
                media=admitted.media,
            )
        )


@contextmanager
def _matched(request: Request, match: PrefixMatch | None) -> Iterator[None]:
    """While this is open a waiting request is as if it had the blocks of the match."""
    request.computed = 0 if match is None else match.num_tokens
    try:
        yield
    finally:
        request.computed = 0


def _may_have_drafts(request: Request) -> bool:
    return request.proposed is not None or bool(request.hooks.propose_drafts)


def _decodes(request: Request) -> bool:
    return len(request.tokens) - request.computed == 1 and request.computed >= request.num_prompt
