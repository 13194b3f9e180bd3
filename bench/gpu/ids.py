"""Greedy ids of the whole engine against transformers' own generation, in float32 without TF32, on weights that make attention peaked.

Sixteen prompts of four lengths and 64 new tokens each, in several ways that may change nothing: chunks, a filled prefix cache, no graphs,
no step ahead, the determinism switch. A difference counts as a tie where transformers itself finds both tokens equally likely: within
TIE in logits; what comes behind it is not compared. Interpreted: a tiny model and a few tokens, with core's decoder on Triton's kernels.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenbus import LLM, SamplingParams
from tokenbus.core.selftest.tiny import make_tokenizer

from .record import Record, finish, make_record, part_options
from .shapes import SHAPES, write_peaked

KV_MB = 1024
TIE = 3e-3
"""On these weights float32 and float64 differ by up to 1.4e-3 in a logit, two runs in float32 so by twice that; logits spread by 2.5, and
the best is 0.5 above the second on average."""
MOSTLY = 0.75
"""Share of the prompts that must be equal to their ends: ties are rare."""


@dataclass(frozen=True)
class Scale:
    shape: str
    device: str
    lengths: tuple[int, ...]
    each: int
    """Prompts of each length."""
    new: int
    at_once: int
    """Engines beside each other: starting and compiling takes most of the time."""
    chunk: int
    """Tokens of a step in the way that cuts prompts into chunks."""


DEVICE = Scale("135M", "cuda", (5, 64, 190, 700), 4, 64, 4, 96)
TINY = Scale("tiny", "cpu", (5, 20), 1, 6, 1, 8)


@dataclass(frozen=True)
class Way:
    name: str
    settings: dict[str, Any]
    again: bool = False
    """A second time with a prefix cache that holds the prompts."""


def ways(scale: Scale) -> Iterator[Way]:
    longest = max(scale.lengths) + scale.new + 1
    base: dict[str, Any] = {
        "device": scale.device,
        "dtype": "float32",
        "kernels": "triton",
        "max_model_len": longest,
        "kv_memory_mb": KV_MB,
    }
    if scale.device == "cpu":
        base["enable"] = ("attention.triton",)  # a device has Triton's attention by itself
    yield Way("as it comes", base, again=True)
    yield Way(
        "in chunks, without prefix cache, graphs and a step ahead",
        {**base, "token_budget": scale.chunk, "cuda_graphs": "off", "ahead": "off", "disable": ("prefix_cache",)},
    )
    if scale.device == "cuda":
        yield Way("determinism on, in chunks", {**base, "token_budget": scale.chunk, "batch_invariant": "on"}, again=True)
        yield Way("drafts", {**base, "enable": ("speculative.ngram",)})


def prompts(scale: Scale) -> list[list[int]]:
    """Every second one repeats itself, which gives drafts something to find."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in scale.lengths:
        for i in range(scale.each):
            ids = torch.randint(0, SHAPES[scale.shape]["vocab_size"], (length,), generator=generator).tolist()
            made.append(ids if i % 2 == 0 else (ids[: max(2, length // 4)] * 5)[:length])
    return made


class Truth:
    """transformers' model of the same folder."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        self._device, self._lock = scale.device, threading.Lock()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model = model.to(scale.device).eval()

    def greedy(self, some: Sequence[list[int]], new: int) -> list[list[int]]:
        """Continue prompts of one length."""
        ids = torch.tensor(some, device=self._device)
        with torch.no_grad():
            out = self._model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        return out[:, ids.shape[1] :].tolist()

    def margin(self, tokens: list[int], chosen: int, other: int) -> float:
        """By how much its logit for `chosen` is above that for `other`, behind these tokens."""
        with self._lock, torch.no_grad():
            logits = self._model(torch.tensor([tokens], device=self._device)).logits[0, -1].float()
        return float(logits[chosen] - logits[other])


def compare(
    record: Record, name: str, truth: Truth, given: list[list[int]], expected: list[list[int]], found: list[list[int]]
) -> None:
    equal, ties, wrong = 0, 0, []
    for i, (prompt, right, mine) in enumerate(zip(given, expected, found, strict=True)):
        if mine == right:
            equal += 1
            continue
        at = next((j for j, (a, b) in enumerate(zip(right, mine, strict=False)) if a != b), min(len(right), len(mine)))
        if at < min(len(right), len(mine)) and abs(margin := truth.margin(prompt + right[:at], right[at], mine[at])) <= TIE:
            ties += 1
            record.note(
                f"ids, {name}: prompt {i} differs from token {at} on, where transformers' logits are {margin:.1e} apart"
            )
        else:
            wrong.append(f"prompt {i} ({len(prompt)} tokens) from new token {at} on")
    detail = f"{equal} of {len(given)} prompts equal" + (f", {ties} up to a tie" if ties else "")
    record.check(f"ids, {name}", not wrong and equal >= MOSTLY * len(given), "; ".join([detail, *wrong[:4]]))
    record.row("Greedy ids against transformers, float32", way=name, equal=equal, ties=ties, different=len(wrong))


def run_way(record: Record, way: Way, scale: Scale, folder: Path, truth: Truth, expected: list[list[int]]) -> None:
    given = prompts(scale)
    params = SamplingParams(temperature=0.0, max_tokens=scale.new)
    with LLM(str(folder), **way.settings) as llm:
        record.row("Engines of these", way=way.name, lossless=str(llm.info.lossless), reason=llm.info.lossless_reason or "-")
        for label in (way.name, f"{way.name}, prefix cache filled") if way.again else (way.name,):
            outputs = llm.generate(given, params, use_tqdm=False)
            compare(record, label, truth, given, expected, [output.outputs[0].token_ids for output in outputs])
            if label != way.name:
                hits = sum(output.cached_tokens for output in outputs)
                record.check(f"ids, {label}: it was used", hits > 0, f"{hits} prompt tokens")


def main() -> None:
    options = part_options(__doc__).parse_args()
    record = make_record(options)
    scale = TINY if options.interpret else DEVICE
    with tempfile.TemporaryDirectory(prefix="tokenbus-gpu-") as path:
        folder = write_peaked(Path(path, scale.shape), scale.shape, scale.device)
        make_tokenizer(folder / "tokenizer.json")
        truth = Truth(folder, scale)
        given = prompts(scale)
        groups = [given[i : i + scale.each] for i in range(0, len(given), scale.each)]
        expected = [ids for group in groups for ids in truth.greedy(group, scale.new)]

        def attempt(way: Way) -> None:
            record.attempt(f"ids, {way.name}", lambda: run_way(record, way, scale, folder, truth, expected), needs=10)

        with ThreadPoolExecutor(scale.at_once) as pool:
            list(pool.map(attempt, ways(scale)))
    finish(record)


if __name__ == "__main__":
    main()
