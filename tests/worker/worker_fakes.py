"""A model small enough to predict by hand, plugins for tests, and a driver that plays the engine. Also imported by `fake_child.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tokenbus import testing
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.host import PluginHost, make_host
from tokenbus.core.models.base import ForwardBatch, KVCache
from tokenbus.core.plan import StepInput, StepResult, WorkerRequest
from tokenbus.core.plugin import Plugin, PluginInfo, StashKey, hookimpl
from tokenbus.core.worker.attention import AttentionBackend, AttentionBatch, KVLayout
from tokenbus.core.worker.runner import ModelRunner
from tokenbus.testing.model import greedy

VOCAB = 64
BLOCK = 4


class FakeModel(testing.FakeModel):
    """The kit's model with a smaller vocabulary, which looks at what it is given."""

    spec = replace(testing.FakeModel.spec, vocab_size=VOCAB, lossless=False, lossless_reason="a table")

    def __init__(self) -> None:
        super().__init__()
        self.head_rows: list[int] = []
        self.batches: list[int] = []

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        where = batch.attention
        assert where.prepared == "prepared"
        self.batches.append(len(batch.token_ids))
        for r, (start, end) in enumerate(itertools.pairwise(where.query_start)):
            length = where.context_len[r]
            assert batch.positions[start:end].tolist() == list(range(length - (end - start), length))
        return super().forward(batch, kv, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(hidden))
        return super().logits(hidden)


class FakeBackend(AttentionBackend):
    name = "fake"
    invariant = True

    def prepare(self, batch: AttentionBatch) -> Any:
        return "prepared"

    def attend(self, q, k, v, k_cache, v_cache, batch, params):
        raise NotImplementedError


class FakeAttention(Plugin):
    info = PluginInfo(name="test.attention", summary="", scope="step", lossless=True, slot="attention")

    @hookimpl
    def attention_backend(self, layout: KVLayout) -> AttentionBackend:
        return FakeBackend()


class Faulty(Plugin):
    """Raises in the hook that field `test_fault` names; spoils the batch before it does."""

    info = PluginInfo(name="test.faulty", summary="", scope="step", lossless=False, claims={"test_fault"})
    calls = 0

    def _act(self, hook: str, rows, logits=None) -> None:
        type(self).calls += 1
        if logits is not None:
            logits[:, 3] = 1e6 if any(r.request.fields["test_fault"] == hook for r in rows) else logits[:, 3]
        if any(r.request.fields["test_fault"] == hook for r in rows):
            raise ValueError("broken")

    @hookimpl
    def worker_request_added(self, request) -> None:
        if request.fields["test_fault"] == "worker_request_added":
            raise ValueError("broken")

    @hookimpl
    def adjust_logits(self, logits, rows) -> None:
        self._act("adjust_logits", rows, logits)

    @hookimpl
    def filter_logits(self, logits, rows) -> None:
        self._act("filter_logits", rows, logits)

    @hookimpl
    def token_logprobs(self, rows) -> None:
        self._act("token_logprobs", rows)


SEEN = StashKey[list]("test.counter")


class Counter(Plugin):
    """A stateful processor: sees each token of the request once, in order."""

    info = PluginInfo(name="test.counter", summary="", scope="step", lossless=True)

    @hookimpl
    def worker_request_added(self, request) -> None:
        request.stash[SEEN] = list(request.tokens)

    @hookimpl
    def adjust_logits(self, rows) -> None:
        for row in rows:
            seen = row.request.stash[SEEN]
            assert len(row.tokens) - len(seen) in {0, 1}
            seen += row.tokens[len(seen) :]
            assert seen == row.tokens


SAMPLING = ("sampling.bias", "sampling.logprobs", "sampling.penalties", "sampling.stops", "sampling.truncation")
ALL = ("test.attention", *SAMPLING)
PLUGINS = (FakeAttention, Faulty, Counter)


def config(**sections: Any) -> Config:
    """Without the resident plugin that is on by default, which a worker would keep."""
    off = {"disable": ["multimodal"]}
    return from_mapping({"model": {"threads": 1}, "cache": {"block_size": BLOCK}, "features": off, **sections}, "test")


def make_runner(settings: Config, features: tuple[str, ...], host: PluginHost | None = None, model: FakeModel | None = None):
    host = host or make_host("worker", settings)
    for plugin in PLUGINS:
        host.add(plugin)
    return ModelRunner(settings, features, host, loader=lambda *_: ("fake", model or FakeModel()))


