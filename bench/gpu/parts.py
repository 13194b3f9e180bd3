"""The parts of the suite, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_SECONDS = 455.0
"""For all parts together: less than eight minutes with what is around them."""


@dataclass(frozen=True)
class Part:
    name: str
    module: str
    about: str
    seconds: float
    """After which it is ended."""
    correctness: bool = False
    """Its failure makes the suite's exit status 1. It can also run in Triton's interpreter."""
    default: bool = True
    needs: tuple[str, ...] = ()
    """Parts whose figures it uses; they run too, before it."""


PARTS = {
    part.name: part
    for part in (
        Part(
            "kernels", "kernels", "every kernel against its float32 reference, and the tests marked cuda", 130, correctness=True
        ),
        Part("ids", "ids", "greedy ids of a 135M-shaped Llama in float32, against transformers", 110, correctness=True),
        Part("copy", "limits", "what the card reaches: copies and a bfloat16 matrix product", 20),
        Part("attention", "attention", "decode and prompt attention, against those limits and torch's", 70, needs=("copy",)),
        Part("model", "model", "decode steps of synthetic 1B and 8B Llamas through the engine", 150, needs=("copy",)),
        Part("linears", "linears", "the matrix products of a decode step, by kind of weight", 60, needs=("copy",)),
        Part("tune", "tune", "measures block sizes and writes kernels/triton/configs/DEVICE.json", 560, default=False),
    )
}


def chosen(names: list[str], *, interpret: bool) -> list[Part]:
    """Those named and what they need, or the default ones; in the interpreter those about correctness. Raises ValueError for a name that
    is none, and for a part that can't be interpreted."""
    if unknown := [name for name in names if name not in PARTS]:
        raise ValueError(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if interpret and (timed := [name for name in names if not PARTS[name].correctness]):
        raise ValueError(f"{timed[0]} measures speed: without a GPU there is nothing to measure")
    wanted = {name for name, part in PARTS.items() if (name in names if names else part.default)}
    if interpret:
        wanted = {name for name in wanted if PARTS[name].correctness}
    wanted |= {need for name in wanted for need in PARTS[name].needs}
    return [part for name, part in PARTS.items() if name in wanted]
