"""Serving on the CPU beside peers: every workload of load.py, in turn, with the machine's limits measured in the same run.

    python bench/cpu.py [--rounds 3] [--workload single,c8] [--arg "--dtype float32"] [--vllm PATH/bin/vllm --model-dir DIR] \
        [--llama-server PATH --gguf FILE] [--out bench/results/NAME.md]

Each round starts every server, warms it, runs the workloads, stops it; figures are medians over the rounds, ratios ours / peer.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tokenbus.kernels.torch_ops.limits import measure_limits

LOAD = Path(__file__).with_name("load.py")
NAMES = {"ours": "Tokenbus", "vllm": "vLLM", "llama": "llama-server"}
FIGURES = {
    "single": ("median_tpot_ms", "output_tok_s"),
    "c8": ("output_tok_s", "median_ttft_ms", "p99_itl_ms"),
    "c32": ("output_tok_s", "median_ttft_ms", "p99_itl_ms"),
    "long": ("total_tok_s", "median_ttft_ms"),
    "prefix": ("output_tok_s", "median_ttft_ms"),
    "interference": ("worst_over_median", "worst_gap_ms", "median_gap_ms", "long_ttft_s", "long_ttft_alone_s"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Name -> (command with {port}, model name in requests)."""
    own = [sys.executable, "-m", "tokenbus", "serve", "--port", "{port}", "--log-level", "warning", *shlex.split(options.arg)]
    found = {"ours": (own, "SmolLM2-135M-Instruct")}
    if options.vllm:
        words = "serve {model} --port {port} --dtype bfloat16 --max-model-len 8192 --enable-prefix-caching"
        found["vllm"] = ([options.vllm, *words.replace("{model}", options.model_dir).split()], options.model_dir)
    if options.llama_server:
        words = "--port {port} --parallel 32 --cont-batching --ctx-size 65536 -t 2 --no-webui -m"
        found["llama"] = ([options.llama_server, *words.split(), options.gguf], "llama")
    return found


@contextlib.contextmanager
def served(command: list[str]) -> Iterator[tuple[str, float]]:
    """A running server: (address, seconds until it was ready)."""
    port = free_port()
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    began = time.perf_counter()
    words = [word.replace("{port}", str(port)) for word in command]
    process = subprocess.Popen(
        words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _answers(url):
            if process.poll() is not None or time.perf_counter() - began > 600:
                raise RuntimeError(f"{words[0]} did not become ready")
            time.sleep(0.05)
        yield url, time.perf_counter() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    """Ready by /ready where there is one, else by /health."""
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


def measure(url: str, model: str, workloads: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(LOAD), "--url", url, "--model", model, "--workload", workloads],
        capture_output=True, text=True, timeout=3600, check=False,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
    return {row.pop("workload"): row for row in map(json.loads, done.stdout.splitlines())}


def table(samples: dict[str, list[dict[str, Any]]], limits: list[Any], ready: dict[str, list[float]], options: Any) -> str:
    peers = [name for name in samples if name != "ours"]
    bandwidth = _median(x.read_bytes_per_second for x in limits) / 1e9
    rate = _median(x.flops_per_second for x in limits) / 1e12
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    extra = f' --arg "{options.arg}"' if options.arg else ""
    lines = [
        f"# Serving on a CPU, {dt.datetime.now(dt.UTC):%Y-%m-%d}",
        "",
        f"{os.cpu_count()} cores ({_processor()}), {versions}; {options.rounds} rounds, medians.",
        f"Measured in this run: read bandwidth {bandwidth:.1f} GB/s, bf16 matrix product {rate:.3f} TFLOP/s.",
        "",
        f"    scripts/bench cpu --rounds {options.rounds} --workload {options.workload}{extra}",
        "",
        "| workload | figure | " + " | ".join(["ours", *(f"{NAMES[p]} | ratio" for p in peers)]) + " |",
        "|---|---|" + "---|" * (1 + 2 * len(peers)),
    ]
    rows = [("start", "ready_s", {name: _median(values) for name, values in ready.items()})]
    for workload in options.workload.split(","):
        for figure in FIGURES[workload]:
            found = {n: [s[workload][figure] for s in runs if workload in s] for n, runs in samples.items()}
            rows.append((workload, figure, {n: _median(v) for n, v in found.items() if v}))
    for workload, figure, values in rows:
        cells = [f"{values['ours']:.4g}" if "ours" in values else "-"]
        for peer in peers:
            both = "ours" in values and peer in values
            cells += [f"{values[peer]:.4g}" if peer in values else "-", f"{values['ours'] / values[peer]:.2f}" if both else "-"]
        lines.append(f"| {workload} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _median(values: Any) -> float:
    return statistics.median(list(values))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workload", default=",".join(FIGURES))
    parser.add_argument("--arg", default="", help="more arguments for tokenbus serve")
    parser.add_argument("--vllm")
    parser.add_argument("--model-dir")
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf")
    parser.add_argument("--out")
    options = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {}
    ready: dict[str, list[float]] = {}
    limits = []
    for number in range(options.rounds):
        for name, (command, model) in commands(options).items():
            limits.append(measure_limits(torch.bfloat16))
            with served(command) as (url, seconds):
                ready.setdefault(name, []).append(seconds)
                samples.setdefault(name, []).append(measure(url, model, options.workload))
            print(f"round {number + 1}, {name}: ready {seconds:.1f} s, {samples[name][-1]}", file=sys.stderr, flush=True)
    text = table(samples, limits, ready, options)
    print(text)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
