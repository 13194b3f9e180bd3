"""The servers that are compared, each set up as somebody who knows it would: ours and the peers that are installed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf_make
import torch

from tokenbus.core.models import demo, gguf_file
from tokenbus.core.worker.threads import available_cores

from .servers import MODEL, Variant

KV_BYTES_PER_TOKEN = 23040
"""SmolLM2-135M in two-byte K/V: 30 layers x 3 heads x 64 x 2."""
CONTEXT, STREAMS, BLOCK = 4096, 8, 16
"""Of the memory row."""


@dataclass(frozen=True)
class Peers:
    """Where the peers are; None: not compared."""

    vllm: str | None = None
    model_dir: str | None = None
    """For vLLM; None: made from the demo model."""
    llama_server: str | None = None
    llama_args: str = ""


class Models:
    """The demo model in every form that is needed, all with the same weights but for their type."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.q4_1 = demo.fetch_demo()

    def gguf(self, kind: str) -> Path:
        return self.q4_1 if kind == "Q4_1" else gguf_make.make(self.q4_1, kind, self.folder)

    def bf16_weights(self) -> Path:
        """As the engine keeps them in its cache."""
        gguf_file.convert(self.q4_1)
        return gguf_file.weights(self.q4_1, torch.bfloat16)

    def hugging_face(self) -> Path:
        """A folder with config.json, tokenizer and bf16 weights alone: links into our own cache."""
        weights = self.bf16_weights()
        target = self.folder / f"{demo.NAME}-bf16"
        target.mkdir(parents=True, exist_ok=True)
        links = {path.name: path for path in weights.parent.iterdir() if path.suffix in {".json", ".jinja"}}
        for name, path in (links | {"model.safetensors": weights}).items():
            if not (target / name).exists():
                (target / name).unlink(missing_ok=True)
                (target / name).symlink_to(path)
        return target


def make_variants(names: set[str], peers: Peers, models: Models, extra: str = "") -> dict[str, Variant]:
    """Those of `names` that can be run with what is installed, in the order in which they take turns. extra: more of our arguments."""
    makers = {
        "ours-bf16": lambda: _ours("ours-bf16", models, "BF16", extra),
        "vllm-bf16": lambda: _vllm(peers, models),
        "llama-bf16": lambda: _llama("llama-bf16", peers, models.gguf("BF16"), 1),
        "ours-q8_0": lambda: _ours("ours-q8_0", models, "Q8_0", extra),
        "llama-q8_0": lambda: _llama("llama-q8_0", peers, models.gguf("Q8_0"), 1),
        "ours-q4_1": lambda: _ours("ours-q4_1", models, "Q4_1", extra),
        "llama-q4_1": lambda: _llama("llama-q4_1", peers, models.gguf("Q4_1"), 1),
        "ours-int8": lambda: _ours("ours-int8", models, "int8", extra),
        "llama-bf16-c8": lambda: _llama("llama-bf16-c8", peers, models.gguf("BF16"), 8),
        "llama-bf16-c32": lambda: _llama("llama-bf16-c32", peers, models.gguf("BF16"), 32),
        "ours-memory": lambda: _ours("ours-memory", models, "BF16", f"{memory_arguments()} {extra}"),
    }
    missing = {"vllm" if not peers.vllm else "", "llama" if not peers.llama_server else ""}
    return {name: make() for name, make in makers.items() if name in names and name.partition("-")[0] not in missing}


def memory_arguments() -> str:
    return f"--max-model-len {CONTEXT} --num-blocks {STREAMS * CONTEXT // BLOCK}"


def _ours(name: str, models: Models, kind: str, extra: str) -> Variant:
    """kind: BF16, int8 or a type of GGUF. What is made once for a model (weights, tokenizer) is made now, not at the first start."""
    fixed = f"serve --port {{port}} --served-model-name {MODEL} --log-level warning --dtype bfloat16"
    bf16 = gguf_make.tensor_bytes(models.gguf("BF16"))
    if kind in {"BF16", "int8"}:
        models.bf16_weights()
        words = "" if kind == "BF16" else "--enable quantization.int8"
        weights = bf16 if kind == "BF16" else bf16 * 3 // 5  # down projections, a fifth of all weights, stay bfloat16
    else:
        path = models.gguf(kind)
        gguf_file.convert(path)
        words = f"--model {shlex.quote(str(path))} --enable quantization.gguf"
        weights = gguf_make.tensor_bytes(path)
    return Variant(name, (sys.executable, "-m", "tokenbus", *shlex.split(f"{fixed} {words} {extra}")), weights)


def _vllm(peers: Peers, models: Models) -> Variant:
    assert peers.vllm
    folder = peers.model_dir or str(models.hugging_face())
    words = f"--served-model-name {MODEL} --port {{port}} --dtype bfloat16 --max-model-len 8192 --enable-prefix-caching"
    space = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")}
    weights = gguf_make.tensor_bytes(models.gguf("BF16"))
    return Variant("vllm-bf16", (peers.vllm, "serve", folder, *words.split()), weights, space)


def _llama(name: str, peers: Peers, file: Path, slots: int) -> Variant:
    """As many slots as streams, each with room for its workload; prompts' prefixes are reused within a slot by default."""
    assert peers.llama_server
    context = {1: 8192, 8: 8 * 4096, 32: 32 * 512}[slots]
    cores = available_cores()
    words = f"--alias {MODEL} --port {{port}} --parallel {slots} --ctx-size {context} -t {cores} -tb {cores} -fa on --no-webui"
    command = (peers.llama_server, "-m", str(file), *words.split(), *shlex.split(peers.llama_args))
    return Variant(name, command, gguf_make.tensor_bytes(file))


def versions(peers: Peers) -> list[str]:
    root = Path(__file__).resolve().parents[2]
    commit = _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"]).strip()
    changed = "+" if _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"]) else ""
    found = [f"Tokenbus at {commit}{changed}", f"Python {sys.version.split()[0]}", f"torch {torch.__version__}"]
    if peers.vllm:
        code = "from importlib.metadata import version; print(version('vllm'))"
        found.append("vLLM " + _output([str(Path(peers.vllm).parent / "python"), "-c", code]).strip())
    if peers.llama_server:
        text = re.search(r"version: *(.*)", _output([peers.llama_server, "--version"]))
        found.append("llama-server " + (text.group(1).strip() if text else "of unknown version"))
    return found


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr
