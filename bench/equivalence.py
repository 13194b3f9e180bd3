"""Every combination of what may not change an answer, on a tiny model: ids and logprobs, bit by bit, against the plain run.

    python bench/equivalence.py [--shard 1/4] [--resume FILE] [--model DIR] [--kernels cpu|torch] [--enable NAME] [--out FILE]

Ways: prompt chunks (whole, 1, 7) x prefix cache (off, on) x proposer (none, ngram, suffix, a known answer with mistakes) x room (plenty,
preemption) x batch mates (one request at a time, all) x threads (1, 2). Each is run with greedy and seeded sampling, truncation, penalties,
bias with min_tokens, stop tokens and a second choice, with logprobs. A way counts only when its features have fired, by their own counts.

FILE of --resume holds one JSON line for each finished combination; those are not run again. --shard K/N takes every N-th.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenbus.core.config import CacheConfig, Config, ModelConfig
from tokenbus.core.selftest.cells import Oracle, describe
from tokenbus.core.selftest.stand import Answer, Ask, Outcome, Stand
from tokenbus.core.selftest.tiny import make_tiny

FEW = {"logit_bias": {"9": 60, "10": 60, "11": 60, "12": 58}, "logprobs": 1}
"""Text of a few ids repeats itself, with exceptions: proposers are sometimes right."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"fields": FEW | {"logprobs": 3}},
    "seeded": {"temperature": 0.9, "seed": 11, "fields": FEW},
    "truncated": {"temperature": 1.3, "seed": 12, "fields": FEW | {"top_k": 40, "top_p": 0.9, "min_p": 0.01}},
    "penalties": {"temperature": 0.7, "seed": 13, "fields": FEW | {"repetition_penalty": 1.1, "frequency_penalty": 0.3}},
    "min_tokens": {"temperature": 0.8, "seed": 14, "fields": FEW | {"min_tokens": 4}},
    "stops": {"temperature": 1.0, "seed": 15, "fields": FEW | {"stop_token_ids": [12]}},
    "choice 2": {"temperature": 1.0, "seed": 11, "choice": 2, "fields": FEW},
}
LENGTHS = (1, 14, 15, 40)
NEW = 28
BLOCK = 16


@dataclass(frozen=True)
class Way:
    chunk: int
    """Prompt tokens a step; 0: whole prompts."""
    cache: bool
    proposer: str
    tight: bool
    together: bool
    threads: int

    @property
    def name(self) -> str:
        parts = [f"chunks of {self.chunk}" if self.chunk else "", "cache" if self.cache else "", self.proposer]
        parts += ["preemption" if self.tight else "", "together" if self.together else "one by one"]
        return ", ".join([part for part in parts if part] + [f"{self.threads} thread{'s' * (self.threads > 1)}"])


PROPOSERS = ("", "speculative.ngram", "speculative.suffix", Oracle.info.name)


def ways() -> Iterator[Way]:
    for values in itertools.product((0, 1, 7), (False, True), PROPOSERS, (False, True), (False, True), (1, 2)):
        way = Way(*values)
        if way.together or not way.tight:  # one request alone is never preempted
            yield way


def asks_of(kind: dict[str, Any]) -> list[Ask]:
    draw = random.Random(5)
    prompts = [[draw.randrange(20, 250) for _ in range(length)] for length in LENGTHS]
    options: dict[str, Any] = dict(kind)
    fields: dict[str, Any] = {"ignore_eos": True, **options.pop("fields")}
    return [Ask(prompt=prompt, max_tokens=NEW, fields=fields, **options) for prompt in prompts]


class Runner:
    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.asks = [ask for kind in KINDS.values() for ask in asks_of(kind)]
        self.plain = [self._play([ask], Way(0, False, "", False, True, 1)).answers[0] for ask in self.asks]
        Oracle.learn(self.asks, self.plain)

    def _play(self, asks: list[Ask], way: Way) -> Outcome:
        off = ((), ("prefix_cache",))[not way.cache] + ((), ("chunked_prefill",))[not way.chunk]
        return self.stand.run(
            asks,
            off=off,
            on=(way.proposer,) if way.proposer else (),
            plugins=(Oracle,) if way.proposer == Oracle.info.name else (),
            chunk=way.chunk or None,
            blocks=6 if way.tight else 2000,
            max_running=6 if way.tight else 64,
            threads=way.threads,
            settings={way.proposer: {"adaptive": False}} if way.proposer.startswith("speculative") else None,
        )

    def run(self, way: Way) -> dict[str, Any]:
        """What differs, and what should have happened and did not."""
        asks = [replace(ask, at_step=2 * NEW * again) for again in range(1 + way.cache) for ask in self.asks]
        if way.together:
            outcomes = [self._play(asks, way)]
        else:
            own = len(asks) // (1 + way.cache)
            outcomes = [self._play([asks[i + own * again] for again in range(1 + way.cache)], way) for i in range(own)]
        answers: list[Answer] = [answer for outcome in outcomes for answer in outcome.answers]
        truth = self.plain * (1 + way.cache) if way.together else [a for a in self.plain for _ in range(1 + way.cache)]
        differences = [describe(i, t, a) for i, (t, a) in enumerate(zip(truth, answers, strict=True)) if not a.same(t)]
        return asdict(way) | {"name": way.name, "differences": differences, "missing": missing(way, outcomes, len(asks))}


def missing(way: Way, outcomes: list[Outcome], asks: int) -> list[str]:
    total = {
        name: sum(outcome.counters.get(f"{way.proposer}.{name}_tokens", 0) for outcome in outcomes)
        for name in ("accepted", "proposed")
    }
    happened = {
        "chunks": not way.chunk or sum(outcome.chunks for outcome in outcomes) > asks,
        "cache hits": not way.cache or sum(answer.cached for outcome in outcomes for answer in outcome.answers) > 0,
        "accepted drafts": not way.proposer or total["accepted"] > 0,
        "rejected drafts": not way.proposer or total["proposed"] > total["accepted"],
        "preemption": not way.tight or sum(outcome.preempted for outcome in outcomes) > 0,
        "batch mates": not way.together or max(outcome.largest_batch for outcome in outcomes) > 1,
    }
    return [name for name, did in happened.items() if not did]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", metavar="K/N")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--model", help="a folder; default: a tiny random Llama")
    parser.add_argument("--kernels", choices=("cpu", "torch"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--enable", action="append", default=[], help="plugins that are on in every run, the plain one too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    done = (
        [json.loads(line) for line in options.resume.read_text().splitlines()]
        if options.resume and options.resume.exists()
        else []
    )
    names = {one["name"] for one in done}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_tiny(Path(folder)))
        config = Config(
            model=ModelConfig(model=model, dtype=options.dtype, max_model_len=512, kernels=options.kernels),
            cache=CacheConfig(block_size=BLOCK),
        )
        runner = Runner(Stand(config, (f"attention.{options.kernels}", *options.enable)))
        todo = [way for way in list(ways())[shard - 1 :: shards] if way.name not in names]
        for number, way in enumerate(todo, 1):
            found = runner.run(way)
            done.append(found)
            if options.resume:
                with options.resume.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
            problem = found["differences"][:1] or [f"did not happen: {what}" for what in found["missing"]]
            print(f"{number}/{len(todo)} {way.name}: {'; '.join(problem) or 'same'}", file=sys.stderr, flush=True)
    report(done, options, time.perf_counter() - began)
    if any(one["differences"] or one["missing"] for one in done):
        raise SystemExit(1)


def report(done: list[dict[str, Any]], options: argparse.Namespace, seconds: float) -> None:
    bad = [one for one in done if one["differences"] or one["missing"]]
    words = [f"--kernels {options.kernels}", f"--dtype {options.dtype}", *(f"--enable {name}" for name in options.enable)]
    cells = len(done) * len(KINDS)
    summary = (
        f"{len(done)} ways of running x {len(KINDS)} kinds of sampling = {cells} cells, {len(LENGTHS)} prompts each, {seconds:.0f} s: "
        f"{len(done) - len(bad)} ways the same, ids and logprobs, bit by bit, each with its features fired."
    )
    page = [
        f"# Equivalence, {datetime.now(UTC):%Y-%m-%d}", "", f"    scripts/bench equivalence {' '.join(words)}", "",
        summary, "",
        "| features | ways | the same |", "|---|---|---|",
    ]  # fmt: skip
    for key in ("chunk", "cache", "proposer", "tight", "together", "threads"):
        for value in sorted({one[key] for one in done}, key=str):
            some = [one for one in done if one[key] == value]
            same = sum(one not in bad for one in some)
            page.append(f"| {key} = {value if value != '' else 'none'} | {len(some)} | {same} |")
    page += [f"- {one['name']}: {'; '.join(one['differences'][:3] + one['missing'])}" for one in bad]
    print("\n".join(page))
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
