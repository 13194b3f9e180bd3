"""What the self test compares: kinds of sampling, and ways of running that must not change an id or a logprob.

Each way also has to show, from a count of its own, that it happened: a chunk, a cache hit, accepted and rejected drafts, a preemption.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..plugin import Plugin, PluginInfo, hookimpl
from ..request import Request
from .stand import Answer, Ask, Outcome, Stand

PLAIN_OFF = ("chunked_prefill", "prefix_cache")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"fields": {"logprobs": 3}},
    "seeded": {"temperature": 0.9, "seed": 11, "fields": {"logprobs": 2, "top_p": 0.95}},
    "penalties": {
        "temperature": 0.7,
        "seed": 13,
        "fields": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logprobs": 1},
    },
    "bias": {"temperature": 0.8, "seed": 14, "fields": {"logit_bias": {"9": 4.0, "10": -100}, "min_tokens": 4, "logprobs": 1}},
    "choice 2": {"temperature": 1.0, "seed": 11, "choice": 2, "fields": {"logprobs": 1}},
}
LENGTHS = (1, 13, 14, 15, 33, 70)
NEW = 24


@dataclass
class Cell:
    """One way of running, for one kind of sampling."""

    way: str
    kind: str
    same: bool
    fired: str
    """What shows that it happened; empty: it did not, and the cell proves nothing."""
    difference: str = ""

    @property
    def passed(self) -> bool:
        return self.same and bool(self.fired)


class Oracle(Plugin):
    """Proposes the answers, which it is told beforehand, with mistakes: right drafts and wrong ones in every step."""

    info = PluginInfo(name="selftest.oracle", summary="proposes known answers", scope="request", lossless=True)
    answers: ClassVar[dict[tuple[Any, ...], list[int]]] = {}
    mistakes: ClassVar[float] = 0.2
    """Share of wrong drafts."""

    def __init__(self, settings: Any, role: Any) -> None:
        super().__init__(settings, role)
        self._draw = random.Random(4)  # noqa: S311 - repeatable, not secret

    @classmethod
    def learn(cls, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """What it will propose for these requests."""
        for ask, answer in zip(asks, answers, strict=True):
            cls.answers[(tuple(ask.prompt), ask.choice, ask.seed, ask.temperature)] = answer.tokens

    @hookimpl
    def propose_drafts(self, request: Request, most: int) -> list[int]:
        asked = request.admitted
        answer = self.answers.get((tuple(asked.prompt), asked.choice, asked.seed, asked.temperature), [])
        rest = answer[request.num_output : request.num_output + self._draw.randint(0, most)]
        return [token if self._draw.random() >= self.mistakes else max(0, token - 1) for token in rest]


class SelfTest:
    """Runs the cells one after the other, all kinds of a way at once."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self._draw = random.Random(1)  # noqa: S311 - repeatable, not secret
        self.kinds = [kind for kind in KINDS if self._possible(KINDS[kind]["fields"])]
        self.asks = [self._ask(kind, length) for kind in self.kinds for length in LENGTHS]
        self.plain: list[Answer] = []

    def _possible(self, fields: dict[str, Any]) -> bool:
        """Whether the plugins that are on honour these fields."""
        host = self.stand.front
        claimed = {name for plugin in self.stand.names for name in host.info(plugin).claims}
        return fields.keys() <= claimed

    def _ask(self, kind: str, length: int) -> Ask:
        options: dict[str, Any] = dict(KINDS[kind])
        vocab = self.stand.info.vocab_size
        prompt = [self._draw.randrange(min(20, vocab - 1), vocab) for _ in range(length)]
        fields: dict[str, Any] = dict(options.pop("fields"))
        if self._possible({"ignore_eos": True}):
            fields["ignore_eos"] = True
        return Ask(prompt=prompt, max_tokens=NEW, fields=fields, **options)

    def run(self) -> Iterator[Cell]:
        """Plain answers come first, which all is compared with: each request alone, prompts whole, nothing cached, one thread."""
        known = {name for name in PLAIN_OFF if name in self.stand.names}
        off = tuple(sorted(known))
        self.plain = [self.stand.run([ask], off=off, threads=1).answers[0] for ask in self.asks]
        Oracle.learn(self.asks, self.plain)
        for way, run, fired in self._ways(off):
            outcome = run()
            yield from self._cells(way, outcome, fired(outcome))

    def _ways(self, off: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Outcome], Callable[[Outcome], str]]]:
        stand, asks = self.stand, self.asks
        yield "batch mates", lambda: stand.run(asks, off=off), lambda o: _many(o.largest_batch - 1, "others in a step")
        if "chunked_prefill" in off:
            rest = tuple(name for name in off if name != "chunked_prefill")
            for size in (1, 7, 16):
                yield (
                    f"chunks of {size}",
                    lambda size=size: stand.run(asks, off=rest, chunk=size),
                    lambda o: _many(o.chunks - len(asks), "more chunks than prompts"),
                )
        if "prefix_cache" in off:
            again = [replace(ask, at_step=at) for at in (0, 3 * NEW) for ask in asks]
            yield (
                "prefix cache",
                lambda: _second_half(stand.run(again, blocks=2000)),
                lambda o: _many(sum(answer.cached for answer in o.answers), "tokens from the cache"),
            )
        size = self.stand.config.cache.block_size
        tight = -(-(max(LENGTHS) + NEW) // size) + 2
        yield (
            "preemption",
            lambda: stand.run(asks, off=off, blocks=tight, max_running=8),
            lambda o: _many(o.preempted, "preemptions"),
        )
        yield (
            "drafts, right and wrong",
            lambda: stand.run(asks, off=off, on=(Oracle.info.name,), plugins=(Oracle,)),
            lambda o: _drafts(o, Oracle.info.name),
        )
        yield (
            "all at once",
            lambda: stand.run(
                [replace(ask, at_step=index % 17) for index, ask in enumerate(asks)],
                on=(Oracle.info.name,), plugins=(Oracle,), blocks=tight + 2, max_running=7, token_budget=48,
            ),
            lambda o: _drafts(o, Oracle.info.name),
        )  # fmt: skip

    def _cells(self, way: str, outcome: Outcome, fired: str) -> Iterator[Cell]:
        for kind in self.kinds:
            differences = [
                describe(index, plain, answer)
                for index, (ask, plain, answer) in enumerate(zip(self.asks, self.plain, outcome.answers, strict=True))
                if self._kind(index) == kind and not answer.same(plain)
            ]
            yield Cell(way, kind, not differences, fired, differences[0] if differences else "")

    def _kind(self, index: int) -> str:
        return self.kinds[index // len(LENGTHS)]


def describe(index: int, plain: Answer, answer: Answer) -> str:
    """Where an answer leaves the plain one."""
    for place, (token, other) in enumerate(zip(plain.tokens, answer.tokens, strict=False)):
        if token != other:
            return f"request {index}, output token {place}: {token} plain, {other} here"
    if len(plain.tokens) != len(answer.tokens):
        return f"request {index}: {len(plain.tokens)} tokens plain, {len(answer.tokens)} here"
    for place, (entry, found) in enumerate(zip(plain.logprobs, answer.logprobs, strict=False)):
        if entry != found:
            return f"request {index}, output token {place}: logprob {entry.logprob!r} plain, {found.logprob!r} here"
    return f"request {index}: ended {plain.reason!r} plain, {answer.reason!r} here"


def _many(count: float, what: str) -> str:
    return f"{count:.0f} {what}" if count > 0 else ""


def _drafts(outcome: Outcome, name: str) -> str:
    accepted, proposed = (outcome.counters.get(f"{name}.{what}_tokens", 0) for what in ("accepted", "proposed"))
    return f"{accepted:.0f} of {proposed:.0f} drafts right" if 0 < accepted < proposed else ""


def _second_half(outcome: Outcome) -> Outcome:
    """Of requests that came twice, the second ones."""
    outcome.answers = outcome.answers[len(outcome.answers) // 2 :]
    return outcome
