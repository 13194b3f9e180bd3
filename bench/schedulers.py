"""What each way to make batches brings: one open-loop load under scheduling.unified, two_phase and static; a table and a plot.

    python bench/schedulers.py [--policies unified,two_phase,static] [--rates 2,4,8] [--requests 120] [--rounds 2] [--seed 7]
                               [--arg "--max-running 32"] [--plot FILE.svg] [--out FILE.md]

One server with the demo model runs all; the policy is switched live between two loads, while nothing is open, in changing order. A load is
the same for every policy: requests arrive at random (Poisson, `rate` a second) whether or not earlier ones have ended; prompts of 16 to
512 random tokens and answers of 8 to 128, both spread evenly over their logarithms. The prefix cache is off, so that no policy profits
from what another has computed. Answers are compared: a policy that changed one ends the program.

TTFT: from the moment at which a request was due to its first token. ITL: the gaps between tokens of a stream. Throughput: output tokens
a second, from the first arrival to the last end. Percentiles over all rounds of a rate. The plot (SVG with matplotlib, else text) shows
P99 of both over the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import shlex
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
from serving.servers import MODEL, Server, Variant, served

VOCAB = (1000, 49000)
PROMPTS, ANSWERS = (16, 512), (8, 128)
SHARES = (0.5, 0.95, 0.99)


@dataclass
class Planned:
    at: float
    """Seconds after the load began."""
    prompt: list[int]
    answer: int


@dataclass
class Figures:
    ttft: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def row(self) -> list[str]:
        times = [f"{1e3 * percentile(values, share):.0f}" for values in (self.ttft, self.itl) for share in SHARES]
        return [*times, f"{max(self.itl, default=0.0):.2f}", f"{self.tokens / self.seconds:.0f}"]


def percentile(values: list[float], share: float) -> float:
    """The nearest rank; NaN of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def make_load(rate: float, count: int, seed: str) -> list[Planned]:
    draw = random.Random(seed)

    def spread(low: int, high: int) -> int:
        return round(math.exp(draw.uniform(math.log(low), math.log(high))))

    planned, at = [], 0.0
    for _ in range(count):
        prompt = [draw.randrange(*VOCAB) for _ in range(spread(*PROMPTS))]
        planned.append(Planned(at, prompt, spread(*ANSWERS)))
        at += draw.expovariate(rate)
    return planned


async def play(url: str, load: list[Planned], into: Figures) -> list[str]:
    """The texts, in order."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1800), connector=connector) as session:
        began = time.perf_counter()
        texts = await asyncio.gather(*(one(session, url, planned, began, into) for planned in load))
        into.seconds += time.perf_counter() - began
    return texts


async def one(session: aiohttp.ClientSession, url: str, planned: Planned, began: float, into: Figures) -> str:
    await asyncio.sleep(planned.at)
    body = {
        "model": MODEL, "prompt": planned.prompt, "max_tokens": planned.answer, "temperature": 0, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, last = "", 0.0
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {(await answer.text())[:300]}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise SystemExit(str(event["error"]))
            if event.get("choices"):
                now = time.perf_counter()
                if last:
                    into.itl.append(now - last)
                else:
                    into.ttft.append(now - began - planned.at)
                last = now
                text += event["choices"][0]["text"]
    into.tokens += planned.answer
    return text


def switch(server: Server, policy: str) -> None:
    body = json.dumps({"features": {f"scheduling.{policy}": True}}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(server.url + "/v1/tokenbus/features", body, headers)).close()


def measure(server: Server, options: argparse.Namespace) -> dict[tuple[float, str], Figures]:
    found: dict[tuple[float, str], Figures] = {}
    policies = options.policies
    asyncio.run(play(server.url, make_load(20.0, 4, "warm"), Figures()))
    for index, (rate, number) in enumerate((rate, number) for rate in options.rates for number in range(options.rounds)):
        load, truth = make_load(rate, options.requests, f"{options.seed} {rate} {number}"), None
        turn = index % len(policies)
        for policy in policies[turn:] + policies[:turn]:
            switch(server, policy)
            texts = asyncio.run(play(server.url, load, found.setdefault((rate, policy), Figures())))
            if texts != (truth := truth or texts):
                raise SystemExit(
                    f"{policy} changed an answer: {sum(a != b for a, b in zip(texts, truth, strict=True))} of {len(texts)}"
                )
            print(f"rate {rate:g}, round {number + 1}: {policy} done", file=sys.stderr, flush=True)
    return found


def table(found: dict[tuple[float, str], Figures]) -> list[str]:
    head = [
        "rate",
        "policy",
        *(f"{what} P{100 * share:.0f} ms" for what in ("TTFT", "ITL") for share in SHARES),
        "longest gap s",
        "tok/s",
    ]
    rows = [[f"{rate:g}", policy, *figures.row()] for (rate, policy), figures in found.items()]
    lines = [head, ["---"] * len(head), *sorted(rows, key=lambda row: float(row[0]))]
    return [f"| {' | '.join(line)} |" for line in lines]


def text_plot(found: dict[tuple[float, str], Figures]) -> list[str]:
    """P99 as bars, the longest one 50 wide."""
    lines = []
    for what in ("ttft", "itl"):
        values = {key: percentile(getattr(figures, what), 0.99) for key, figures in found.items()}
        most = max(values.values())
        lines += [f"{what.upper()} P99"]
        lines += [
            f"  {rate:>5g}/s {policy:<10} {'#' * max(1, round(50 * value / most))} {1e3 * value:.0f} ms"
            for (rate, policy), value in sorted(values.items())
        ]
    return lines


def svg_plot(found: dict[tuple[float, str], Figures], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, what in zip(axes, ("ttft", "itl"), strict=True):
        for policy in dict.fromkeys(policy for _, policy in found):
            points = sorted(
                (rate, 1e3 * percentile(getattr(figures, what), 0.99))
                for (rate, name), figures in found.items()
                if name == policy
            )
            axis.plot(*zip(*points, strict=True), marker="o", label=policy)
        axis.set(xlabel="requests a second", ylabel=f"{what.upper()} P99, ms", yscale="log")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", type=lambda text: text.split(","), default=["unified", "two_phase", "static"])
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")], default=[2.0, 4.0, 8.0])
    parser.add_argument("--requests", type=int, default=120, help="of one load")
    parser.add_argument("--rounds", type=int, default=2, help="loads of each rate and policy")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--arg", default="--max-running 32", help="flags for the server")
    parser.add_argument("--plot", type=Path, help="an SVG file")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    words = f"{sys.executable} -m tokenbus serve --port {{port}} --served-model-name {MODEL} --log-level warning --disable prefix_cache"
    with served(Variant("ours", (*words.split(), *shlex.split(options.arg)), 0)) as server:
        found = measure(server, options)
    given = [
        word.replace(str(path), path.name) for word in sys.argv[1:] for path in [options.plot or options.out or Path(word)]
    ]
    load = f"load average at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    page = [
        f"# Schedulers, SmolLM2-135M on a CPU, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"    scripts/bench schedulers {shlex.join(given)}".rstrip(),
        "",
        f"{options.requests} requests a load, {options.rounds} loads a row, server flags `{options.arg}`; {load}.",
        "",
        *table(found),
        "",
    ]
    drawable = options.plot is not None and importlib.util.find_spec("matplotlib") is not None
    if drawable:
        svg_plot(found, options.plot)
        page += [f"![P99 over the rate]({options.plot.name})"]
    else:
        page += ["```text", *text_plot(found), "```"]
    print("\n".join(page))
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
