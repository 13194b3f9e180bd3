"""How often the experiment report errs on simulated traffic: false alarms with repeated looks, power for a slower P99.

    python bench/ab_power.py [--experiments 1000] [--processes 1] [--only NAME,...] [--rows FOLDER] [--out FILE]

Every experiment is rows as a server writes them, put through the whole report: bootstrap, correction, verdict. What makes such
data hard is in them: load that drifts over the hours (a random walk and a daily wave on the log scale), congestion that lasts
over several requests, slices and users that differ from each other, users of whom a few send most requests, prompt lengths over
two decades, a Pareto tail of slow requests, errors that come in bursts.
Designs: "slice", arms in turn over 120 slices in 60 blocks, about 50 requests each, read after blocks 20, 30, 40, 50 and 60, or
at the end only ("once"); "user", 600 users, 5000 requests, read after 1/5, 2/5 ... of the time; "request", both arms at once,
read in the same way. "x4": four times as much of it.
"alarm": at any look any measure of the report, in any bucket, was called different. "slow": the arm's slowest 3 % of requests
take 20 % longer, so that its P99 rises by just that; "found": the primary measure, P99 TTFT, was called worse at one of the
looks. Intervals are Clopper and Pearson's, 95 %.
`--rows`: the rows of a real experiment by slices whose two arms were equal (bench/ab.py --keep makes some), instead of simulated
ones. Every experiment deals the slices of each block anew: "dealt" changes nothing else; in "dealt-slow" 3 % of one arm's requests
wait as much longer as makes its P99 TTFT 20 % worse. Requests, load and their drift are real, and the same in all of them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing.pool import Pool
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import binomtest

from tokenbus.core.experiments.records import Row, read_rows
from tokenbus.core.experiments.report.make import make_report
from tokenbus.core.experiments.report.result import Options, Report
from tokenbus.core.experiments.report.table import Reader

SLICE_SECONDS = 120.0
LOOKS = 5
SHARE = 0.03
"""Of requests that a slower arm holds back: more than the 1 % beyond P99, so that it moves by a known amount."""
WORSE = 1.2
"""Times what P99 TTFT was."""


@dataclass(frozen=True)
class Case:
    split: str
    slow: float = 1.0
    once: bool = False
    size: int = 1
    """Times as many slices, or as much time."""
    rows: str = ""
    """Folder of real rows to be dealt anew."""


CASES = {
    "slice": Case("slice"),
    "slice-once": Case("slice", once=True),
    "user": Case("user"),
    "user-once": Case("user", once=True),
    "request": Case("request"),
    "slice-slow": Case("slice", slow=1.2),
    "slice-slow-x2": Case("slice", slow=1.2, size=2),
    "slice-slow-x4": Case("slice", slow=1.2, size=4),
    "slice-slow-x8": Case("slice", slow=1.2, size=8),
    "slice-slow-once-x4": Case("slice", slow=1.2, once=True, size=4),
    "user-slow-x8": Case("user", slow=1.2, size=8),
    "request-slow-x8": Case("request", slow=1.2, size=8),
}
DEALT = {"dealt": Case("slice"), "dealt-once": Case("slice", once=True), "dealt-slow": Case("slice", slow=WORSE)}
"""With `--rows`."""


def level(draw: np.random.Generator, steps: int) -> np.ndarray:
    """Log of the load's effect, one value a slice: a daily wave, a random walk, and each slice's own."""
    wave = 0.25 * np.sin(2 * np.pi * (np.arange(steps) / steps * draw.uniform(0.5, 2) + draw.uniform()))
    return wave + np.cumsum(draw.normal(0, 0.03, steps)) + draw.normal(0, 0.08, steps)


def congestion(draw: np.random.Generator, count: int) -> np.ndarray:
    """Log of what requests that come one after the other have in common: an autoregression of lag 1."""
    noise = draw.normal(0, 0.15, count)
    found = np.empty(count)
    value = 0.0
    for i in range(count):
        value = found[i] = 0.8 * value + noise[i]
    return found


def rows_of(case: Case, seed: int) -> Iterator[list[Row]]:
    """The experiment's rows in as many parts as there are looks."""
    draw = np.random.default_rng([seed, 77])
    slices = case.size * 120 + 1 if case.split == "slice" else case.size * 100
    per_slice = draw.poisson(50, slices) + 1
    of_slice = np.repeat(np.arange(slices), per_slice)
    count = len(of_slice)
    order = np.stack([draw.permutation(2) for _ in range((slices + 1) // 2)]).ravel()
    share = draw.pareto(1.5, 600) + 0.05
    user = draw.choice(600, count, p=share / share.sum())
    own = draw.normal(0, 0.25, 600)
    treated = {"slice": order[of_slice], "user": draw.integers(0, 2, 600)[user], "request": draw.integers(0, 2, count)}[
        case.split
    ]
    prompt = np.exp(draw.uniform(np.log(20), np.log(3000), count)).astype(int)
    slowness = level(draw, slices)[of_slice] + congestion(draw, count) + own[user]
    tail = np.where(draw.uniform(size=count) < 0.03, 1 + draw.pareto(2.5, count), 1.0)
    ttft = 0.05 * (1 + prompt / 400) * np.exp(slowness + draw.normal(0, 0.5, count)) * tail
    ttft = np.where((treated == 1) & (ttft > np.quantile(ttft, 0.97)), ttft * case.slow, ttft)
    gaps = (
        20
        * np.exp(0.5 * slowness[:, None] + draw.normal(0, 0.3, (count, 6)))
        * (1 + 3 * (draw.uniform(size=(count, 6)) < 0.02))
    )
    bad = draw.uniform(size=slices)[of_slice] < 0.05
    failed = draw.uniform(size=count) < np.where(bad, 0.08, 0.002)
    arrival = of_slice * SLICE_SECONDS + draw.uniform(0, SLICE_SECONDS - 20, count)
    drafts = draw.poisson(10, count)
    accepted = draw.binomial(drafts, np.clip(0.5 + 0.1 * slowness, 0.05, 0.95))
    rows = [
        Row(
            experiment="simulated",
            run=1,
            arm="AB"[treated[i]],
            control=bool(treated[i] == 0),
            weight=0.5,
            split=case.split,
            shared_steps=case.split != "slice",
            unit={"slice": "", "user": f"{user[i]:016x}", "request": f"{i:016x}"}[case.split],
            slice=int(of_slice[i]) if case.split == "slice" else None,
            arrival=float(arrival[i]),
            ended=float(arrival[i] + ttft[i] + 0.1),
            prompt_tokens=int(prompt[i]),
            cached_tokens=int(prompt[i] * 0.3),
            completion_tokens=0 if failed[i] else 7,
            ttft=None if failed[i] else float(ttft[i]),
            gap_count=0 if failed[i] else 6,
            gaps=[] if failed[i] else gaps[i].tolist(),
            e2e=float(ttft[i] + gaps[i].sum() / 1e3),
            finish_reason="error" if failed[i] else "length",
            status=500 if failed[i] else 0,
            draft_tokens=int(drafts[i]),
            accepted_tokens=int(accepted[i]),
        )
        for i in range(count)
    ]
    blocks = (40, 60, 80, 100, 120) if case.split == "slice" else (20, 40, 60, 80, 100)
    ends = [case.size * end + (case.split == "slice") for end in blocks]  # one slice more: the newest is never compared
    begin = 0
    for end in ends:
        stop = int(per_slice[:end].sum())
        yield rows[begin:stop]
        begin = stop


def hold(ttft: np.ndarray) -> float:
    """Seconds by which SHARE of the requests must wait longer, so that P99 of `ttft` becomes WORSE times what it was."""
    target = WORSE * float(np.quantile(ttft, 0.99))
    low, high = 0.0, target
    for _ in range(60):
        middle = (low + high) / 2
        beyond = (1 - SHARE) * np.mean(ttft > target) + SHARE * np.mean(ttft + middle > target)
        low, high = (middle, high) if beyond < 0.01 else (low, middle)
    return high


def first_tokens(rows: Iterable[Row]) -> np.ndarray:
    """TTFT of those that are compared, in seconds."""
    return np.array([row.ttft for row in rows if row.counts and row.ttft is not None])


@lru_cache(maxsize=1)
def real_rows(folder: str) -> tuple[list[Row], float]:
    """Rows, in order of their slices, and what `hold` says of them."""
    rows = sorted(read_rows(folder), key=lambda row: (row.slice or 0, row.ended))
    return rows, hold(first_tokens(rows))


def dealt(case: Case, seed: int) -> Iterator[list[Row]]:
    """Real rows with the slices of each block dealt anew, in as many parts as there are looks."""
    draw = random.Random(seed)
    rows, held = real_rows(case.rows)
    last = max(row.slice or 0 for row in rows)
    swapped = [draw.random() < 0.5 for _ in range(last // 2 + 1)]
    ends = [(last // 2) * look // LOOKS * 2 + 1 for look in range(1, LOOKS + 1)]  # one slice more: the newest is never compared
    parts: list[list[Row]] = [[] for _ in ends]
    for row in rows:
        index = row.slice or 0
        arm = row.arm if not swapped[index // 2] else "B" if row.arm == "A" else "A"
        waits = held if case.slow > 1 and arm == "B" and row.ttft is not None and draw.random() < SHARE else 0.0
        look = next((i for i, end in enumerate(ends) if index < end), None)
        if look is not None:
            changed = msgspec.structs.replace(row, arm=arm, control=arm == "A", e2e=row.e2e + waits)
            parts[look].append(changed if not waits else msgspec.structs.replace(changed, ttft=changed.ttft + waits))
    yield from parts


def reports(case: Case, seed: int) -> Iterator[Report]:
    """One for each look."""
    reader = Reader()
    options = Options(looks="once" if case.once else "any", seed=seed + 1)
    for look, rows in enumerate(dealt(case, seed) if case.rows else rows_of(case, seed), 1):
        reader.add(rows)
        if not case.once or look == LOOKS:
            yield make_report(reader, options)


def one(seed: int, case: Case) -> dict[str, bool]:
    """What happened at any look of one experiment."""
    seen = {"alarm": False, "primary": False, "found": False, "covered": True, "ratio": False}
    for report in reports(case, seed):
        seen["ratio"] |= report.ratio_check.failed
        for row in report.comparisons:
            seen["alarm"] |= row.different
            if row.family == "primary":
                seen["primary"] |= row.different
                seen["found"] |= row.different and row.verdict == "worse"
                if row.low is not None and row.high is not None:
                    seen["covered"] &= row.low <= 100 * (case.slow - 1) <= row.high
    return seen


def share(hits: int, of: int) -> str:
    low, high = binomtest(hits, of).proportion_ci(0.95, "exact")
    return f"{100 * hits / of:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def count(case: Case, experiments: int, seed: int, pool: Pool) -> Counter[str]:
    """How many experiments had each of what `one` tells; says on standard error how far it is."""
    found: Counter[str] = Counter()
    for done, seen in enumerate(pool.imap_unordered(partial(one, case=case), range(seed, seed + experiments), 5), 1):
        found.update({key: int(value) for key, value in seen.items()})
        if done % 50 == 0:
            print(f"{done} of {experiments}: {dict(found)}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", help="names with commas between them (default: all)")
    parser.add_argument("--rows", type=Path, help="folder of an experiment with equal arms A and B")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = [
        "| case | experiments | any alarm | primary alarm | P99 worse found | true change always inside | sample ratio alarm |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    cases = CASES if options.rows is None else {name: replace(case, rows=str(options.rows)) for name, case in DEALT.items()}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name in options.only.split(",") if options.only else cases:
            began = time.monotonic()
            found = count(cases[name], options.experiments, options.seed, pool)
            cells = [share(found[key], options.experiments) for key in ("alarm", "primary", "found", "covered", "ratio")]
            lines.append(f"| {name} | {options.experiments} | " + " | ".join(cells) + " |")
            print(lines[-1], f"({time.monotonic() - began:.0f} s)", flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
