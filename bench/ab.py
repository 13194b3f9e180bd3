"""Experiments on a real server: two equal arms, then an arm whose P99 TTFT was made worse by a fifth, and what the report says of each.

    python bench/ab.py [--minutes 40] [--rate 6] [--prompt 90] [--answer 8:24] [--slice 15] [--washout 2] [--blocks 10]
                       [--arg ARGUMENTS] [--keep FOLDER [--slow-only]] [--out FILE]

A server with the demo model is under an open-loop load all the time: Poisson arrivals at `--rate` a second, prompts of 8 to 500
random tokens (log-normal, half of them shorter than `--prompt`), `--answer` new tokens. Arms take turns by time slices, switched
live by the server itself.
1. "equal": arms A and B without any switch, for `--minutes`.
2. "slow": arm B has the plugin bench.slow (bench/serving/slow.py), which holds 3 requests of 100 back before their prompt is run.
   For how long is worked out from the rows of 1, so that P99 TTFT becomes 1.2 times what it was.
While they run, the report is made after each 10 blocks of slices, as somebody would who can't wait: a false alarm at any of these
looks counts, and the first look that finds "slow" is named. Then both reports are printed as `tokenbus ab report` prints them.
--keep: the rows stay, in FOLDER/experiments/equal and .../slow; `ab_power --rows` takes the former. --slow-only: "equal" is there already.
Nothing else may run on the machine. Slices must be much longer than a request takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from ab_power import SHARE, first_tokens, hold
from load import Client
from serving.servers import MODEL, Server, Variant, served

from tokenbus.core.experiments.records import experiment_dir, read_rows

HERE = Path(__file__).resolve().parent
TOKENBUS = (sys.executable, "-m", "tokenbus.core.cli")


@dataclass
class Phase:
    name: str
    looks: list[dict[str, Any]] = field(default_factory=list)
    """Reports, in order; the last is of the end."""
    sent: int = 0
    failed: int = 0

    @property
    def primary(self) -> list[dict[str, Any]]:
        """The primary measure at each look; an empty one before anything could be compared."""
        return [next((row for row in look["comparisons"] if row["family"] == "primary"), {}) for look in self.looks]


def settings(options: argparse.Namespace, state: Path, held: float | None) -> str:
    """tokenbus.toml; `held`: seconds that bench.slow holds a request back, None: no such plugin."""
    lines = ["[server]", f"state_dir = {json.dumps(str(state))}"]
    name, arms = (
        ("equal", {"A": {}, "B": {}}) if held is None else ("slow", {"A": {"bench.slow": False}, "B": {"bench.slow": True}})
    )
    if held is not None:
        lines += ["[features]", 'load = ["slow:Slow"]', '[plugins."bench.slow"]', f"share = {SHARE}", f"seconds = {held:.6f}"]
    lines += [
        f"[experiments.{name}]",
        'split = "slice"',
        f"slice_seconds = {options.slice}",
        f"washout_seconds = {options.washout}",
    ]
    for arm, features in arms.items():
        lines.append(f"[experiments.{name}.arms.{arm}]")
        lines += (
            [f"features = {{ {', '.join(f'{json.dumps(k)} = {str(v).lower()}' for k, v in features.items())} }}"]
            if features
            else []
        )
    return "\n".join(lines) + "\n"


def report(state: Path, name: str, *, as_json: bool) -> str:
    words = [*TOKENBUS, "ab", "report", str(state), "--experiment", name, *(["--json"] if as_json else [])]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def act(url: str, action: str, name: str) -> None:
    body = json.dumps({"action": action, "name": name}).encode()
    request = urllib.request.Request(f"{url}/v1/tokenbus/experiments", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60):
        pass


async def load(server: Server, options: argparse.Namespace, phase: Phase, seconds: float, seed: str) -> None:
    """Requests arrive whether or not others have ended."""
    draw = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600), connector=connector) as session:
        client = Client(session, server.url, MODEL)

        async def one() -> None:
            length = min(500, max(8, round(options.prompt * math.exp(draw.gauss(0.0, 0.6)))))
            prompt = [draw.randrange(1000, 49000) for _ in range(length)]
            try:
                await client.complete(prompt, draw.randint(*options.answer))
            except (RuntimeError, aiohttp.ClientError, TimeoutError):
                phase.failed += 1

        end = time.monotonic() + seconds
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            while due < end:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(one())
                phase.sent += 1
                due += draw.expovariate(options.rate)


async def looks(state: Path, options: argparse.Namespace, phase: Phase, seconds: float) -> None:
    """Reports while it runs."""
    end = time.monotonic() + seconds
    every = 2 * options.slice * options.blocks
    while time.monotonic() + 1.5 * every < end:
        await asyncio.sleep(every)
        phase.looks.append(json.loads(await asyncio.to_thread(report, state, phase.name, as_json=True)))
        print(f"{phase.name}, look {len(phase.looks)}: {'; '.join(phase.looks[-1]['verdicts'])}", flush=True)


async def both(*parts: Any) -> None:
    async with asyncio.TaskGroup() as tasks:
        for part in parts:
            tasks.create_task(part)


def run(options: argparse.Namespace, folder: Path, state: Path, name: str, held: float | None) -> Phase:
    phase = Phase(name)
    seconds = 60 * options.minutes
    config = folder / f"{name}.toml"
    config.write_text(settings(options, state, held))
    words = (
        *TOKENBUS,
        "serve",
        "--port",
        "{port}",
        "--served-model-name",
        MODEL,
        "--config",
        str(config),
        *shlex.split(options.arg),
    )
    with served(Variant(name, words, 0, {"PYTHONPATH": python_path()})) as server:
        asyncio.run(load(server, options, Phase("warm"), min(10.0, seconds / 4), f"{options.seed} warm"))
        act(server.url, "start", name)
        asyncio.run(
            both(load(server, options, phase, seconds, f"{options.seed} {name}"), looks(state, options, phase, seconds))
        )
        act(server.url, "stop", name)
    phase.looks.append(json.loads(report(state, name, as_json=True)))
    return phase


def python_path() -> str:
    """The plugin's folder, before what there is."""
    return ":".join([str(HERE / "serving"), *(part for part in sys.path if part and part != str(HERE))])


