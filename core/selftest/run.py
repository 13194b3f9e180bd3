"""`tokenbus selftest`: a short version of the equivalence suite, with the user's model and its own answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .matrix import Cell, Matrix
from .media import MediaPrompts, media_prompts
from .stand import Stand
from .ways import Oracle, Way

KINDS = ("greedy", "seeded", "penalties", "bias", "logprobs", "stop strings", "grammar", "n=3")
LENGTHS = (1, 15, 40)
NEW = 36
"""Two blocks and more: answers grow until room is scarce."""
MEDIA_KINDS = ("greedy", "seeded", "logprobs", "n=3")
"""Of prompts with pictures and sounds, which may be long."""
AS_TEXT = "prompts as text"
OTHER = "another picture or sound"
"""The cell that compares answers to prompts which differ in nothing else."""


class SelfTest:
    """Runs the ways one after the other, all kinds of a way at once; then, with a model that reads media, those that matter for them with
    prompts that have some. What needs a plugin that is off is left out."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.ways = self._ways()
        self.media: MediaPrompts = media_prompts(stand, NEW)

    def run(self) -> Iterator[Cell]:
        matrix = Matrix(self.stand, KINDS, LENGTHS, NEW, few=False)
        for name, way in self.ways.items():
            yield from matrix.run(way, name=name)
        if self.media.asks:
            yield from self._run_media()

    def _run_media(self) -> Iterator[Cell]:
        matrix = Matrix(self.stand, MEDIA_KINDS, (), NEW, few=False, prompts=self.media.asks)
        yield from _others(matrix)
        for name, way in self.ways.items():
            if way.chunk != 1 and name != AS_TEXT:  # one token a step takes long, and cuts nothing that 7 don't
                yield from matrix.run(replace(way, text=False), name=f"{name}, media")

    def _ways(self) -> dict[str, Way]:
        chunked, cached = ("chunked_prefill" in self.stand.names, "prefix_cache" in self.stand.names)
        text = self.stand.front.tokenizer is not None
        ways = {"batch mates": Way()}
        if chunked:
            ways |= {f"chunks of {size}": Way(chunk=size) for size in (1, 7)}
        if cached:
            ways["prefix cache"] = Way(cache=True)
        ways["preemption"] = Way(room="tight")
        ways["drafts, right and wrong"] = Way(proposer=Oracle.info.name)
        ways["engine restart"] = Way(restart=True)
        if text:
            ways[AS_TEXT] = Way(text=True)
        ways["planned ahead"] = Way(ahead=True)
        ways["planned ahead, little room"] = Way(16 * chunked, cached, room="tight", ahead=True)
        ways["all at once"] = Way(16 * chunked, cached, Oracle.info.name, "tight", restart=True, text=text)
        return ways


def _others(matrix: Matrix) -> Iterator[Cell]:
    """Whether the encoder's rows get anywhere: of each kind of sampling, prompts that differ in their media alone, answered differently."""
    for kind in matrix.kinds:
        cell, seen = Cell(OTHER, kind), {}
        for question, answer in zip(matrix.questions, matrix.plain, strict=True):
            ask = question.ask
            if question.kind == kind and ask.media:
                seen.setdefault((tuple(ask.prompt), ask.choice), []).append((answer.tokens, answer.logprobs))
        compared = [answers for answers in seen.values() if len(answers) > 1]
        differing = sum(answers[0] != other for answers in compared for other in answers[1:])
        wanted = sum(len(answers) - 1 for answers in compared)
        cell.fired = [f"{differing} other answers"] if differing else []
        cell.missing = ["another answer"] if differing < wanted or not wanted else []
        yield cell
