"""Correctness of the kernels: `checks` at the sizes of real models, beside them the project's tests that are marked `cuda`.

Interpreted, the checks are tiny, and of the tests a few of tests/kernels_triton run, to show that the way there works.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from .record import Record, finish, make_record, part_options

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/kernels_triton", "tests/models", "tests/worker")
INTERPRETED = ("tests/kernels_triton/test_verify.py", "-m", "not long")
PROCESSES = 8
"""That share the checks, and as many the tests where pytest-xdist is there: most of the time goes into compiling, on the CPU."""
NONE_COLLECTED = 5
RESERVE = 12.0
"""Seconds kept for telling what the tests gave."""


PYTEST = (
    "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main(sys.argv[1:]))"
)
"""A process that was started in the background may have been told to ignore SIGINT, and so would those that it starts."""


def run_tests(record: Record, *, interpret: bool) -> None:
    """The project's own tests, as a check for each that failed, and one for all."""
    what = "tests, interpreted" if interpret else "tests marked cuda"
    words = ["-q", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors"]
    words += INTERPRETED if interpret else [*TESTS, "-m", "cuda"]
    if not interpret and importlib.util.find_spec("xdist") and (os.cpu_count() or 1) >= PROCESSES:
        words += ["-n", str(PROCESSES)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        process = subprocess.Popen([sys.executable, "-P", "-c", PYTEST, *words, f"--junitxml={report}"], cwd=ROOT)
        try:
            code = process.wait(max(1.0, record.left - RESERVE))
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # it then writes what it has found so far
            try:
                process.wait(RESERVE / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if code == NONE_COLLECTED:
            record.check(what, ok=False, detail="none were found")
            return
        passed = tell(record, report) if report.exists() else 0
    detail = f"{passed} passed, status {code}"
    if code is None:  # those that were interrupted are among them
        detail = f"at most {passed} passed; they did not end in time"
    record.check(what, code == 0, detail)


def tell(record: Record, report: Path) -> int:
    """A check for each test of a JUnit file that failed, a note about those skipped; returns how many passed."""
    passed, skipped = 0, []
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((case.find(kind) for kind in ("failure", "error") if case.find(kind) is not None), None)
        if bad is not None:
            record.check(name, ok=False, detail=re.sub(r"\s+", " ", bad.get("message") or "")[:300])
        elif case.find("skipped") is not None:
            skipped.append(name)
        else:
            passed += 1
    if skipped:
        record.note(f"{len(skipped)} tests were skipped, such as {skipped[0]}")
    return passed


def start_checks(options: argparse.Namespace) -> list[subprocess.Popen[bytes]]:
    """`checks` in several processes, which write into the same record. Their output is ours."""
    shards = 1 if options.interpret else max(1, min(PROCESSES, (os.cpu_count() or 2) - 2))
    words = ["--seconds", f"{options.seconds - RESERVE:.0f}", *(["--interpret"] if options.interpret else [])]
    words += ["--record", str(options.record)] if options.record else []
    return [
        subprocess.Popen([sys.executable, "-P", "-m", "gpu.checks", *words, "--shard", str(i), "--shards", str(shards)])
        for i in range(shards)
    ]


def wait_for(record: Record, checks: list[subprocess.Popen[bytes]]) -> None:
    """A check for each process that did not come to its end; one in which checks failed (status 1) has told them itself."""
    for i, process in enumerate(checks):
        try:
            status = process.wait(max(0.1, record.left - 1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            record.check(f"checks, process {i}", ok=False, detail="it did not end in time")
            continue
        if status == 1:
            record.failed += 1
        elif status:
            record.check(f"checks, process {i}", ok=False, detail=f"it ended with status {status}")


def main() -> None:
    options = part_options(__doc__).parse_args()
    record = make_record(options)
    checks = start_checks(options)
    try:
        run_tests(record, interpret=options.interpret)
    finally:
        wait_for(record, checks)
    finish(record)


if __name__ == "__main__":
    main()
