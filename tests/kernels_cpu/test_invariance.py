"""The determinism contract on every instruction set by itself, bit by bit: hidden states of a whole prompt and logits of decodes.

The tiny model with every chunk size from 1 to 512, the demo model with those around tile borders; alone and among 31 other sequences.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.worker.cpu_attention import CpuAttention
from tokenbus.kernels.cpu import lib

from ..models.conftest import Paged, make_tiny, random_tokens

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
DEMO_CHUNKS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127)
DECODES = 3


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("tiny"), **SMALL).path)


@pytest.fixture(params=["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def small(request, small_path, threads):
    threads(2)
    return model_of(small_path, request.param)


@pytest.fixture(scope="module")
def demo():
    return model_of("demo", "bfloat16")


def model_of(name: str, dtype: str) -> CpuDecoder:
    model = load(resolve(name), dtype, kernels="cpu")
    assert isinstance(model, CpuDecoder)
    return model


def engine(model: CpuDecoder, blocks: int = 64) -> Paged:
    return Paged(model, num_blocks=blocks, block_size=16, backend=CpuAttention())


class Sequence:
    """One prompt, then greedy decodes: everything that is compared."""

    def __init__(self, paged: Paged, prompt: list[int], key: Any = "it") -> None:
        self.paged, self.prompt, self.key = paged, prompt, key
        self.hidden: list[torch.Tensor] = []
        self.logits: list[torch.Tensor] = []

    def prefill(self, chunk: int, others: Others | None = None) -> Sequence:
        for first in range(0, len(self.prompt), chunk):
            self._step(self.prompt[first : first + chunk], others)
        for _ in range(DECODES):
            with torch.inference_mode():
                self.logits.append(self.paged.model.logits(self.hidden[-1][-1:]))
            self._step([int(self.logits[-1].argmax())], others)
        return self

    def _step(self, tokens: list[int], others: Others | None) -> None:
        work = {self.key: tokens}
        at = 0
        if others is not None:
            before, after = others.work()
            work, at = {**before, **work, **after}, sum(map(len, before.values()))
        self.hidden.append(self.paged.hidden(work)[at : at + len(tokens)])

    def assert_same_bits(self, other: Sequence) -> None:
        assert torch.equal(torch.cat(self.hidden), torch.cat(other.hidden))
        assert torch.equal(torch.cat(self.logits), torch.cat(other.logits))


class Others:
    """31 sequences that prefill and decode beside the one that is looked at, some before it in the batch, some behind."""

    def __init__(self, vocab: int, longest: int = 24, seed: int = 1) -> None:
        self.draw = random.Random(seed)
        self.vocab, self.longest = vocab, longest
        self.steps = 0

    def work(self) -> tuple[dict[Any, list[int]], dict[Any, list[int]]]:
        sizes = {i: self.draw.choice((1, 1, 1, 2, self.draw.randint(1, self.longest))) for i in range(31)}
        made = {i: [self.draw.randrange(self.vocab) for _ in range(n)] for i, n in sizes.items()}
        border = self.draw.randint(0, 31)
        self.steps += 1
        return {i: made[i] for i in range(border)}, {i: made[i] for i in range(border, 31)}


@pytest.mark.parametrize("sizes", ["some", pytest.param("every", marks=pytest.mark.long)])
def test_every_chunk_size_of_the_tiny_model(small, isa, sizes):
    """Every size in the suite for the instruction set that serves here; for the others, which share its code, with `-m long`."""
    prompt = random_tokens(512, seed=2)
    chunks = range(1, 512, 1 if sizes == "every" or isa == lib.available_isas()[-1] else 6)
    whole = Sequence(engine(small), prompt).prefill(512)
    assert torch.cat(whole.hidden).float().std() > 0.1
    steps = small._fused.steps
    for chunk in chunks:
        Sequence(engine(small), prompt).prefill(chunk).assert_same_bits(whole)
    assert small._fused.steps - steps == sum(-(-512 // chunk) + DECODES for chunk in chunks)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_thread_counts(small, isa, threads, count):
    prompt = random_tokens(200, seed=3)
    whole = Sequence(engine(small), prompt).prefill(200)
    threads(count)
    Sequence(engine(small), prompt).prefill(61).assert_same_bits(whole)


def test_among_31_others(small, isa):
    prompt = random_tokens(90, seed=4)
    alone = Sequence(engine(small), prompt).prefill(90)
    for chunk in (1, 7, 32, 90):
        others = Others(small.spec.vocab_size)
        Sequence(engine(small, blocks=2048), prompt).prefill(chunk, others).assert_same_bits(alone)
        assert others.steps == -(-90 // chunk) + DECODES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_model(demo, isa, threads):
    threads(2)
    prompt = [token % 40000 + 100 for token in random_tokens(131, seed=5)]
    whole = Sequence(engine(demo), prompt).prefill(131)
    for chunk in DEMO_CHUNKS:
        Sequence(engine(demo), prompt).prefill(chunk).assert_same_bits(whole)
    others = Others(40000, longest=4)
    Sequence(engine(demo, blocks=1024), prompt).prefill(64, others).assert_same_bits(whole)
    assert others.steps == 3 + DECODES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_model_with_512_tokens_at_once(demo, isa, threads):
    threads(2)
    prompt = [token % 40000 + 100 for token in random_tokens(513, seed=6)]
    Sequence(engine(demo), prompt).prefill(512).assert_same_bits(Sequence(engine(demo), prompt).prefill(127))