def loaded(features: tuple[str, ...] = ALL, model: FakeModel | None = None, **sections: Any) -> ModelRunner:
    runner = make_runner(config(**sections), features, model=model)
    runner.load()
    runner.allocate(512)
    return runner


class Spec:
    """A request as a test writes it."""

    def __init__(self, name: str, prompt: list[int], new: int = 8, **options: Any) -> None:
        self.name, self.prompt, self.new = name, prompt, new
        self.chunk: int = options.pop("chunk", 1 << 20)
        self.preempt_at: int | None = options.pop("preempt_at", None)
        self.draft: Callable[[list[int]], list[int]] = options.pop("draft", lambda tokens: [])
        """Drafts behind these tokens."""
        self.features: tuple[str, ...] = options.pop("features", ALL)
        self.temperature: float = options.pop("temperature", 0.0)
        self.seed: int = options.pop("seed", 0)
        self.fields: dict[str, Any] = options
        self.tokens = list(prompt)
        self.computed = 0
        self.blocks: list[int] = []
        self.known = False
        self.logprobs: list[Any] = []
        self.prompt_logprobs: list[Any] = []
        self.error: Any = None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.new


class Driver:
    """Plays the engine: plans every open request each step, its chunk at most; keeps books; preempts when told to."""

    def __init__(self, specs: list[Spec]) -> None:
        self.specs = specs
        self.steps = itertools.count()
        self.blocks = itertools.count()
        self.dropped: list[str] = []
        self.results: list[StepResult] = []

    def plan(self) -> StepInput:
        num_tokens, new, new_blocks, drafts = {}, [], {}, {}
        for spec in self.specs:
            if spec.done:
                continue
            if spec.preempt_at is not None and len(spec.output) >= spec.preempt_at:
                self.dropped.append(spec.name)
                spec.preempt_at, spec.known, spec.computed, spec.blocks = None, False, 0, []
                spec.logprobs, spec.prompt_logprobs = list(spec.logprobs), []
            n = min(spec.chunk, len(spec.tokens) - spec.computed)
            if spec.computed + n == len(spec.tokens) and spec.output and (guesses := spec.draft(list(spec.tokens))):
                drafts[spec.name] = guesses
                n += len(guesses)
            num_tokens[spec.name] = n
            grown = [next(self.blocks) for _ in range(-(-(spec.computed + n) // BLOCK) - len(spec.blocks))]
            spec.blocks += grown
            if spec.known:
                if grown:
                    new_blocks[spec.name] = grown
                continue
            spec.known = True
            order = WorkerRequest(
                request_id=spec.name, tokens=list(spec.tokens), num_prompt_tokens=len(spec.prompt), num_computed=0,
                blocks=list(spec.blocks), temperature=spec.temperature, seed=spec.seed, choice=0, features=spec.features,
                fields=spec.fields, prompt_logits="prompt_logprobs" in spec.fields,
            )  # fmt: skip
            new.append(order)
        dropped, self.dropped = self.dropped, []
        return StepInput(
            step_id=next(self.steps), num_tokens=num_tokens, new=new, new_blocks=new_blocks, drafts=drafts, dropped=dropped
        )

    def take(self, order: StepInput, result: StepResult) -> None:
        self.results.append(result)
        for spec in self.specs:
            if (n := order.num_tokens.get(spec.name)) is None:
                continue
            spec.computed += n
            if spec.name in order.drafts and spec.name in result.sampled:
                spec.computed = len(spec.tokens) + len(result.sampled[spec.name]) - 1
                del spec.blocks[-(-(spec.computed + 1) // BLOCK) :]
            if spec.name in result.errors:
                spec.error = result.errors[spec.name]
            spec.tokens += result.sampled.get(spec.name, [])
            spec.logprobs += result.logprobs.get(spec.name, [])
            spec.prompt_logprobs += result.prompt_logprobs.get(spec.name, [])
            if spec.done:
                self.dropped.append(spec.name)

    @property
    def open(self) -> bool:
        return not all(spec.done for spec in self.specs)

    def run(self, runner: ModelRunner) -> None:
        while self.open:
            order = self.plan()
            self.take(order, runner.run(order))

    async def run_async(self, worker) -> None:
        while self.open:
            order = self.plan()
            self.take(order, await worker.execute(order))


def reference_greedy(prompt: list[int], new: int) -> list[int]:
    return greedy(prompt, new, VOCAB)
