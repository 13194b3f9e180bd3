"""A real `tokenbus serve` in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

START_SECONDS = 90
DEFAULTS = ("--model", "demo", "--dtype", "float32", "--max-model-len", "512", "--num-blocks", "256", "--threads", "1")


class DemoServer:
    def __init__(self, process: subprocess.Popen[str], url: str, output: list[str]) -> None:
        self.process = process
        self.url = url
        self.output = output
        """Lines of its standard output and error so far."""

    def call(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """(status, decoded JSON)."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The first choice of a greedy completion."""
        status, body = self.call("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, body
        return body["choices"][0]

    def metrics(self) -> str:
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as response:
            return response.read().decode()

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@contextmanager
def serve_demo(*flags: str, environment: dict[str, str] | None = None) -> Iterator[DemoServer]:
    command = [sys.executable, "-m", "tokenbus.core.cli", "serve", "--port", "0", "--log-format", "json", *DEFAULTS, *flags]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines: list[str] = []
    addresses: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if match := re.search(r"^ready in .* at (http://\S+)$", line.strip()):
                addresses.put(match[1])
        addresses.put(None)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        url = addresses.get(timeout=START_SECONDS)
        assert url is not None, "\n".join(lines)
        yield DemoServer(process, url, lines)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(5)
        process.stdout.close()
