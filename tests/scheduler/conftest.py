"""A scheduler with a worker of plain Python that checks everything the real one relies on."""

from __future__ import annotations

from collections import Counter, deque

import msgspec
import pytest

from tokenbus.core.bus import Bus
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.contexts import EngineContext
from tokenbus.core.errors import ErrorInfo, PluginError
from tokenbus.core.host import PluginHost, Switches
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.messages import Finish, StepOutput
from tokenbus.core.plan import EncodeOrder, StepInput, StepPlan, StepResult, TokenLogprobs, WorkerRequest
from tokenbus.core.plugin import Plugin
from tokenbus.core.request import PENDING, AdmittedRequest
from tokenbus.core.scheduling.scheduler import Scheduler
from tokenbus.plugins.chunked_prefill import ChunkedPrefill
from tokenbus.plugins.prefix_cache import PrefixCache
from tokenbus.plugins.scheduling.fcfs import Fcfs
from tokenbus.plugins.scheduling.priority import Priority
from tokenbus.plugins.scheduling.static import Static
from tokenbus.plugins.scheduling.two_phase import TwoPhase
from tokenbus.plugins.scheduling.unified import Unified

VOCAB = 50
EOS = 1
SEED_STATE = 17


def roll(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % (1 << 61)


def next_token(state: int) -> int:
    """Never the end token, so that lengths are known; tests that want it use a stop rule on another id."""
    return 2 + state % (VOCAB - 2)


def solo(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request gives when nothing else runs."""
    state = SEED_STATE
    for token in prompt:
        state = roll(state, token)
    out = []
    for _ in range(max_tokens):
        token = next_token(state)
        out.append(token)
        state = roll(state, token)
    return out


class WorkerCopy:
    def __init__(self, order: WorkerRequest) -> None:
        self.tokens = list(order.tokens)
        self.num_prompt = order.num_prompt_tokens
        self.computed = order.num_computed
        self.blocks = list(order.blocks)
        self.prompt_logits = order.prompt_logits
        self.features = order.features


class FakeWorker:
    """Keeps K/V as numbers that depend on all tokens before them; a block that holds something else is an assertion."""

    def __init__(self, num_blocks: int, block_size: int, pieces: int = 0) -> None:
        """pieces: steps that an item takes to be encoded beforehand; 0: that is not done."""
        self.block_size = block_size
        self.pieces = pieces
        self.encoding: tuple[str, int] | None = None
        """Digest under way, and pieces to go."""
        self.encoded: set[str] = set()
        """Digests, beforehand."""
        self.room = 0
        """Items that are kept; 0: all. The oldest goes first."""
        self.kept: list[str] = []
        self.kv = [[-1] * block_size for _ in range(num_blocks)]
        self.known: dict[str, WorkerCopy] = {}
        self.features: tuple[str, ...] | None = None
        self.fail: dict[str, ErrorInfo] = {}
        self.broken: dict[str, ErrorInfo] = {}
        """Requests that failed and are not dropped yet."""
        self.failed = False
        """The last step failed as a whole."""
        self.tokens_run = 0

    def execute(self, order: StepInput) -> StepResult:
        void, self.failed = self.failed and order.ahead, False
        if void:
            order = msgspec.structs.replace(order, num_tokens={}, drafts={})
        result = self._execute(order)
        if order.encode is not None and not void:
            self._encode(order.encode, result)
        result.void = void
        return result

    def _encode(self, order: EncodeOrder, result: StepResult) -> None:
        assert self.pieces, "not told that items are encoded in pieces"
        assert order.seconds > 0
        if order.item is not None:
            assert order.item.digest == order.digest
            if self.encoding is None or self.encoding[0] != order.digest:
                self.encoding = order.digest, self.pieces
        if self.encoding is None or self.encoding[0] != order.digest:
            result.encoded = [order.digest]
            return
        digest, left = self.encoding
        self.encoding = (digest, left - 1) if left > 1 else None
        if self.encoding is None:
            result.encoded = [digest]
            self.encoded.add(digest)
            if self.room and len(self.kept) == self.room:
                result.forgotten = [self.kept.pop(0)]
            self.kept.append(digest)

    def _execute(self, order: StepInput) -> StepResult:
        for request_id in order.dropped:
            self.known.pop(request_id, None)
            self.broken.pop(request_id, None)
        if order.features is not None:
            self.features = order.features
        for new in order.new:
            assert new.request_id not in self.known
            self.known[new.request_id] = WorkerCopy(new)
        for request_id, blocks in order.new_blocks.items():
            self.known[request_id].blocks.extend(blocks)
        if not order.num_tokens:
            return StepResult(step_id=order.step_id, sampled={})
        assert set(order.num_tokens) >= {new.request_id for new in order.new} | set(order.new_blocks)
        result = StepResult(step_id=order.step_id, sampled={})
        assert set(order.num_tokens) >= set(order.drafts)
        for request_id, num_tokens in order.num_tokens.items():
            if (error := self.fail.pop(request_id, None) or self.broken.get(request_id)) is not None:
                result.errors[request_id] = self.broken[request_id] = error
                continue
            self._run(request_id, num_tokens, order.drafts.get(request_id, []), result)
        return result

    def _run(self, request_id: str, num_tokens: int, drafts: list[int], result: StepResult) -> None:
        copy = self.known[request_id]
        assert num_tokens >= 1
        assert copy.computed + num_tokens <= len(copy.tokens) + len(drafts), request_id
        if drafts:
            self._verify(request_id, num_tokens, drafts, result)
            return
        self.tokens_run += num_tokens
        state = SEED_STATE
        for position in range(copy.computed + num_tokens):
            state = roll(state, copy.tokens[position])
            block, offset = copy.blocks[position // self.block_size], position % self.block_size
            if position < copy.computed:
                assert self.kv[block][offset] == state, f"{request_id}: position {position} is not in block {block}"
            else:
                self.kv[block][offset] = state
        if copy.prompt_logits:
            last = min(copy.computed + num_tokens, copy.num_prompt - 1)
            entries = [TokenLogprobs(copy.tokens[i + 1], -float(i + 1), 1) for i in range(copy.computed, last)]
            if entries:
                result.prompt_logprobs[request_id] = entries
        copy.computed += num_tokens
        if copy.computed == len(copy.tokens):
            token = next_token(state)
            copy.tokens.append(token)
            result.sampled[request_id] = [token]

    def _verify(self, request_id: str, num_tokens: int, drafts: list[int], result: StepResult) -> None:
        copy = self.known[request_id]
        known = len(copy.tokens)
        assert copy.computed + num_tokens == known + len(drafts)
        self.tokens_run += num_tokens
        state, sampled = SEED_STATE, []
        for position, token in enumerate(copy.tokens + drafts):
            state = roll(state, token)
            block, offset = copy.blocks[position // self.block_size], position % self.block_size
            if position < copy.computed:
                assert self.kv[block][offset] == state, f"{request_id}: position {position} is not in block {block}"
            else:
                self.kv[block][offset] = state
            right = sampled == drafts[: len(sampled)]
            if position >= known - 1 and right:
                sampled.append(next_token(state))
        copy.tokens.extend(sampled)
        copy.computed = len(copy.tokens) - 1
        del copy.blocks[-(-len(copy.tokens) // self.block_size) :]
        result.sampled[request_id] = sampled


class Harness:
    """`Harness(num_blocks=..., on=("prefix_cache", ...))`: add requests, `step()`, look at `tokens`, `finished`, `plans`."""

    EOS = EOS
    solo = staticmethod(solo)

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        on: tuple[str, ...] = (),
        plugins: tuple[type[Plugin], ...] = (),
        settings: dict[str, dict[str, object]] | None = None,
        max_model_len: int = 4096,
        token_budget: int = 64,
        max_running: int = 8,
        step_seconds: float = 0.01,
        ahead: bool = False,
        pieces: int = 0,
    ) -> None:
        """ahead: each step is planned before the one before it runs, where that can be done. pieces: as FakeWorker has it."""
        self.ahead = ahead
        self.flights: deque[tuple[StepPlan, StepInput]] = deque()
        self.waits: Counter[str] = Counter()
        """Why steps were not planned ahead."""
        self.planned_ahead = self.discarded = 0
        self.now = 1000.0
        self.step_seconds = step_seconds
        self.host = PluginHost("engine", settings or {})
        for cls in (ChunkedPrefill, PrefixCache, Fcfs, Priority, Static, TwoPhase, Unified, *plugins):
            self.host.add(cls)
        config: Config = from_mapping({"scheduler": {"token_budget": token_budget, "max_running": max_running}}, "test")
        self.pool = BlockPool(num_blocks, block_size)
        self.worker = FakeWorker(num_blocks, block_size, pieces)
        self.config = config
        self.failures: list[tuple[str, PluginError]] = []
        self.switches = Switches(frozenset(on))
        self._start(self.switches)
        self.scheduler = Scheduler(
            config,
            max_model_len=max_model_len,
            eos_token_ids=frozenset({EOS}),
            pool=self.pool,
            host=self.host,
            switches=self.switches,
            on_plugin_failure=lambda name, error: self.failures.append((name, error)),
            encodes_in_pieces=pieces > 0,
        )
        self.evicted = 0
        """Retained blocks that were handed out anew."""
        forget = self.pool.on_evict

        def on_evict(block: int) -> None:
            self.evicted += 1
            forget(block)

        self.pool.on_evict = on_evict
        self.plans: list[StepPlan] = []
        self.inputs: list[StepInput] = []
        self.outputs: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Finish] = {}
        self.first_token_at: dict[str, int] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}

    def _start(self, switches: Switches) -> None:
        for name in self.host.load(switches.on):
            for impl in self.host.table(frozenset({name})).engine_started:
                impl(engine=EngineContext(bus=Bus(), config=self.config, pool=self.pool))

    def plugin(self, name: str):
        return self.host.loaded[name]

    def switch(self, **changes: bool) -> list[str]:
        """`switch(prefix_cache=False)`; a dot in the name is written as two underscores."""
        self.land()
        named = {name.replace("__", "."): wish for name, wish in changes.items()}
        self.switches = self.host.change_switches(self.switches, named)
        self._start(self.switches)
        return self.scheduler.apply_switches(self.switches, self.now)

    def add(self, request_id: str, prompt: list[int] | int, max_tokens: int = 4, **options: object) -> None:
        if isinstance(prompt, int):
            prompt = [3 + (7 * i + len(request_id) + ord(request_id[-1])) % (VOCAB - 3) for i in range(prompt)]
        options.setdefault("features", tuple(sorted(self.switches.on)))
        options.setdefault("arrival", self.now)
        self.scheduler.add(AdmittedRequest(request_id=request_id, prompt=prompt, max_tokens=max_tokens, **options), self.now)

    def take(self, output: StepOutput | None) -> None:
        if output is None:
            return
        self.outputs.append(output)
        if (report := output.report) is not None:
            self.planned_ahead += report.ahead
            self.discarded += report.ahead_discarded
            self.waits.update([report.waited] if report.waited else [])
        for request_id, tokens in output.tokens.items():
            assert tokens
            assert request_id not in self.finished, f"{request_id} got tokens after its end"
            self.tokens.setdefault(request_id, []).extend(tokens)
            self.first_token_at.setdefault(request_id, output.step_id)
        for request_id, entries in output.prompt_logprobs.items():
            self.prompt_logprobs.setdefault(request_id, []).extend(entries)
        for request_id, finish in output.finished.items():
            assert request_id not in self.finished, f"{request_id} ended twice"
            self.finished[request_id] = finish

    def step(self, seconds: float | None = None) -> StepPlan | None:
        seconds = self.step_seconds if seconds is None else seconds
        if not self.plan():
            self.take(self.scheduler.flush(self.now))
            return None
        plan, order = self.flights.popleft()
        result = self.worker.execute(order)
        self.now += seconds
        self.take(self.scheduler.update(plan, result, self.now, seconds))
        self.check()
        return plan

    def plan(self) -> bool:
        """Plan as far as can be: one step, and with `ahead` another one. Whether there is one to run."""
        if not self.flights:
            self._planned(self.scheduler.schedule(self.now))
        if self.ahead and len(self.flights) == 1:
            self._planned(self.scheduler.schedule_ahead(self.now))
        return bool(self.flights)

    def _planned(self, planned: tuple[StepPlan, StepInput] | None) -> None:
        self.check()
        if planned is None:
            return
        plan, order = planned
        assert plan.num_tokens or order.encode
        assert (plan.encodes_for is None) == (order.encode is None)
        assert order.num_tokens == plan.num_tokens
        assert order.ahead == bool(self.flights)
        assert not (order.ahead and (plan.preempted or order.drafts))
        assert plan.free_blocks == self.pool.num_available
        assert all(PENDING not in new.tokens for new in order.new)
        self.plans.append(plan)
        self.inputs.append(order)
        self.flights.append(planned)

    def land(self) -> None:
        """Run what is in flight; plan nothing more."""
        ahead, self.ahead = self.ahead, False
        while self.flights:
            self.step()
        self.ahead = ahead

    def fail_step(self, error: ErrorInfo) -> None:
        """The step that computes fails as a whole: with it, the worker has taken over nothing but its requests."""
        self.take(self.scheduler.fail_step(self._taken_over(), error, self.now))

    def no_memory(self, error: ErrorInfo) -> None:
        """The worker has no memory for the step that computes."""
        self.take(self.scheduler.relieve(self._taken_over(), error, self.now))

    def _taken_over(self) -> StepPlan:
        plan, order = self.flights.popleft()
        self.worker.execute(msgspec.structs.replace(order, num_tokens={}, drafts={}))
        self.worker.failed = True
        return plan

    def check(self) -> None:
        self.scheduler.check_integrity()
        if "prefix_cache" in self.host.loaded:
            self.plugin("prefix_cache").check_integrity()

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left to do; then nothing may be left behind."""
        for _ in range(max_steps):
            if self.step() is None and not self.scheduler.has_work():
                self.take(self.scheduler.flush(self.now))
                assert not self.scheduler.requests
                assert self.pool.num_available == self.pool.num_blocks
                return
        raise AssertionError(f"still busy after {max_steps} steps: {list(self.scheduler.requests.values())}")


@pytest.fixture(scope="session")
def harness() -> type[Harness]:
    return Harness
