"""`tokenbus replay FILE`: does the model give the recorded tokens again, step by step?"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ..config import Config
from ..host import make_host
from ..logs import configure_logs
from ..recording.file import RecordingFile
from ..recording.replay import Replay, check_before, check_loaded, left_out, replay_config
from ..settings_cli import given

DIFFERS = 3
"""Exit status when a step gave something else."""


def run(arguments: argparse.Namespace, config: Config) -> int:
    """Exit status 0: all the same; 3: a difference; 1: it can't be replayed here."""
    configure_logs("auto", "warning")
    file = RecordingFile(arguments.recording)
    header = file.header
    config = replay_config(header, given(arguments, "model"), config.features.load)
    check_before(header, config)

    from ..worker.runner import ModelRunner

    runner = ModelRunner(config, header.features, make_host("worker", config))
    check_loaded(header, runner.load())
    runner.allocate(header.num_blocks)
    done = Replay(file, runner).run()
    for notice in file.notices:
        print(f"tokenbus: {notice}", file=sys.stderr)
    if done.left_out:
        print(f"tokenbus: {left_out(done)}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"same": done.difference is None, "lossless": header.lossless, **asdict(done)}, indent=2, default=str))
    else:
        print(f"{header.model}, {header.dtype}, {header.layers}: {done.steps} steps, {done.tokens} tokens")
        if not header.lossless:
            print("the recorded kernels promise no identity: a difference may be no fault")
        if done.failed:
            print(f"{done.failed} steps had failed when they were recorded: not compared")
        print("all the same" if done.difference is None else f"DIFFERS at {done.difference}")
    return 0 if done.difference is None else DIFFERS