def held_back(state: Path) -> float:
    """Seconds by which bench.slow must hold its requests back, by the rows of "equal"."""
    ttft = first_tokens(read_rows(experiment_dir(state, "equal")))
    if not len(ttft):
        raise SystemExit("no request fell into a slice as a whole: longer slices (--slice) or a lower --rate are needed")
    return hold(ttft)


def two_numbers(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


def summary(phases: list[Phase]) -> list[str]:
    lines = [
        "| experiment | sent | failed | compared (A, B) | blocks | looks | P99 TTFT | any alarm | first look that found it worse |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in phases:
        end, last = phase.looks[-1], phase.primary[-1]
        shown = (
            "not enough data"
            if last["change"] is None
            else f"{last['change']:+.1f} % [{last['low']:+.1f}, {last['high']:+.1f}]"
        )
        alarms = sum(any(row["different"] for row in look["comparisons"]) for look in phase.looks)
        found = [i for i, row in enumerate(phase.primary, 1) if row.get("verdict") == "worse"]
        cells = [
            phase.name, phase.sent, phase.failed, ", ".join(str(arm["requests"]) for arm in end["arms"]), last.get("clusters", [0])[0],
            len(phase.looks), shown, f"at {alarms} looks", f"{found[0]} of {len(phase.looks)}" if found else "none",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=40, help="of each experiment")
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second: well below what the server can do")
    parser.add_argument("--prompt", type=float, default=90.0, help="tokens; half of the prompts are shorter")
    parser.add_argument("--answer", type=two_numbers, default=(8, 24), metavar="LOW:HIGH", help="tokens")
    parser.add_argument("--slice", type=float, default=15.0, help="seconds")
    parser.add_argument("--washout", type=float, default=2.0, help="seconds")
    parser.add_argument("--blocks", type=int, default=10, help="blocks of slices between two looks")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--arg", default="", help="more arguments for the server")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--slow-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.slow_only and options.keep is None:
        parser.error('--slow-only needs --keep, with the rows of "equal"')
    with tempfile.TemporaryDirectory() as folder:
        state = options.keep or Path(folder) / "state"
        phases = [] if options.slow_only else [run(options, Path(folder), state, "equal", None)]
        held = held_back(state)
        print(f"bench.slow: {SHARE:.0%} of requests wait {1e3 * held:.1f} ms", flush=True)
        phases.append(run(options, Path(folder), state, "slow", held))
        lines = [*summary(phases), "", f"bench.slow held {SHARE:.0%} of the requests back for {1e3 * held:.1f} ms.", ""]
        for phase in phases:
            lines += ["```text", report(state, phase.name, as_json=False).rstrip(), "```", ""]
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
