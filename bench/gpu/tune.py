"""Measures the block sizes of `configs.candidates` on the device and writes kernels/triton/configs/DEVICE.json.

    scripts/gpu tune                         all kernels, in a little over nine minutes
    python -m gpu.tune --only matmul ...     some of them; a table that is there already keeps its other kernels

A rule of the table holds for calls up to some number of rows or outputs, and is measured on several of them, of large Llamas; the
candidate with the smallest geometric mean of its times, relative to the default sizes, is taken. What a candidate computes is compared
with the default's result first. Which candidates there is time for is drawn by chance, the default ones first; compiling, most of the
work, is done by several processes beforehand, measuring by one. A kernel whose sums depend on its sizes (invariant) has rules that do not
look at the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

from tokenbus.kernels.triton import configs

from .device import describe
from .record import Record, finish, make_record, part_options
from .timing import Times, copies_for, measure
from .tune_rules import Attention, Case, Config, RuleToTune, call_of, candidates, rules, tunable

TREE = Path(__file__).resolve().parents[2] / "kernels" / "triton" / "configs"
ERROR = 2e-2
"""Relative, of a candidate against the default sizes: another order of summation is allowed, a wrong result is not."""
HOPELESS = 1.5
"""Times the quickest: slower ones are measured no further."""
RESERVE = 15.0
"""Seconds kept for writing the table."""
COMPILING = 0.6
"""Share of a rule's time for compiling."""


def compile_one(kernel: str, case: Case | Attention, config: Config, device: str = "cuda") -> str:
    """Run it once, so that Triton's cache on disk has it. What went wrong, or ""."""
    try:
        call_of(kernel, case, device, 1)(0, config)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, too many registers: no candidate for this device
        return f"{type(error).__name__}: {error}"
    return ""


def compiled(rule: RuleToTune, some: Sequence[Config], pool: ProcessPoolExecutor, until: float) -> list[Config]:
    """Those that compile and run, and that there was time for, in order."""
    jobs = [(config, pool.submit(compile_one, rule.kernel, rule.cases[0].small, config)) for config in some]
    good = []
    for config, job in jobs:
        try:
            if job.result(max(0.0, until - time.monotonic())) == "":
                good.append(config)
        except TimeoutError:
            break
    for _, job in jobs:
        job.cancel()
    wait([job for _, job in jobs if not job.cancelled()], timeout=RESERVE)  # nothing may compile while times are taken
    return good


def best(
    rule: RuleToTune, some: Sequence[Config], until: float, device: str = "cuda", timer: Callable[..., Times] = measure
) -> tuple[Config, float, int]:
    """(the quickest of some, its time over the first's, how many were measured). The first is the one to beat. Each case gets its share of
    the time; those that are much slower than the best in one case, or were not reached, are left out of the next."""
    times: dict[int, list[float]] = {i: [] for i in range(len(some))}
    measured = 0
    for number, case in enumerate(rule.cases):
        end = time.monotonic() + (until - time.monotonic()) / (len(rule.cases) - number)
        copies = min(copies_for(case.nbytes), 8)
        call = call_of(rule.kernel, case, device, copies)
        right = call(0, some[0]).float()
        for index in list(times):
            if index and time.monotonic() > end:
                del times[index]
                continue
            config = some[index]
            wrong = not bool((call(0, config).float() - right).norm() <= ERROR * right.norm())
            taken = math.inf if wrong else timer(lambda i, c=config, f=call: f(i, c), copies, seconds=0.02).median
            times[index].append(taken)
        measured = measured or len(times)
        quickest = min(mine[-1] for mine in times.values())
        times = {i: mine for i, mine in times.items() if i == 0 or mine[-1] <= HOPELESS * quickest}
    scores = {i: statistics.geometric_mean([b / a for a, b in zip(times[0], mine, strict=True)]) for i, mine in times.items()}
    winner = min(scores, key=scores.__getitem__)
    return some[winner], scores[winner], measured


def table_text(device: str, source: str, kernels: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """As the tables in configs/ are written: a rule a line."""
    blocks = []
    for kernel, listed in kernels.items():
        lines = ",\n".join(f"            {json.dumps(rule)}" for rule in listed)
        blocks.append(f'        "{kernel}": [\n{lines}\n        ]')
    head = f'    "device": {json.dumps(device)},\n    "status": "tuned",\n    "from": {json.dumps(source)},\n'
    return "{\n" + head + '    "kernels": {\n' + ",\n".join(blocks) + "\n    }\n}\n"


def write_table(folder: Path, facts: Mapping[str, Any], kernels: dict[str, list[dict[str, Any]]]) -> Path:
    """Kernels that an older table has, and `kernels` has not, stay. The result is parsed before it is written."""
    name = configs.file_name(facts["card"])
    path = folder / f"{name}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["kernels"] if path.exists() else {}
    versions = ", ".join(f"{n} {v}" for n, v in facts["versions"].items() if n in {"torch", "triton"})
    source = f"{time.strftime('%Y-%m-%d')}, driver {facts['driver'] or 'unknown'}, {versions}; scripts/gpu tune"
    text = table_text(facts["card"], source, old | kernels)
    configs.parse(text, path.name)
    path.write_text(text, encoding="utf-8")
    return path


def tune(record: Record, kernels: Sequence[str], folders: Sequence[Path], processes: int, device: str = "cuda") -> None:
    """folders: where the table goes, all the same; the first is where an older one is looked for."""
    facts, found = describe(), {}
    todo = [rule for kernel in kernels for rule in rules(kernel)]
    context = multiprocessing.get_context("spawn")  # a forked process can't use the device
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for index, rule in enumerate(todo):
            share = (record.left - RESERVE) / (len(todo) - index)
            now = time.monotonic()
            wanted = candidates(rule)
            good = compiled(rule, wanted, pool, now + COMPILING * share)
            if not good or good[0] != wanted[0]:
                record.note(f"{rule.kernel} {dict(rule.when)}: the default sizes did not run in time")
                continue
            config, ratio, count = best(rule, good, now + share, device)
            entry = ({"when": dict(rule.when)} if rule.when else {}) | {"use": dict(config)}
            found.setdefault(rule.kernel, []).append(entry)
            record.row(
                "Tuned block sizes",
                kernel=rule.kernel,
                when=json.dumps(dict(rule.when)),
                use=json.dumps(dict(config)),
                over_default=f"{ratio:.3f}",
                measured=f"{count} of {len(wanted)}",
            )
            written = write_table(folders[0], facts, found)
            for folder in folders[1:]:
                (folder / written.name).write_bytes(written.read_bytes())
    record.note(f"written: {configs.file_name(facts['card'])}.json; the default table goes on serving what it has no rule for")


def main() -> None:
    parser = part_options(__doc__)
    parser.add_argument("--only", nargs="*", default=[], metavar="KERNEL", help=f"of {', '.join(tunable())}")
    parser.add_argument("--folder", type=Path, default=TREE, help="default: kernels/triton/configs of this tree")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    options: argparse.Namespace = parser.parse_args()
    if unknown := set(options.only) - set(tunable()):
        parser.error(f"there is nothing to tune for {min(unknown)!r}; there is for {', '.join(tunable())}")
    record = make_record(options)
    folders = [options.folder, *([options.record.parent] if options.record else [])]  # a copy beside the logs
    tune(record, options.only or tunable(), folders, options.processes)
    finish(record)


if __name__ == "__main__":
    main()
