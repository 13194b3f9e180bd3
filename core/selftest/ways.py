"""Ways of running that must not change an answer: all of them, or few in which any two meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..plugin import Plugin, PluginInfo, hookimpl
from ..request import Request
from .pairwise import pairwise
from .stand import Answer, Ask


@dataclass(frozen=True)
class Way:
    chunk: int = 0
    """Prompt tokens a step; 0: whole prompts."""
    cache: bool = False
    proposer: str = ""
    room: str = "together"
    """"alone": one request after the other; "together": all at once; "tight": a few, and not enough blocks for them."""
    restart: bool = False
    """The engine dies, once or more."""
    text: bool = False
    """Prompts come as text."""
    process: bool = False
    """The worker is a process of its own."""
    ahead: bool = False
    """A step is planned before the one before it has run."""
    threads: int = 2

    @property
    def name(self) -> str:
        parts = [f"chunks of {self.chunk}" if self.chunk else "", "prefix cache" if self.cache else "", self.proposer]
        parts += [{"alone": "one by one", "together": "batch mates", "tight": "preemption"}[self.room]]
        parts += ["restart" if self.restart else "", "text" if self.text else "", "worker process" if self.process else ""]
        parts += ["planned ahead" if self.ahead else ""]
        return ", ".join([part for part in parts if part] + [f"{self.threads} thread{'s' * (self.threads > 1)}"])


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


AXES: dict[str, tuple[Any, ...]] = {
    "chunk": (False, True),
    "cache": (False, True),
    "proposer": ("", "speculative.ngram", "speculative.suffix", Oracle.info.name),
    "room": ("alone", "together", "tight"),
    "restart": (False, True),
    "text": (False, True),
    "process": (False, True),
    "ahead": (False, True),
}
"""Fields of `Way`, and what they may be; the size of a chunk and the number of threads take turns."""
CHUNKS = (7, 16, 1)
"""The last one only for one request after the other: with a token a step few requests meet, and some end long before others begin."""


def every_way() -> list[Way]:
    """All combinations, in an order in which any part is a sample of the whole."""
    ways = [
        _way(dict(zip(AXES, values, strict=True)), number) for number, values in enumerate(itertools.product(*AXES.values()))
    ]
    return random.Random(1).sample(ways, len(ways))  # noqa: S311 - repeatable, not secret


def pairwise_ways(kinds: Sequence[str], *, text: bool = True) -> list[tuple[Way, str]]:
    """Ways, each with a kind of sampling, so that any two values meet somewhere. text: prompts can be had as text."""
    axes: dict[str, tuple[Any, ...]] = {**AXES, "text": (False, True) if text else (False,), "kind": tuple(kinds)}
    rows = pairwise(axes)
    return [(_way(row, number), row["kind"]) for number, row in enumerate(rows)]


def _way(row: dict[str, Any], number: int) -> Way:
    chunk = CHUNKS[number % (len(CHUNKS) if row["room"] == "alone" else 2)] if row["chunk"] else 0
    values: dict[str, Any] = {name: row[name] for name in AXES} | {"chunk": chunk}
    return Way(**values, threads=1 + (number // 2 + number // 7) % 2)
