"""What quantisation costs in quality: teacher-forced perplexity of the demo model on English prose, with each plugin and without.

    python bench/perplexity.py [--tokens 24576] [--window 1024] [--text FILE] [--case NAME ...] [--output FILE.md]

Windows follow each other; each begins with an empty cache, and every token of it but the first is predicted from those before it in the
window. The model runs as it serves: packed weights, paged K/V, attention by the plugin that holds the slot. The text is Lewis Carroll's
"Alice's Adventures in Wonderland" (public domain), from the source archive of PyPI's Brotli, where it is test data; pip fetches it.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from gguf_make import make
from tokenizers import Tokenizer

from tokenbus.core.config import Config
from tokenbus.core.host import make_host
from tokenbus.core.models import demo, loader
from tokenbus.core.models.base import CausalModel, ForwardBatch, KVCache
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.slot import choose_layout
from tokenbus.core.worker.attention import AttentionBackend, AttentionBatch, KVLayout
from tokenbus.core.worker.plugins import WorkerPlugins
from tokenbus.core.worker.threads import available_cores
from tokenbus.kernels.cache import cache_root, locked, publish

ARCHIVE = "Brotli==1.1.0"
ARCHIVE_SHA256 = "81de08ac11bcb85841e440c13611c00b67d3bf82698314928d0b676362546724"
MEMBER = "tests/testdata/alice29.txt"
BLOCK = 16
HEAD_ROWS = 256


@dataclass(frozen=True)
class Case:
    name: str
    plugins: tuple[str, ...] = ()
    weights: str = ""
    """The GGUF type that the demo is converted to; empty: as it comes (Q4_1, with an embedding in Q8_0)."""
    dtype: str = "bfloat16"
    base: str = ""
    """The case it is compared with."""
    limit: float | None = None
    """Percent over its base at most."""


INT8, GGUF, KV, FP8 = "quantization.int8", "quantization.gguf", "quantization.kv_int8", "quantization.kv_fp8"
CASES = (
    Case("bfloat16"),
    Case("float32", dtype="float32"),
    Case("int8", (INT8,), base="bfloat16", limit=1.0),
    Case("kv_int8", (KV,), base="bfloat16", limit=0.5),
    Case("kv_fp8", (FP8,), base="bfloat16"),
    Case("int8 and kv_int8", (INT8, KV), base="bfloat16"),
    Case("Q4_1 packed", (GGUF,), base="bfloat16", limit=0.5),
    Case("Q4_1 packed, float32", (GGUF,), dtype="float32", base="float32", limit=0.5),
    Case("Q4_1 packed and kv_int8", (GGUF, KV), base="bfloat16"),
    Case("Q8_0 dequantised", weights="Q8_0"),
    Case("Q8_0 packed", (GGUF,), "Q8_0", base="Q8_0 dequantised", limit=0.5),
)


def archive_text() -> str:
    """The prose, from the cache folder; downloaded first (7 MB)."""
    target = cache_root() / "bench" / Path(MEMBER).name
    if not target.is_file():
        with locked(target), tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--no-build-isolation",
                "-q",
            ]
            subprocess.run([*command, "--dest", folder, ARCHIVE], check=True, stdin=subprocess.DEVNULL)
            (found,) = Path(folder).glob("*.tar.gz")
            if hashlib.sha256(found.read_bytes()).hexdigest() != ARCHIVE_SHA256:
                sys.exit(f"{found.name} has another SHA-256 than {ARCHIVE_SHA256}")
            with tarfile.open(found) as archive, publish(target) as draft:
                member = archive.extractfile(f"{found.name.removesuffix('.tar.gz')}/{MEMBER}")
                draft.write_bytes(member.read() if member else b"")
    return target.read_text(encoding="latin-1")


def load(case: Case) -> tuple[CausalModel, KVLayout, AttentionBackend]:
    source = demo.fetch_demo()
    resolved = resolve(str(make(source, case.weights)) if case.weights else "demo")
    host = make_host("worker", Config())
    plugins = WorkerPlugins(host, host.start_switches(case.plugins).names())
    plugins.start()
    model = loader.load(resolved, case.dtype, choose=plugins.linears)
    layout = choose_layout(host, plugins.features, resolved.name, model.kv_layout(BLOCK))
    return model, layout, plugins.attention(layout)


@torch.inference_mode()
def perplexity(model: CausalModel, layout: KVLayout, attention: AttentionBackend, ids: list[int], window: int) -> float:
    blocks = -(-window // BLOCK)
    dtype = torch.int8 if layout.quantized else layout.dtype
    kv = KVCache(*([torch.zeros(shape, dtype=dtype) for shape in layout.shapes(blocks)] for _ in range(2)))
    total, count = 0.0, 0
    for first in range(0, len(ids), window):
        tokens = torch.tensor(ids[first : first + window])
        n = len(tokens)
        positions = torch.arange(n)
        batch = AttentionBatch([0, n], [n], [list(range(blocks))], positions)
        batch.prepared = attention.prepare(batch)
        hidden = model.forward(ForwardBatch(tokens, positions, batch), kv, attention)
        for row in range(0, n - 1, HEAD_ROWS):
            end = min(row + HEAD_ROWS, n - 1)
            logits = model.logits(hidden[row:end])
            total += float(torch.nn.functional.cross_entropy(logits, tokens[row + 1 : end + 1], reduction="sum"))
        count += n - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24576)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--text", type=Path, help="another text, UTF-8")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these; may be repeated")
    parser.add_argument("--output", type=Path, help="default: bench/results/DATE-perplexity.md; with --case: none")
    options = parser.parse_args()
    torch.set_num_threads(available_cores())
    text = options.text.read_text(encoding="utf-8") if options.text else archive_text()
    tokenizer = Tokenizer.from_file(str(resolve("demo").path / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: options.tokens]
    found: dict[str, float] = {}
    rows = ["| case | plugins | perplexity | base | over it | at most | seconds |", "|---|---|---|---|---|---|---|"]
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        began = time.perf_counter()
        found[case.name] = value = perplexity(*load(case), ids, options.window)
        over = f"{100 * (value / found[case.base] - 1):+.2f} %" if case.base in found else ""
        most = "" if case.limit is None else f"{case.limit} %"
        names = ", ".join(case.plugins)
        rows.append(
            f"| {case.name} | {names} | {value:.4f} | {case.base} | {over} | {most} | {time.perf_counter() - began:.0f} |"
        )
        print(rows[-1], flush=True)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    given = " ".join(f"{a}" if " " not in a else f'"{a}"' for a in sys.argv[1:])
    source = options.text.name if options.text else "Alice in Wonderland"
    page = [
        f"# Perplexity of quantised models, {day}",
        "",
        f"    scripts/bench perplexity {given}".rstrip(),
        "",
        f"SmolLM2-135M-Instruct, {len(ids)} tokens of {source} in windows of {options.window}; torch {torch.__version__}.",
        "",
        *rows,
    ]
    output = options.output or (None if options.case else Path(__file__).parent / "results" / f"{day}-perplexity.md")
    if output:
        output.write_text("\n".join(page) + "\n", encoding="utf-8")
    print("\n".join(page))


if __name__ == "__main__":
    main()
