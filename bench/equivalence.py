"""Every combination of what may not change an answer, on a tiny model: ids and logprobs, bit by bit, against the plain run.

    python bench/equivalence.py [--shard 1/4] [--resume FILE] [--pairwise] [--model M] [--kernels cpu|torch] [--enable NAME] [--out FILE]

Ways: chunked prefill x prefix cache x proposer (none, ngram, suffix, a known answer with mistakes) x room (one request at a time, all, too
few blocks for them) x engine restart x prompts as ids or text x worker in this process or its own x steps planned ahead or not: 768.
The size of a chunk (1, 7, 16 tokens) and the number of threads (1, 2) take turns. Each way is run with every kind of sampling together
(core/selftest/kinds.py), and each cell counts only when all it is about has happened, by counts of its own answers.

FILE of --resume holds one JSON line for each finished way; those are not run again. --shard K/N takes every N-th, of an order
without order. --pairwise: only as many
cells as it takes for any two values, the kind of sampling among them, to meet: for a larger model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenbus.core.config import CacheConfig, Config, ModelConfig
from tokenbus.core.logs import configure_logs
from tokenbus.core.selftest.kinds import KINDS
from tokenbus.core.selftest.matrix import Matrix
from tokenbus.core.selftest.stand import Stand
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.selftest.ways import AXES, Way, every_way, pairwise_ways

LENGTHS = (7, 15, 31)
NEW = 28
BLOCK = 8


def run(matrix: Matrix, way: Way, kind: str | None) -> dict[str, Any]:
    began = time.perf_counter()
    cells = list(matrix.run(way, None if kind is None else (kind,)))
    return asdict(way) | {
        "name": name_of(way, kind),
        "cells": len(cells),
        "bad": [cell.as_dict() for cell in cells if not cell.passed],
        "seconds": round(time.perf_counter() - began, 2),
    }


def name_of(way: Way, kind: str | None) -> str:
    return way.name if kind is None else f"{way.name}: {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="1/1", metavar="K/N")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--pairwise", action="store_true")
    parser.add_argument("--model", help='a folder, or "demo"; default: a tiny random Llama')
    parser.add_argument("--kernels", choices=("cpu", "torch"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--enable", action="append", default=[], help="plugins that are on in every run, the plain one too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    configure_logs("console", "warning")
    shard, shards = map(int, options.shard.split("/"))
    done = (
        [json.loads(line) for line in options.resume.read_text().splitlines()]
        if options.resume and options.resume.exists()
        else []
    )
    names = {one["name"] for one in done}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_tiny(Path(folder)))
        config = Config(
            model=ModelConfig(model=model, dtype=options.dtype, max_model_len=512, kernels=options.kernels),
            cache=CacheConfig(block_size=BLOCK),
        )
        with Stand(config, (f"attention.{options.kernels}", *options.enable)) as stand:
            matrix = Matrix(stand, tuple(KINDS), LENGTHS, NEW, few=True)
            wanted = pairwise_ways(matrix.kinds) if options.pairwise else [(way, None) for way in every_way()]
            wanted = wanted[shard - 1 :: shards]
            todo = [one for one in wanted if name_of(*one) not in names]
            for number, (way, kind) in enumerate(todo, 1):
                found = run(matrix, way, kind)
                done.append(found)
                if options.resume:
                    with options.resume.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(found) + "\n")
                problem = [problem_of(cell) for cell in found["bad"]]
                print(f"{number}/{len(todo)} {found['name']}: {'; '.join(problem) or 'same'}", file=sys.stderr, flush=True)
            report(done, matrix, options)
    if any(one["bad"] for one in done):
        raise SystemExit(1)


def problem_of(cell: dict[str, Any]) -> str:
    return f"{cell['kind']}: {cell['difference'] or 'did not happen: ' + ', '.join(cell['missing'])}"


def report(done: list[dict[str, Any]], matrix: Matrix, options: argparse.Namespace) -> None:
    bad = [one for one in done if one["bad"]]
    words = ["--pairwise"] if options.pairwise else []
    words += [f"--model {options.model}"] if options.model else []
    words += [f"--kernels {options.kernels}", f"--dtype {options.dtype}", *(f"--enable {name}" for name in options.enable)]
    cells, failed = sum(one["cells"] for one in done), sum(len(one["bad"]) for one in done)
    summary = (
        f"{len(done)} ways of running, {cells} cells ({', '.join(matrix.kinds)}), {len(matrix.questions)} requests, "
        f"{sum(one['seconds'] for one in done):.0f} s: {cells - failed} cells the same, ids, logprobs and text, bit by bit, each with "
        "its features fired."
    )
    page = [
        f"# Equivalence, {datetime.now(UTC):%Y-%m-%d}", "", f"    scripts/bench equivalence {' '.join(words)}", "",
        summary, "",
        "| features | ways | cells | the same |", "|---|---|---|---|",
    ]  # fmt: skip
    for key in (*AXES, "threads"):
        for value in sorted({one[key] for one in done}, key=str):
            some = [one for one in done if one[key] == value]
            count = sum(one["cells"] for one in some)
            same = count - sum(len(one["bad"]) for one in some)
            page.append(f"| {key} = {value if value != '' else 'none'} | {len(some)} | {count} | {same} |")
    page += [f"- {one['name']}: {'; '.join(map(problem_of, one['bad']))}" for one in bad]
    print("\n".join(page))
    if options.out:
        options.out.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
