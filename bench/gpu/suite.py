"""The GPU suite: correctness of the kernels and of the engine on a device, and its speed against the card's own limits.

    scripts/gpu [PART ...] [--out FILE]      without a part: all but tune, in less than eight minutes
    scripts/gpu --interpret                  the correctness parts, tiny, in Triton's interpreter on the CPU
    scripts/gpu pack                         wheels for a machine without internet (pack.py)

Each part is a process with a time limit of its own; one that fails or hangs is ended, and the next begins. The result is written anew
whenever a part has told something. Exit status: 0; 1 when correctness is in doubt (a check failed, or a part about it did not end); 2
without a GPU, or for wrong options; 3 when only parts about speed did not end well.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import pack
from .parts import PARTS, TOTAL_SECONDS, Part, chosen
from .record import Findings
from .report import Ended, Run, markdown

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
TAIL_LINES = 25
GRACE = 3.0
"""Seconds that a part has to end once it was asked to."""
POLL = 0.25
OK, WRONG, NO_GPU, NOT_ALL = 0, 1, 2, 3


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parts = "\n".join(f"  {p.name:<10} {p.about}{'' if p.default else ' (only when named)'}" for p in PARTS.values())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu", description=f"{__doc__}\nParts:\n{parts}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="*", metavar="PART", help="parts to run; default: all but tune")
    parser.add_argument("--out", type=Path, help="the result; default: bench/results/DATE-gpu.md (interpreted: only printed)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the parts print, and what they found as JSON lines")
    parser.add_argument("--seconds", type=float, default=None, help=f"for all parts together; default: {TOTAL_SECONDS:.0f}")
    parser.add_argument("--part-seconds", type=float, help="limit of each part, in place of its own")
    parser.add_argument("--interpret", action="store_true", help="the correctness parts, tiny, on the CPU")
    options = parser.parse_args(words)
    try:
        options.parts = chosen(options.part, interpret=options.interpret)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    if words[:1] == ["pack"]:
        return pack.main(words[1:])
    options = parse(words)
    facts = device_facts(interpret=options.interpret)
    if not facts["card"] and not options.interpret:
        print(
            "scripts/gpu: torch finds no GPU here, so there is nothing to measure. "
            "`scripts/gpu --interpret` runs the correctness parts, tiny, in Triton's interpreter.",
            file=sys.stderr,
        )
        return NO_GPU
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the part that runs is ended too
    started = dt.datetime.now(dt.UTC)
    if options.out is None and not options.interpret:
        options.out = free_name(RESULTS, f"{started:%Y-%m-%d}-gpu")
    run = Run(shown_command(options), commit(), facts, options.interpret, started)
    with tempfile.TemporaryDirectory(prefix="tokenbus-gpu-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        run_parts(run, options, logs)
    print(markdown(run))
    return status(run)


def free_name(folder: Path, stem: str) -> Path:
    """STEM.md, or STEM-2.md and so on: an earlier result of the day stays."""
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.md").exists())


def status(run: Run) -> int:
    if run.findings.failed or any(end.part.correctness and not end.well for end in run.ended):
        return WRONG
    return OK if all(end.well for end in run.ended) else NOT_ALL


def run_parts(run: Run, options: argparse.Namespace, logs: Path) -> None:
    named = max((part.seconds for part in options.parts if not part.default), default=0.0)
    deadline = time.monotonic() + (options.seconds or max(TOTAL_SECONDS, named))
    earlier = Findings()
    for part in options.parts:
        limit = min(options.part_seconds or part.seconds, deadline - time.monotonic())
        if limit < 1:
            run.ended.append(Ended(part, "not started: no time left", 0.0, 0.0))
            write(run, options)
            continue
        run.running = part.name
        record = logs / f"{part.name}.jsonl"
        record.unlink(missing_ok=True)
        known = logs / "known.json"
        known.write_text(json.dumps(earlier.figures), encoding="utf-8")
        words = ["--record", str(record), "--known", str(known), "--seconds", f"{limit:.0f}"]
        words += ["--interpret"] if options.interpret else []
        end = run_part(part, words, limit, logs, lambda path=record: show(run, options, earlier, path))
        run.running = ""
        run.ended.append(end)
        earlier.read(record)
        run.findings = earlier
        write(run, options)


def show(run: Run, options: argparse.Namespace, earlier: Findings, record: Path) -> None:
    """Write the result with what the running part has told so far."""
    run.findings = copy.deepcopy(earlier)
    run.findings.read(record)
    write(run, options)


def write(run: Run, options: argparse.Namespace) -> None:
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(markdown(run), encoding="utf-8")


def run_part(part: Part, words: list[str], limit: float, logs: Path, told: Any) -> Ended:
    """One part in a process group of its own. told: called whenever its record has grown."""
    print(f"== {part.name}: {part.about} (at most {limit:.0f} s)", file=sys.stderr, flush=True)
    began, record = time.monotonic(), Path(words[1])
    path = logs / f"{part.name}.log"
    size = shown = 0
    command = [*command_of(part), *words]
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True, cwd=ROOT,
            env=child_environment(interpret="--interpret" in words),
        )  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() - began < limit:
                time.sleep(POLL)
                shown = _echo(path, shown)
                if (grown := record.stat().st_size if record.exists() else 0) != size:
                    size = grown
                    told()
        finally:
            late = process.poll() is None
            end_group(process)
    _echo(path, shown)
    how = "ended at its limit" if late else "ended" if process.returncode == 0 else f"failed (status {process.returncode})"
    tail = "" if how == "ended" else "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    print(f"== {part.name}: {how} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return Ended(part, how, time.monotonic() - began, limit, tail)


def command_of(part: Part) -> list[str]:
    return [sys.executable, "-P", "-m", f"gpu.{part.module}"]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The process and what it started and left in its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def child_environment(*, interpret: bool) -> dict[str, str]:
    """Ours, with this package on the path, and Triton's interpreter on or off whatever it was."""
    path = os.pathsep.join([str(ROOT / "bench"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": str(int(interpret)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _echo(path: Path, start: int) -> int:
    with path.open("rb") as log:
        log.seek(start)
        text = log.read()
    sys.stderr.write(text.decode("utf-8", "replace"))
    sys.stderr.flush()
    return start + len(text)


def device_facts(*, interpret: bool) -> dict[str, Any]:
    """See device.py. Without what it needs: no card, and why on the error output."""
    done = subprocess.run([sys.executable, "-P", "-m", "gpu.device"], stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT,
                          env=child_environment(interpret=interpret))  # fmt: skip
    if done.returncode:
        raise SystemExit(f"scripts/gpu: {sys.executable} can't run torch")
    facts = json.loads(done.stdout.splitlines()[-1])
    return facts | ({"card": ""} if interpret else {})


def commit() -> str:
    """Of the working tree; where there is no git, of the tree that was packed."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:
        return pack.packed_commit()
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else pack.packed_commit()


def shown_command(options: argparse.Namespace) -> str:
    words = ["scripts/gpu", *options.part, *(["--interpret"] if options.interpret else [])]
    words += [f"--seconds {options.seconds:.0f}"] if options.seconds else []
    words += [f"--part-seconds {options.part_seconds:.0f}"] if options.part_seconds else []
    return " ".join(words)
