"""Start a server, wait until it is ready, run load on it, stop it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import Watch

LOAD = Path(__file__).resolve().parent.parent / "load.py"
MODEL = "bench"
"""What every server calls its model."""
START_SECONDS = 600.0
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


class ServerFailedError(RuntimeError):
    """It ended before it was ready; the message has the end of what it wrote."""


@dataclass(frozen=True)
class Variant:
    """One way to run one server."""

    name: str
    command: tuple[str, ...]
    """With {port}."""
    weights_bytes: int
    """Read for each token that is alone in its step."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command without this machine's paths."""
        known = {"python": "python", "python3": "python"}
        words = [f"{name}={value}" for name, value in self.environment.items()]
        for word in self.command:
            base = Path(word).name if word.startswith("/") else word
            words.append(known.get(re.sub(r"3\.\d+$", "3", base), base))
        return " ".join(words)


@dataclass(frozen=True)
class Server:
    url: str
    pid: int
    ready_s: float

    def load(self, workload: str, *, short: bool, seed: int) -> dict[str, Any]:
        """Run one workload of load.py; its figures, and processor time and memory meanwhile."""
        words = [sys.executable, str(LOAD), "--url", self.url, "--model", MODEL, "--workload", workload, "--seed", str(seed)]
        every = 0.5 if workload == "context" else None
        before = self.metrics()
        with Watch(self.pid, memory_every=every).watching() as used:
            done = subprocess.run([*words, *(["--short"] if short else [])], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerFailedError(f"load.py --workload {workload} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        figures |= {"front_cpu_s": used.front_cpu, "other_cpu_s": used.other_cpu}
        if every:
            peak = used.peak
            figures |= {"pss_mb": peak.total / 1e6, "front_pss_mb": peak.front / 1e6, "file_pss_mb": peak.file / 1e6}
        after = self.metrics()
        figures["metrics"] = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return figures

    def metrics(self) -> dict[str, float]:
        """Tokenbus's counters of steps; empty for another server."""
        try:
            with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        except (OSError, ValueError):
            return {}
        pairs = [line.rpartition(" ") for line in lines if line.startswith("tokenbus_step_")]
        return {name: float(value) for name, _, value in pairs if "_bucket" not in name}


@contextlib.contextmanager
def served(variant: Variant) -> Iterator[Server]:
    """The running server; on the way out it is ended. Raises ServerFailedError."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in variant.command]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        environment = os.environ | QUIET | variant.environment
        try:
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            raise ServerFailedError(f"{variant.name} can't be started: {error}") from error
        try:
            url = f"http://127.0.0.1:{port}"
            while not _ready(url):
                if process.poll() is not None or time.perf_counter() - began > START_SECONDS:
                    raise ServerFailedError(f"{variant.name} did not become ready: {_tail(log)}")
                time.sleep(0.02)
            yield Server(url, process.pid, time.perf_counter() - began)
        finally:
            _stop(process)


def _ready(url: str) -> bool:
    """By /ready where there is one, else by /health."""
    for path in ("/ready", "/health"):
        try:
            with urllib.request.urlopen(url + path, timeout=2) as answer:
                return answer.status == 200
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except OSError:
            return False
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Any) -> str:
    """Its last lines, paths without the folders of this machine."""
    log.seek(0)
    lines = [re.sub(r"(?<![\w:/])/(?:[^\s/']+/)+", "", line.strip()) for line in log.read().splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it wrote nothing"
