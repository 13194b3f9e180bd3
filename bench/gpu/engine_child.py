"""An engine process for `served`: the real one, but with random weights, and with a profiler that runs over some of its steps.

    python -m gpu.engine_child --fd N [--busy FILE --wave N --from STEP --steps N]

Requests are named WAVE-NUMBER. In waves from N on, the device's activity is recorded for some steps: the first is STEP steps behind the
last that brought new requests. FILE then gets a JSON list with an object a wave: for how long the device was busy in those steps, and over
which time. A process whose device was once watched may launch more slowly ever after: waves that are timed come first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tokenbus.core.config import Config
from tokenbus.core.engine.main import main
from tokenbus.core.plan import StepInput, StepResult
from tokenbus.core.worker.base import Worker
from tokenbus.core.worker.thread import ThreadWorker


class Activity:
    """What the device did between `start` and `stop`, from torch's profiler: device events alone; nothing without a GPU."""

    def __init__(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[kind])

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> dict[str, float]:
        """Seconds: "busy" (at least one kernel or copy ran) and "span" (from the first to the last)."""
        from torch._C._autograd import DeviceType

        self._profile.stop()
        ranges = sorted(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events() or ()
            if event.device_type == DeviceType.CUDA
        )
        return union(ranges)


def union(ranges: list[tuple[float, float]]) -> dict[str, float]:
    """ranges: in microseconds, by their beginnings; they may overlap."""
    busy, end = 0.0, float("-inf")
    for first, last in ranges:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {"busy": busy / 1e6, "span": (end - ranges[0][0]) / 1e6 if ranges else 0.0}


class WatchedWorker(ThreadWorker):
    def __init__(self, config: Config, features: tuple[str, ...], options: argparse.Namespace) -> None:
        super().__init__(config, features)
        self._options = options
        self._steps, self._wave = 0, -1
        self._activity: Activity | None = None
        self._found: list[dict[str, Any]] = []

    async def execute(self, order: StepInput) -> StepResult:
        options = self._options
        self._steps = 0 if order.new else self._steps + 1
        if order.new:
            self._wave = int(order.new[0].request_id.partition("-")[0])
        if options.busy is not None and self._wave >= options.wave:
            try:
                self._watch(len(order.num_tokens))
            except Exception as error:  # a profiler that does not work here must not end the engine
                print(f"the device's activity can't be recorded: {type(error).__name__}: {error}", file=sys.stderr)
                options.busy = self._activity = None
        return await super().execute(order)

    def _watch(self, requests: int) -> None:
        options = self._options
        if self._steps == options.first:
            self._activity = Activity()
            self._activity.start()
        elif self._activity is not None and self._steps == options.first + options.steps:
            found = self._activity.stop() | {"steps": options.steps, "requests": requests}
            self._activity = None
            self._found.append(found)
            options.busy.write_text(json.dumps(self._found), encoding="utf-8")


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", type=Path)
    parser.add_argument("--wave", type=int, default=0)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    return parser.parse_known_args(words)


def factory(options: argparse.Namespace) -> Any:
    def make(config: Config, features: tuple[str, ...]) -> Worker:
        from . import synthetic

        synthetic.install()
        return WatchedWorker(config, features, options)

    return make


if __name__ == "__main__":
    own, rest = parse(sys.argv[1:])
    sys.exit(main(factory(own), rest))
