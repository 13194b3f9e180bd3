"""Each family's logits against transformers' own, float32, eager: with no, one and three items, in chunks, and with a part left out."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from tokenbus.core.models.base import ForwardBatch, KVCache
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.worker.attention import AttentionBatch
from tokenbus.core.worker.encoder import Encoders, MediaPiece, MediaState, attach
from tokenbus.core.worker.pieces import Pieces
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.plugins.multimodal.towers import tower_encoder

TOLERANCE = 2e-4
MROPE = ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"]
FAMILIES = ["llava", "llava-next", "idefics3", "smolvlm", *MROPE, "gemma3", "gemma3-views", "qwen2-audio"]
BLOCK = 4


def limit(truth: torch.Tensor) -> float:
    return TOLERANCE * max(1.0, float(truth.abs().max()) / 20)


class Engine:
    """One sequence at a time over a paged cache with shuffled blocks."""

    def __init__(self, tiny: Any, kernels: Any = "torch", choose: Any = None) -> None:
        resolved = resolve(str(tiny.path))
        self.model: Any = load(resolved, kernels=kernels, choose=choose)
        encoder = tower_encoder(self.model.beside)
        assert encoder is not None
        self.encoders = Encoders(encoder, 1 << 20)
        self.model.take_media(looks_ahead=encoder.looks_ahead)
        self.backend = TorchAttention()
        self.change: Any = lambda batch: None
        """Applied to every batch before it runs."""

    def logits(self, prompt: Any, more: list[int], cuts: list[int]) -> torch.Tensor:
        """Of every token; the prompt in chunks that end at `cuts`, the rest token by token."""
        tokens = prompt.tokens + more
        state = MediaState(prompt.media, len(prompt.tokens), self.encoders.encoder) if prompt.media else None
        num_blocks = -(-len(tokens) // BLOCK)
        shapes = self.model.kv_layout(BLOCK).shapes(num_blocks)
        kv = KVCache(*([torch.zeros(s) for s in shapes] for _ in range(2)))
        table = random.Random(0).sample(range(num_blocks), num_blocks)
        borders = [0, *cuts, *range(len(prompt.tokens), len(tokens) + 1)]
        found = []
        with torch.inference_mode():
            for first, end in itertools.pairwise(borders):
                positions = torch.arange(first, end)
                slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, end)])
                batch = ForwardBatch(
                    torch.tensor(tokens[first:end]), positions, AttentionBatch([0, end - first], [end], [table], slots)
                )
                piece = MediaPiece(state, first, end - first)
                self.encoders.load(piece)
                attach(batch, [piece])
                self.change(batch)
                batch.attention.prepared = self.backend.prepare(batch.attention)
                found.append(self.model.logits(self.model.forward(batch, kv, self.backend)))
                if state is not None:
                    state.release(end)
        return torch.cat(found)


@pytest.fixture(scope="module")
def engines(tiny_media: Any) -> Any:
    made: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in made:
            made[name] = Engine(tiny_media(name))
        made[name].change = lambda batch: None
        return made[name]

    return get


def cuts_of(prompt: Any) -> list[int]:
    """Beside each item; within it where that is allowed."""
    cuts: set[int] = set()
    for item in prompt.media:
        cuts |= {item.start, item.end} if item.bidirectional else {item.start - 1, item.start + item.length // 2, item.end + 1}
    return sorted(cuts)


MORE = [11, 200, 57, 3]


@pytest.mark.parametrize("sizes", [[], [0], [0, 1, 2]], ids=["text", "one", "three"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_transformers(name: str, sizes: list[int], tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media(name), engines(name)
    prompt = tiny.prompt(sizes, seed=len(sizes))
    truth = tiny.truth(prompt, MORE)
    whole = engine.logits(prompt, MORE, [])
    assert float((whole - truth).abs().max()) <= limit(truth)
    assert torch.equal(engine.logits(prompt, MORE, cuts_of(prompt)), whole), "chunks change nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_shuffled_features_are_seen(name: str, tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media(name), engines(name)
    prompt = tiny.prompt([0], seed=5)
    truth = tiny.truth(prompt, MORE)

    def shuffle(batch: Any) -> None:
        if batch.media is not None and len(batch.media.rows):
            batch.media.embeds = batch.media.embeds.roll(1, dims=0)

    engine.change = shuffle
    assert float((engine.logits(prompt, MORE, []) - truth).abs().max()) > 100 * limit(truth)


@pytest.mark.parametrize("name", MROPE)
def test_plain_positions_are_seen(name: str, tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media(name), engines(name)
    prompt = tiny.prompt([0], seed=6)
    truth = tiny.truth(prompt, MORE)

    def plain(batch: Any) -> None:
        if batch.media is not None:
            batch.media.places = None

    engine.change = plain
    assert float((engine.logits(prompt, MORE, []) - truth).abs().max()) > 100 * limit(truth)


def test_a_causal_mask_over_a_picture_is_seen(tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media("gemma3"), engines("gemma3")
    prompt = tiny.prompt([0], seed=7)
    truth = tiny.truth(prompt, MORE)

    def causal(batch: Any) -> None:
        batch.attention.reach = None

    engine.change = causal
    assert float((engine.logits(prompt, MORE, []) - truth).abs().max()) > 100 * limit(truth)


def test_views_of_a_picture_that_see_each_other_are_seen(tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media("gemma3-views"), engines("gemma3-views")
    prompt = tiny.prompt([0], seed=7)
    truth, item = tiny.truth(prompt, MORE), prompt.media[0]

    def one(batch: Any) -> None:
        if batch.attention.reach is not None:
            batch.attention.reach[item.start : item.end] = item.end

    engine.change = one
    assert float((engine.logits(prompt, MORE, []) - truth).abs().max()) > 100 * limit(truth)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_features_of_the_first_layers_are_seen(name: str, tiny_media: Any, engines: Any) -> None:
    tiny, engine = tiny_media(name), engines(name)
    prompt = tiny.prompt([0], seed=8)
    truth = tiny.truth(prompt, MORE)

    def shallow(batch: Any) -> None:
        if batch.media is not None:
            batch.media.deep = []

    engine.change = shallow
    assert float((engine.logits(prompt, MORE, []) - truth).abs().max()) > 100 * limit(truth)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_encoder_that_pauses_makes_the_same(name: str, tiny_media: Any, engines: Any) -> None:
    encoder = engines(name).encoders.encoder
    assert encoder.pauses
    for item in tiny_media(name).prompt([0, 1, 2], seed=9).media:
        whole = encoder.encode(item)
        pieces, count, found = Pieces(encoder), 0, None
        pieces.begin(item)
        while found is None:
            found, count = pieces.go_on(0.0), count + 1
        pieces.close()
        assert count > 20
        assert all(torch.equal(*pair) for pair in zip((whole.rows, *whole.deep), (found.rows, *found.deep), strict=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_an_encoder_makes_does_not_depend_on_threads_or_on_when(name: str, tiny_media: Any, engines: Any) -> None:
    encoder, before = engines(name).encoders.encoder, torch.get_num_threads()
    items = tiny_media(name).prompt([0, 1, 2], seed=9).media
    try:
        torch.set_num_threads(1)
        wanted = [encoder.encode(item) for item in items]
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            for one, item in zip(reversed(wanted), reversed(items), strict=True):
                found = encoder.encode(item)
                assert all(torch.equal(*pair) for pair in zip((one.rows, *one.deep), (found.rows, *found.deep), strict=True))
    finally:
        torch.set_num_threads(before)
