"""How well `tokenbus simulate` predicts: an open-loop load, recorded, beside real runs of the same load under the same and other settings.

    python bench/simulate.py [--requests 1000] [--rate 4] [--runs 3] [--set max_running=8 --set ...] [--keep FOLDER] [--out FILE]

Requests come at random times (Poisson, `--rate` a second, the same for every run of one seed) whatever the server does, over HTTP; a third
of the prompts begin with one of four common beginnings. Every run is a new server with the recorder on (level shape), its times are those
of its own recording, on the engine's side. Settings take turns, so that a machine that becomes slower does so for all of them. From the
first run under default settings alone all others are predicted. "error" is the prediction against the median of the real runs; "run to
run" is how far the real runs lie apart (largest less smallest, over the median), which no prediction can beat.
"busy" is the share of time in which a step ran: the nearer to 1, the more a little error in step times becomes in waiting times (in a line
with one server, by 1 / (1 - busy)). "step times by the fit": what the fit to the first run says of this run's own steps, all together,
beside what they took: how much faster or slower the machine was, and what the fit itself gets wrong. Choose a rate that leaves some room.
--keep: the recordings stay, a folder for each run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from load import Client
from serving.servers import MODEL, Server, Variant, served

from tokenbus.core.config import Config
from tokenbus.core.host import make_host
from tokenbus.core.recording import ask
from tokenbus.core.recording.file import SUFFIX
from tokenbus.core.recording.history import History, read
from tokenbus.core.recording.report import numbers
from tokenbus.core.recording.simulate import recorded
from tokenbus.core.recording.step_time import StepTimes

SHOWN = ("ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99", "e2e_p99")
DEFAULT_WISHES = ("max_running=6", "prefix_cache=off", "chunked_prefill=off", "chunked_prefill.slow_down=1.5")
VOCABULARY = 40000


@dataclass(frozen=True)
class Job:
    at: float
    """Seconds after the beginning."""
    prompt: list[int]
    output: int


def jobs(count: int, rate: float, seed: int) -> list[Job]:
    draw = random.Random(seed)
    heads = [[draw.randrange(1000, VOCABULARY) for _ in range(160)] for _ in range(4)]
    made, at = [], 0.0
    for _ in range(count):
        at += draw.expovariate(rate)
        length = min(700, max(8, int(draw.lognormvariate(4.2, 0.9))))
        prompt = [draw.randrange(1000, VOCABULARY) for _ in range(length)]
        if draw.random() < 1 / 3:
            prompt = [*draw.choice(heads), *prompt]
        made.append(Job(at, prompt, min(96, max(2, int(draw.lognormvariate(3.0, 0.7))))))
    return made


async def play(server: Server, work: list[Job]) -> None:
    """Send every job at its time; wait for all answers."""
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        client = Client(session, server.url, MODEL)
        began = time.perf_counter()

        async def one(job: Job) -> None:
            await asyncio.sleep(max(0.0, began + job.at - time.perf_counter()))
            await client.complete(job.prompt, job.output)

        await asyncio.gather(*map(one, work))


def flags(wishes: tuple[str, ...]) -> list[str]:
    """What `serve` is started with to have what `--set` asks for."""
    words: list[str] = []
    for wish in wishes:
        name, _, value = wish.partition("=")
        if value in {"on", "off"}:
            words += ["--enable" if value == "on" else "--disable", name]
        elif "." in name:
            words += ["--plugin-setting", wish]
        else:
            words += ["--" + name.replace("_", "-"), value]
    return words


def run(keep: Path | None, work: list[Job], wishes: tuple[str, ...]) -> History:
    """One real run; what it recorded."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if keep is None else tempfile.mkdtemp(prefix="+".join(wishes) or "default", dir=keep)
        command = [
            sys.executable, "-m", "tokenbus.core.cli", "serve", "--port", "{port}", "--served-model-name", MODEL, "--enable", "recorder",
            "--plugin-setting", f"recorder.path={folder}", "--max-waiting", "100000", "--request-timeout", "86400", *flags(wishes),
        ]  # fmt: skip
        with served(Variant("tokenbus", tuple(command), 0)) as server:
            asyncio.run(play(server, work))
        return read(sorted(Path(folder).glob(f"*{SUFFIX}")))


