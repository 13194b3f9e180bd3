"""`tokenbus doctor`: watches a running server for a few seconds and says what is out of its healthy range, and what to do about it.

Exit status: 0 all well, 1 warnings, 2 something is bad (or no server answers).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from dataclasses import asdict

from ..config import Config
from ..errors import ConflictError, NotFoundError, TokenbusError, UnavailableError
from ..watching.checks import Finding, Patient, examine
from ..watching.facts import Facts
from ..watching.remote import Remote, connect

MARKS = {"ok": "ok", "unknown": "-", "warning": "WARN", "bad": "BAD"}
STATUS = {"ok": 0, "unknown": 0, "warning": 1, "bad": 2}


def run(arguments: argparse.Namespace, config: Config) -> int:
    remote = connect(arguments, config)
    try:
        findings = examine(look(remote, arguments.seconds))
    except (UnavailableError, ConflictError, NotFoundError) as error:
        findings = [unreachable(error)]
    if arguments.json:
        text = json.dumps(
            {"url": remote.url, "findings": [asdict(finding) for finding in findings]}, indent=2, ensure_ascii=False
        )
    else:
        text = report(findings)
    sys.stdout.write(text + "\n")
    return max(STATUS[finding.level] for finding in findings)


def look(remote: Remote, seconds: float) -> Patient:
    """Watch for so many seconds, until the first frame with everything in it at least. Raises what `Remote` raises."""
    facts, features = Facts(), remote.get("/v1/tokenbus/features")
    began = time.monotonic()
    with contextlib.closing(remote.frames()) as frames:
        for frame in frames:
            facts.take(frame)
            complete = facts.slow and (facts.engine or facts.server["doubt"])
            if time.monotonic() - began >= seconds and (complete or time.monotonic() - began >= 5 * seconds):
                break
    if not facts.server:
        raise UnavailableError(f"{remote.url} ended its stream at once: it is shutting down")
    metrics = True
    try:
        remote.text("/metrics")
    except TokenbusError:
        metrics = False
    return Patient(facts, features, metrics, seconds)


def unreachable(error: TokenbusError) -> Finding:
    advice = "start it, or say where it is and with which admin key (--url, --admin-key)"
    return Finding("queue", "server", "bad", error.message, "answers", "nothing can be said about it", advice)


def report(findings: list[Finding]) -> str:
    lines = []
    for area in dict.fromkeys(finding.area for finding in findings):
        lines.append(area)
        for finding in (one for one in findings if one.area == area):
            lines.append(f"  {MARKS[finding.level]:<5}{finding.check}: {finding.value}   [healthy: {finding.healthy}]")
            if finding.meaning:
                lines.append(f"       means: {finding.meaning}")
            if finding.advice:
                lines.append(f"       do: {finding.advice}")
    counts = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    lines.append(f"{counts['ok']} ok, {counts['unknown']} not known yet, {counts['warning']} warnings, {counts['bad']} bad")
    return "\n".join(lines)
