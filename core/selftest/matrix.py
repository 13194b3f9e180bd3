"""Ways of running times kinds of sampling: a cell passes when every answer is the plain one, and everything it is about has happened.

What happened is counted for each answer by the stand; a cell in which its features did not fire proves nothing. Requests come in several
orders, and with less and less room where it shall be scarce, until they have.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .kinds import Question, possible, questions, questions_with
from .stand import Answer, Ask, Outcome, Stand
from .ways import Oracle, Way

TURNS = 8
"""Orders that are tried."""
TOGETHER = 3
"""After this turn only kinds whose cell lacks something are played."""
SMALL_BATCH = 6


@dataclass
class Cell:
    """One way of running, for one kind of sampling."""

    way: str
    kind: str
    fired: list[str] = field(default_factory=list)
    """What happened, with counts."""
    missing: list[str] = field(default_factory=list)
    """What should have happened and did not."""
    difference: str = ""
    """Where the first answer leaves the plain one."""

    @property
    def same(self) -> bool:
        return not self.difference

    @property
    def passed(self) -> bool:
        return self.same and not self.missing

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"same": self.same, "passed": self.passed}


class Matrix:
    """Plain answers come first, which all is compared with: each request alone, prompts whole, nothing cached, one thread."""

    def __init__(
        self,
        stand: Stand,
        names: Sequence[str],
        lengths: Sequence[int],
        new: int,
        *,
        few: bool,
        prompts: Sequence[Ask] = (),
    ) -> None:
        """names: kinds of sampling (of kinds.KINDS); those that can't be had here are left out. prompts: given ones, with media maybe, in
        place of some of `lengths`. The rest as in `kinds.questions`."""
        self.stand = stand
        self.kinds = [name for name in names if possible(stand, name)]
        if prompts:
            self.questions = questions_with(stand, self.kinds, prompts, new, few=few, plain=self._plain)
        else:
            self.questions = questions(stand, self.kinds, lengths, new, few=few, plain=self._plain)
        self.plain = [self._plain(question.ask) for question in self.questions]
        Oracle.learn([question.ask for question in self.questions], self.plain)

    def run(self, way: Way, kinds: Sequence[str] | None = None, name: str = "") -> Iterator[Cell]:
        """A cell for each kind, all run together. kinds: some of `self.kinds`. name: what to call the way."""
        cells = {kind: Cell(name or way.name, kind, missing=["a run"]) for kind in (self.kinds if kinds is None else kinds)}
        chosen = [index for index, question in enumerate(self.questions) if question.kind in cells]
        for turn in range(TURNS):
            open_kinds = {kind for kind, cell in cells.items() if cell.missing}
            if turn > TOGETHER:  # those that need it get the room to themselves, less of it if they are short
                chosen = [index for index in chosen if self.questions[index].kind in open_kinds]
            shown = self._play(way, _order(chosen, turn), tight=self._least(chosen) + max(0, 2 - turn))
            for kind in open_kinds if turn > TOGETHER else cells:
                self._judge(cells[kind], way, *shown)
            if not any(cell.same and cell.missing for cell in cells.values()):
                break
        yield from cells.values()

    # ---- playing ----------------------------------------------------------------------------------------------------------------

    def _least(self, chosen: Sequence[int]) -> int:
        """Blocks that the longest of these requests needs."""
        longest = max(len(self.questions[i].ask.prompt) + len(self.plain[i].tokens) for i in chosen)
        return -(-longest // self.stand.config.cache.block_size)

    def _plain(self, ask: Ask) -> Answer:
        return self.stand.run([ask], off=self._off(Way()), threads=1).answers[0]

    def _off(self, way: Way) -> tuple[str, ...]:
        off = {"prefix_cache": not way.cache, "chunked_prefill": not way.chunk}
        return tuple(name for name, is_off in off.items() if is_off and name in self.stand.names)

    def _play(self, way: Way, order: list[int], tight: int) -> tuple[list[tuple[int, Answer]], Outcome]:
        played = self._schedule(way, order)
        outcome = self.stand.run(
            [ask for _, ask in played],
            off=self._off(way),
            on=(way.proposer,) if way.proposer else (),
            plugins=(Oracle,) if way.proposer == Oracle.info.name else (),
            settings={way.proposer: {"adaptive": False}} if way.proposer.startswith("speculative.") else None,
            chunk=way.chunk or None,
            blocks=tight if way.room == "tight" else max(400, self._least(order) * len(order)),
            max_running={"alone": 1, "together": 4 * len(order), "tight": SMALL_BATCH}[way.room],
            threads=way.threads,
            process=way.process,
            ahead=way.ahead,
        )
        return [(index, answer) for (index, _), answer in zip(played, outcome.answers, strict=True)], outcome

    def _schedule(self, way: Way, order: list[int]) -> list[tuple[int, Ask]]:
        """Questions in the order in which they come; with a cache each comes twice: close together, or when the first ones have ended."""
        fatal = self._fatal(order, 2 if way.room == "together" else 1) if way.restart else {}
        first = [(index, self._asked(way, index, fatal.get(index, 0))) for index in order]
        if not way.cache:
            return first
        again = [(index, replace(ask, fatal_at=0)) for index, ask in first]
        if way.room == "together":
            return first + [(index, replace(ask, afterwards=True)) for index, ask in again]
        size = 1 if way.room == "alone" else 2
        groups = range(0, len(order), size)
        return [one for start in groups for half in (first, again) for one in half[start : start + size]]

    def _asked(self, way: Way, index: int, fatal_at: int) -> Ask:
        question = self.questions[index]
        if way.text and question.text is not None:
            return replace(question.ask, prompt=[], text=question.text, fatal_at=fatal_at)
        return replace(question.ask, fatal_at=fatal_at)

    def _fatal(self, order: list[int], each: int) -> dict[int, int]:
        """At which tokens the engine dies: in some answers of each kind, the long ones."""
        found: dict[int, int] = {}
        sizes = {i: len(self.plain[i].tokens) for i in order}
        for kind in self.kinds:
            own = sorted((i for i in order if self.questions[i].kind == kind), key=lambda i: sizes[i])
            found |= {i: max(1, min(3 + i % 5, sizes[i] - 2)) for i in own[-each:] if sizes[i] > 1}
        return found

    # ---- judging ----------------------------------------------------------------------------------------------------------------

    def _judge(self, cell: Cell, way: Way, answers: list[tuple[int, Answer]], outcome: Outcome) -> None:
        own = [(i, answer) for i, answer in answers if self.questions[i].kind == cell.kind]
        for i, answer in own:
            if not (cell.difference or answer.same(self.plain[i])):
                cell.difference = describe(i, self.plain[i], answer)
        counts = self._counts(cell.kind, way, own, outcome)
        missing = [what for what, count in counts.items() if not count]
        if len(missing) < len(cell.missing) or cell.missing == ["a run"]:
            cell.missing = missing
            cell.fired = [f"{count} {what}" for what, count in counts.items() if count]

    def _counts(self, kind: str, way: Way, own: list[tuple[int, Answer]], outcome: Outcome) -> dict[str, int]:
        """Everything that has to happen, and how often it did."""
        answers = [answer for _, answer in own]
        media = any(self.questions[i].ask.media for i, _ in own)
        reads_cache = "prompt_logprobs" not in self.questions[own[0][0]].ask.fields  # such a request never does
        counts = {
            "chunks": (way.chunk, sum(answer.chunks for answer in answers if answer.chunks > 1)),
            "tokens from the cache": (way.cache and reads_cache, sum(answer.cached for answer in answers)),
            "drafts right": (way.proposer, sum(answer.accepted for answer in answers)),
            "wrong": (way.proposer, sum(answer.rejected for answer in answers)),
            "others in a step": (way.room != "alone", max(answer.mates for answer in answers)),
            "preemptions": (way.room == "tight", sum(answer.preempted for answer in answers)),
            "answers gone on with": (way.restart, sum(answer.resumed for answer in answers)),
            "tokens made of text": (way.text, sum(answer.tokenized for answer in answers)),
            "tokens of media": (media, outcome.media_tokens),
            "steps planned ahead": (way.ahead and not way.proposer, outcome.ahead),
            "steps elsewhere": (way.process, outcome.steps if outcome.worker_pid != os.getpid() else 0),
        }
        return {what: count for what, (wanted, count) in counts.items() if wanted} | self._kind_counts(kind, own)

    def _kind_counts(self, kind: str, own: list[tuple[int, Answer]]) -> dict[str, int]:
        asked = [(self.questions[i], answer) for i, answer in own]
        if kind == "grammar":
            return {"answers held to the grammar": sum(_held(question, answer) for question, answer in asked)}
        if kind == "stop strings":
            return {"stop strings": sum(answer.stopped is not None for answer in (a for _, a in asked))}
        if kind == "stop ids":
            return {"stop ids": sum(answer.reason == "stop" for _, answer in asked)}
        if kind == "n=3":
            groups = {question.ask.group for question, _ in asked}
            texts = {(question.ask.group, tuple(answer.tokens)) for question, answer in asked}
            return {"more answers than prompts": len(texts) - len(groups)}
        return {}


def _order(chosen: list[int], turn: int) -> list[int]:
    """As they are, backwards, and then in any order."""
    if turn < 2:
        return chosen[:: 1 - 2 * turn]
    return random.Random(turn).sample(chosen, len(chosen))  # noqa: S311 - repeatable, not secret


def _held(question: Question, answer: Answer) -> bool:
    """It ended where the grammar does, and would not have been this answer without."""
    return answer.reason == "stop" and question.unheld is not None and answer.tokens != question.unheld.tokens


def describe(index: int, plain: Answer, answer: Answer) -> str:
    """Where an answer leaves the plain one."""
    for place, (token, other) in enumerate(zip(plain.tokens, answer.tokens, strict=False)):
        if token != other:
            return f"request {index}, output token {place}: {token} plain, {other} here"
    if len(plain.tokens) != len(answer.tokens):
        return f"request {index}: {len(plain.tokens)} tokens plain, {len(answer.tokens)} here"
    for what in ("logprobs", "prompt_logprobs"):
        entries, found = getattr(plain, what), getattr(answer, what)
        for place, (one, other) in enumerate(zip(entries, found, strict=False)):
            if one != other:
                return f"request {index}, {what} {place}: {one.logprob!r} plain, {other.logprob!r} here"
        if len(entries) != len(found):
            return f"request {index}: {len(entries)} {what} plain, {len(found)} here"
    if plain.prompt != answer.prompt:
        return f"request {index}: its text gave other ids"
    if plain.text != answer.text:
        return f"request {index}: text {plain.text!r} plain, {answer.text!r} here"
    return f"request {index}: ended {plain.reason!r} ({plain.stopped!r}) plain, {answer.reason!r} ({answer.stopped!r}) here"
