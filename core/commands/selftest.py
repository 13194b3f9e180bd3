"""`tokenbus selftest`: does every switch leave every answer as it is, with this model on this machine?"""

from __future__ import annotations

import argparse
import json
import sys

from ..config import Config
from ..selftest.matrix import Cell
from ..selftest.run import SelfTest
from ..selftest.stand import Stand


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Exit status 0: all the same, or the model promises no identity here; 1: a difference, or a way of running that did not happen."""
    with Stand(config, config.features.enable, config.features.disable) as stand:
        return _run(arguments, stand)


def _run(arguments: argparse.Namespace, stand: Stand) -> int:
    info = stand.info
    if not arguments.json:
        print(f"{info.model}, {info.dtype}; on: {', '.join(stand.names)}")
        print("lossless" if info.lossless else f"lossless: no, because {info.lossless_reason}; differences are no failure here")
        print(
            f"each request beside its plain run (alone, prompt whole, nothing cached, one thread)\n\n{_line('', 'sampling', '')}"
        )
    cells: list[Cell] = []
    test = SelfTest(stand)
    for cell in test.run():
        cells.append(cell)
        if not arguments.json:
            verdict = "same" if cell.same else "DIFFERS"
            print(_line(cell.way, cell.kind, verdict, _shown(cell)), flush=True)
    failed = [cell for cell in cells if cell.missing or (info.lossless and not cell.same)]
    if arguments.json:
        report = {
            "model": info.model, "dtype": info.dtype, "lossless": info.lossless, "lossless_reason": info.lossless_reason,
            "features": list(stand.names), "media": {"kinds": test.media.kinds, "problem": test.media.problem},
            "cells": [cell.as_dict() for cell in cells],
        }  # fmt: skip
        print(json.dumps(report, indent=2))
    else:
        same = sum(cell.same for cell in cells)
        print(f"\n{same} of {len(cells)} the same, ids and logprobs, bit by bit")
        if test.media.kinds:
            print(f"with prompts that have media: {', '.join(test.media.kinds)}")
    for cell in failed:
        problem = cell.difference or f"did not happen: {', '.join(cell.missing)}"
        print(f"tokenbus: {cell.way}, {cell.kind}: {problem}", file=sys.stderr)
    if test.media.problem:
        print(f"tokenbus: the model reads media, and no prompt with any could be made: {test.media.problem}", file=sys.stderr)
    return 1 if failed or test.media.problem else 0


def _shown(cell: Cell) -> str:
    return ", ".join([*cell.fired, *(f"NO {what}" for what in cell.missing)])


def _line(way: str, kind: str, verdict: str, fired: str = "") -> str:
    return f"{way:<34} {kind:<12} {verdict:<8} {fired}".rstrip()