def busy(run: History) -> float:
    """Share of time in which a step ran."""
    return sum(one.step.seconds for one in run.steps) / run.seconds


def by_fit(times: StepTimes, run: History) -> float:
    """How much longer a fit says that a run's steps took, all together; 0: as long."""
    return sum(times.seconds(one.runs) for one in run.steps) / sum(one.step.seconds for one in run.steps) - 1


def report(wishes: tuple[str, ...], predicted: dict[str, float], runs: list[History], times: StepTimes) -> list[str]:
    real = [numbers(recorded(run)) for run in runs]
    lines = [
        f"### {', '.join(wishes) or 'the same settings'}",
        "",
        "| | real runs | predicted | error | run to run |",
        "|---|---|---|---|---|",
    ]
    for name in SHOWN:
        values = [one[name] for one in real]
        middle = statistics.median(values)
        shown = ", ".join(f"{1000 * value:,.1f}" for value in values)
        error, spread = predicted[name] / middle - 1, (max(values) - min(values)) / middle
        lines.append(f"| {name.replace('_', ' ')} ms | {shown} | {1000 * predicted[name]:,.1f} | {error:+.1%} | {spread:.1%} |")
    for name in ("steps", "preemptions", "cached_share", "output_tokens_per_second"):
        shown = ", ".join(f"{one[name]:,.4g}" for one in real)
        lines.append(f"| {name.replace('_', ' ')} | {shown} | {predicted[name]:,.4g} | | |")
    lines.append(f"| busy | {', '.join(f'{busy(run):.0%}' for run in runs)} | | | |")
    lines.append(f"| step times by the fit | {', '.join(f'{by_fit(times, run):+.1%}' for run in runs)} | | | |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (default: 4)")
    parser.add_argument("--runs", type=int, default=3, help="real runs of each setting (default: 3)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--set", action="append", dest="wishes", metavar="NAME=VALUE", help=f"default: {' '.join(DEFAULT_WISHES)}"
    )
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    work = jobs(given.requests, given.rate, given.seed)
    wishes = DEFAULT_WISHES if given.wishes is None else tuple(given.wishes)
    catalogue = make_host("engine", Config()).catalogue
    prompts, outputs = sum(len(job.prompt) for job in work), sum(job.output for job in work)
    every = ((), *((wish,) for wish in wishes))
    runs: dict[tuple[str, ...], list[History]] = {wish: [] for wish in every}
    for turn in range(given.runs):
        for wish in every:
            print(f"run {turn + 1} of {given.runs}: {', '.join(wish) or 'default settings'}", flush=True)
            runs[wish].append(run(given.keep, work, wish))
    first = runs[()][0]
    times = StepTimes(first.steps)
    lines = [
        f"# Simulation beside real runs, SmolLM2-135M on a CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"    scripts/bench {' '.join(['simulate', *sys.argv[1:]])}",
        "",
        (
            f"{given.requests} requests, {given.rate:g} a second, open loop; {prompts:,} prompt and {outputs:,} output tokens. Everything "
            "is predicted from the first run with default settings."
        ),
        "",
    ]
    for wish in every:
        answer = ask.simulate(first, wish, catalogue)
        lines += report(wish, answer.columns[ask.WISHED if wish else ask.SAME], runs[wish], times)
        lines += [*(f"- {notice}" for notice in answer.notices), *([""] if answer.notices else [])]
    fit = times.fit
    lines.append(f"Step times: {fit.steps} steps, median error {fit.median_error:.1%}, P90 {fit.p90_error:.1%}.")
    print("\n".join(lines))
    if given.out:
        given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
