"""A server that says what a test wants it to say."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

NOW = 1_000_000.0
IDS = ["cmpl-00000000000000000000aaaa-0", "cmpl-00000000000000000000bbbb-0"]


def step(step_id: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step_id": step_id, "started": NOW - 5 + step_id / 10, "duration": 0.095, "prefill": {}, "verify": {}, "decode": [0, 1],
        "num_decodes": 2, "prompt_tokens": 0, "draft_tokens": 0, "sampled": 2, "preempted": [], "budget": 2048, "running": 2,
        "waiting": 0, "phases": {"forward": 0.09}, "bytes_moved": 60, "flops": 10,
    }  # fmt: skip
    return values | changes


def frame(**changes: Any) -> dict[str, Any]:
    """Of a server that is well. A change of a dictionary is merged into it."""
    latency = {"count": 20, "p50": 0.1, "p95": 0.2, "p99": 0.25, "max": 0.3}
    values: dict[str, Any] = {
        "time": NOW, "server": {"state": "ready", "doubt": "", "open": 2, "restarts": 0, "suspects": 0},
        "steps": [step(i) for i in range(40)], "ids": IDS, "lost_steps": 0,
        "engine": {
            "open": 2, "running": 2, "waiting": 0, "free_blocks": 80, "retained_blocks": 10, "num_blocks": 100, "allocation_failures": 3,
        },
        "requests": [
            [IDS[0], True, 30, 40, 11, 100, NOW - 4, 5, 0, 0, ""],
            [IDS[1], True, 900, 512, 0, 50, NOW - 1, 5, 0, 0, ""],
        ],
        "blocks": [[1, 0, 0]] * 10 + [[0, 0, 1]] * 90, "window_seconds": 300.0,
        "latency": {"ttft": latency, "inter_token": latency}, "finished": {"stop": 200}, "arms": {},
        "ended": {"requests": 200, "prompt_tokens": 1000, "cached_tokens": 250, "output_tokens": 900, "preemptions": 0}, "refused": {},
        "lag": {"front": {"seconds": 0.001, "step_age": 0.0}, "engine": {"seconds": 0.002, "step_age": 0.01}},
        "events": [{"when": NOW - 60, "kind": "engine", "text": "engine ready: m, restarts 0"}],
        "limits": {"max_running": 256, "max_waiting": 1024, "token_budget": 2048},
        "info": {
            "model": "m", "dtype": "float32", "lossless": True, "num_blocks": 100, "block_size": 16, "max_model_len": 512,
            "read_bytes_per_second": 1000.0, "flops_per_second": 1000.0, "weights_bytes": 2**20, "kv_bytes_per_token": 64,
        },
    }  # fmt: skip
    return {
        key: {**values[key], **changes[key]} if isinstance(changes.get(key), dict) else changes.get(key, values[key])
        for key in values
    }


FEATURES = {
    "features": {
        "attention.cpu": {"on": True, "scope": "step", "lossless": True, "slot": "attention"},
        "metrics": {"on": True, "scope": "step", "lossless": True},
        "prefix_cache": {"on": True, "scope": "request", "lossless": True},
        "speculative.ngram": {"on": False, "scope": "request", "lossless": True, "because": "not on by default"},
    },
    "slots": {"attention": "attention.cpu", "scheduling": "scheduling.fcfs", "quantization": "core (the checkpoint's own weights)"},
}  # fmt: skip


class Told:
    """What the server says; tests change it."""

    def __init__(self) -> None:
        self.frames: list[Any] = [frame()]
        self.features: Any = FEATURES
        self.metrics = True
        self.key = ""
        self.raw: bytes | None = None
        """Instead of everything else."""


def _handler(told: Told) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if told.raw is not None:
                self.wfile.write(told.raw)
            elif told.key and self.headers.get("Authorization") != f"Bearer {told.key}":
                self._send(401, {"error": {"message": "the admin key is needed"}})
            elif self.path == "/v1/tokenbus/features":
                self._send(200, told.features)
            elif self.path == "/metrics" and told.metrics:
                self._send(200, "")
            elif self.path == "/v1/tokenbus/events":
                self._stream()
            else:
                self._send(404, {"error": {"message": f"there is no {self.path} here"}})

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _stream(self) -> None:
            """The frames, then the last one again and again."""
            self.send_response(200)
            self.end_headers()
            try:
                for one in told.frames:
                    self.wfile.write(b": a comment\n\ndata: " + json.dumps(one).encode() + b"\n\n")
                while told.frames:
                    self.wfile.write(b"data: " + json.dumps({**told.frames[-1], "steps": []}).encode() + b"\n\n")
                    time.sleep(0.02)
                self.wfile.write(b"data: [DONE]\n\n")
            except ConnectionError:
                pass

    return Handler


@contextmanager
def serve(told: Told) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(told))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def url(told: Told) -> Iterator[str]:
    with serve(told) as url:
        yield url


@pytest.fixture(scope="session")
def make_frame() -> Any:
    return frame


@pytest.fixture(scope="session")
def make_step() -> Any:
    return step
