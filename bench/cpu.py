"""Serving on the CPU beside peers: every row of the comparison, in turn, with the machine's limits measured in the same run.

    python bench/cpu.py [--rounds 3] [--only single,q8_0,...] [--vllm PATH/bin/vllm [--model-dir DIR]] [--llama-server PATH]
        [--arg "--threads 2"] [--short] [--out bench/results/NAME.md] [--json FILE]

Each round starts every server once, one after the other, ours and its peer next to each other; before each the machine's read bandwidth
and its two bf16 rates are measured. A server is warmed, runs the workloads of load.py that its rows need, and is stopped. Rows: single,
q8_0, q4_1, c8, c32, int8, prefill, interference, prefix, ready, memory, streaming; "more" compares further, without a verdict.

FLOPs are those of linears and causal attention, bytes those of the weights and of the K/V that one token reads. "http_tflop_s" takes the
time until the first token over HTTP, "forward_tflop_s" the forward pass inside the engine, "kernel_tflop_s" the linears alone
(cpu_kernels.py). "allowed_mb" is weights, K/V of 8 x 4096 tokens, and 400 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf_make
from serving.report import Run, markdown
from serving.rows import LINES, ROWS, Line, needed
from serving.servers import Server, ServerFailedError, Variant, served
from serving.variants import CONTEXT, KV_BYTES_PER_TOKEN, STREAMS, Models, Peers, make_variants, versions

HERE = Path(__file__).resolve().parent
LAYER_PARAMS = 960 * 576 + 576 * 576 + 3072 * 576 + 576 * 1536
LAYERS, HEAD_PARAMS, QUERY_WIDTH = 30, 49152 * 576, 576
PROMPT, SINGLE_CONTEXT = 2048, 128 + 64
"""Tokens of the prefill row's prompt; mean context of a token of `single`."""
MEMORY_ALLOWANCE = 400e6


def prompt_flops(tokens: int) -> int:
    """Linears of all tokens, causal attention, the head once."""
    linears = 2 * LAYERS * LAYER_PARAMS * tokens + 2 * HEAD_PARAMS
    return linears + 4 * LAYERS * QUERY_WIDTH * tokens * (tokens + 1) // 2


def measure_limits() -> dict[str, float]:
    """In a process of its own: its threads must not spin beside what is measured next."""
    done = subprocess.run([sys.executable, str(HERE / "cpu_limits.py"), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure_kernels() -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        words = [str(HERE / "cpu_kernels.py"), "--rows", str(PROMPT), "--rounds", "2", "--json", file.name]
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        return {"kernel_tflop_s": json.load(file)["rows"][0]["flops_per_s"] / 1e12}


def derive(variant: Variant, workload: str, figures: dict[str, Any]) -> None:
    """Add the figures that follow from those measured."""
    if workload == "single":
        moved = variant.weights_bytes + KV_BYTES_PER_TOKEN * SINGLE_CONTEXT
        figures["read_gb_s"] = moved / figures["median_tpot_ms"] / 1e6
    if workload == "prefill":
        figures["http_tflop_s"] = prompt_flops(PROMPT) / figures["median_ttft_ms"] / 1e9
        forward = figures["metrics"].get('tokenbus_step_phase_seconds_total{phase="forward"}')
        if forward:
            figures["forward_tflop_s"] = figures["metrics"]["tokenbus_step_flops_total"] / forward / 1e12
    if workload == "context":
        kv = STREAMS * CONTEXT * KV_BYTES_PER_TOKEN
        figures["allowed_mb"] = (variant.weights_bytes + kv + MEMORY_ALLOWANCE) / 1e6
    if workload.startswith("stream") and not variant.name.startswith("llama"):
        figures["front_us_per_token"] = 1e6 * figures["front_cpu_s"] / figures["output_tokens"]


def run_server(run: Run, variant: Variant, workloads: list[str], seed: int) -> None:
    run.loads.append(os.getloadavg()[0])
    run.limits.append(measure_limits())
    found = run.samples.setdefault(variant.name, {})
    try:
        with served(variant) as server:
            found.setdefault("start", []).append({"ready_s": server.ready_s})
            server.load("warm", short=False, seed=seed)
            for workload in workloads:
                found.setdefault(workload, []).append(measured(run, variant, server, workload, seed))
    except ServerFailedError as error:
        run.failures[variant.name] = str(error).rstrip(".")
        print(f"  {error}", file=sys.stderr, flush=True)


def measured(run: Run, variant: Variant, server: Server, workload: str, seed: int) -> dict[str, Any]:
    figures = server.load(workload, short=run.short, seed=seed)
    figures.pop("workload")
    derive(variant, workload, figures)
    shown = {name: round(value, 3) for name, value in figures.items() if name != "metrics"}
    print(f"  {variant.name}, {workload}: {shown}", file=sys.stderr, flush=True)
    return figures


def chosen(options: argparse.Namespace) -> list[Line]:
    rows = [name for name in (options.only or ",".join(ROWS)).split(",") if name]
    unknown = sorted(set(rows) - set(ROWS))
    if unknown:
        raise SystemExit(f"no such rows: {', '.join(unknown)}; there are {', '.join(ROWS)}")
    return [line for line in LINES if line.row in rows]


def shown_command(options: argparse.Namespace) -> str:
    """As it can be typed elsewhere: paths without the folders of this machine."""
    words = ["cpu", "--rounds", str(options.rounds)]
    words += ["--only", options.only] if options.only else []
    words += ["--arg", shlex.quote(options.arg)] if options.arg else []
    words += ["--vllm", "VLLM_VENV/bin/vllm"] if options.vllm else []
    words += ["--model-dir", "MODEL_DIR"] if options.model_dir else []
    words += ["--llama-server", "LLAMA_DIR/llama-server"] if options.llama_server else []
    words += [f"--llama-arg={shlex.quote(options.llama_arg)}"] if options.llama_arg else []
    words += ["--short"] if options.short else []
    return " ".join(words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="ROWS", help="names, separated by commas; default: all")
    parser.add_argument("--arg", default="", help="more arguments for all of our servers")
    parser.add_argument("--vllm", help="the program of that name in an environment of its own")
    parser.add_argument("--model-dir", help="Hugging Face folder for vLLM; default: made from the demo model")
    parser.add_argument("--llama-server")
    parser.add_argument("--llama-arg", default="", help="more arguments for llama-server")
    parser.add_argument("--dir", type=Path, default=gguf_make.cache_folder(), help="where models for the peers are made")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="few requests: to see that it works")
    parser.add_argument("--out", type=Path, help="the table as Markdown; written anew after each round")
    parser.add_argument("--json", type=Path, help="all samples")
    return parser.parse_args()


def main() -> None:
    options = parse()
    lines = chosen(options)
    wanted = needed(lines)
    peers = Peers(options.vllm, options.model_dir, options.llama_server, options.llama_arg)
    variants = make_variants(set(wanted), peers, Models(options.dir), options.arg)
    run = Run(shown_command(options), versions(peers), variants, lines, options.rounds, options.short)
    for number in range(options.rounds):
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        for variant in variants.values():
            run_server(run, variant, wanted[variant.name], options.seed + number)
            if variant.name == "ours-bf16" and "kernels" in wanted:
                run.samples.setdefault("kernels", {}).setdefault("prefill", []).append(measure_kernels())
        if options.json:
            options.json.write_text(json.dumps({"limits": run.limits, "samples": run.samples}), encoding="utf-8")
        if options.out:
            options.out.write_text(markdown(run), encoding="utf-8")
    print(markdown(run))


if __name__ == "__main__":
    main()
