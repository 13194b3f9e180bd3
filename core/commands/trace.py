"""`tokenbus trace FILE -o trace.json`: a recording as a timeline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from ..config import Config
from ..recording.history import read
from ..recording.trace import trace


def run(arguments: argparse.Namespace, config: Config) -> int:
    history = read(arguments.recordings)
    for notice in history.notices:
        print(f"tokenbus: {notice}", file=sys.stderr)
    Path(arguments.output).write_bytes(msgspec.json.encode(trace(history)))
    print(f"{arguments.output}: {len(history.lives)} requests, {len(history.steps)} steps; open it at ui.perfetto.dev")
    return 0
