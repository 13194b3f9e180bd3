"""Decode steps of synthetic Llamas through a whole engine: against the memory floor, with the determinism switch off and on.

step      from one step's output to the next one's, as the front sees it
floor     weights and K/V that the step must read and write, by the model's arithmetic, over the measured copy bandwidth
busy      for how long the device ran at least one kernel or copy in a step, by torch's profiler, in steps that are not timed
gap       step less busy: the device waits for the host
idle      for how long the worker had no order, by its own clock

Before anything is timed all engines run beside each other for a few steps, so that what they compile is there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .record import Record, finish, make_record, part_options
from .served import Measured, Wave, serve
from .warm import SHARE


@dataclass(frozen=True)
class Case:
    shape: str
    requests: tuple[int, ...]
    settings: Mapping[str, Mapping[str, Any]]
    label: str
    seconds: float
    """Without which it isn't begun."""

    @property
    def waves(self) -> list[Wave]:
        return [Wave(count) for count in self.requests]


def model(**settings: Any) -> dict[str, dict[str, Any]]:
    return {"model": {"device": "cuda", **settings}}


WARM_STEPS = 12
RESERVE = 6.0
"""Seconds in which an engine that is late can be ended."""
PLAIN, INVARIANT, EAGER = "determinism off", "determinism on", "determinism off, no graphs"
CASES = (
    Case("8B", (1, 32), model(batch_invariant="off"), PLAIN, 20),
    Case("1B", (1, 32, 256), model(batch_invariant="off"), PLAIN, 15),
    Case("8B", (32,), model(batch_invariant="on"), INVARIANT, 15),
    Case("1B", (256,), model(batch_invariant="on"), INVARIANT, 12),
    Case("1B", (256,), model(batch_invariant="off", cuda_graphs="off"), EAGER, 12),
)


def tell(record: Record, case: Case, found: Sequence[Measured]) -> None:
    for measured in found:
        count, period = measured.wave.requests, measured.period
        floor = measured.bytes_moved / record.known.get("limit.copy", float("nan"))
        low, high = measured.range
        gap, busy = measured.gap, measured.busy
        record.row(
            "Decode steps, bf16, through the engine",
            **{
                "model": case.shape,
                "requests": str(count),
                "how": case.label,
                "step, ms": f"{period * 1e3:.3f} ({low * 1e3:.3f} ... {high * 1e3:.3f})",
                "tokens/s": f"{count / period:.0f}",
                "floor, ms": f"{floor * 1e3:.3f}",
                "floor / step": f"{floor / period:.1%}",
                "busy, ms": "-" if busy is None else f"{busy * 1e3:.3f}",
                "gap, ms": "-" if gap is None else f"{gap * 1e3:.3f}",
                "idle, ms": f"{measured.idle * 1e3:.3f}",
            },
        )
        key = f"{case.shape}.{count}"
        if case.label == PLAIN:
            record.figure(f"step.{key}.share", floor / period)
            record.figure(f"step.{key}.seconds", period)
            if gap is not None:
                record.figure(f"step.{key}.gap_ms", gap * 1e3)
        elif case.label == INVARIANT and (plain := record.known.get(f"step.{key}.seconds")):
            record.figure(f"determinism.{key}.cost", 1 - plain / period)


def warm(case: Case, seconds: float) -> None:
    """Whatever goes wrong does so again when it is measured."""
    waves = [Wave(count, steps=WARM_STEPS) for count in case.requests]
    with contextlib.suppress(Exception):
        serve(case.shape, waves, case.settings, watch=False, seconds=seconds)


def run(record: Record, case: Case) -> None:
    tell(record, case, serve(case.shape, case.waves, case.settings, seconds=record.left - RESERVE))


def main() -> None:
    record = make_record(part_options(__doc__).parse_args())
    began = time.monotonic()
    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(lambda case: warm(case, record.left * SHARE), [case for case in CASES if case.label != EAGER]))
    print(f"all engines ran once, in {time.monotonic() - began:.0f} s", flush=True)
    for case in CASES:
        name = f"{case.shape}, {case.label}"
        record.attempt(name, lambda case=case: run(record, case), case.seconds)
    finish(record)


if __name__ == "__main__":
    main()
