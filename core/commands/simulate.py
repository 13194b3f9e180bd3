"""`tokenbus simulate FILE --set NAME=VALUE`: what the recorded load would have met under other settings. No model is loaded."""

from __future__ import annotations

import argparse
import json
import sys

from ..config import Config
from ..host import make_host
from ..recording.ask import simulate
from ..recording.history import read
from ..recording.report import table


def run(arguments: argparse.Namespace, config: Config) -> int:
    answer = simulate(read(arguments.recordings), arguments.wishes, make_host("engine", config).catalogue)
    for notice in answer.notices:
        print(f"tokenbus: {notice}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(answer.as_json(), indent=2))
        return 0
    print("\n".join(table(answer.columns)))
    fit = answer.fit
    print(
        f"\nstep times fitted from {fit.steps} steps: half of them within {fit.median_error:.0%}, nine tenths within {fit.p90_error:.0%}"
    )
    return 0
