"""`tokenbus selftest`: a short version of the equivalence suite, with the user's model and its own answers."""

from __future__ import annotations

from collections.abc import Iterator

from .matrix import Cell, Matrix
from .stand import Stand
from .ways import Oracle, Way

KINDS = ("greedy", "seeded", "penalties", "bias", "logprobs", "stop strings", "grammar", "n=3")
LENGTHS = (1, 15, 40)
NEW = 36
"""Two blocks and more: answers grow until room is scarce."""


class SelfTest:
    """Runs the ways one after the other, all kinds of a way at once. What needs a plugin that is off is left out."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.ways = self._ways()

    def run(self) -> Iterator[Cell]:
        matrix = Matrix(self.stand, KINDS, LENGTHS, NEW, few=False)
        for name, way in self.ways.items():
            yield from matrix.run(way, name=name)

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
            ways["prompts as text"] = Way(text=True)
        ways["planned ahead"] = Way(ahead=True)
        ways["planned ahead, little room"] = Way(16 * chunked, cached, room="tight", ahead=True)
        ways["all at once"] = Way(16 * chunked, cached, Oracle.info.name, "tight", restart=True, text=text)
        return ways
