"""The decoder on Triton kernels against transformers' own, in what company a row may be, and who runs what; in Triton's interpreter, or on
a GPU with -m cuda. The interpreter takes about a millisecond an operation: models have two layers here, and prompts are short."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from tokenbus.core.device import GPU_IS_OFF
from tokenbus.core.models.batch_probe import batch_probe
from tokenbus.core.models.config import DecoderConfig
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.families import decoder_config
from tokenbus.core.models.loader import Checkpoint, load
from tokenbus.core.models.media import MediaRows
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import weight_files
from tokenbus.core.models.triton_decoder import SLACK, TritonDecoder
from tokenbus.core.models.triton_linears import CublasLinears, InvariantLinear
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.core.worker.triton_attention import TritonAttention
from tokenbus.kernels.triton import elementwise

from .test_families import limit

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp:RuntimeWarning"
)  # numpy's; x / (1 + inf) is 0, as it should

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "qwen3-moe")
"""Biases and scaled angles; norms of Q and K; all of Gemma's; packed checkpoints and partial rotation; experts beside a dense layer."""
VOCAB = 128


@pytest.fixture(scope="module")
def small(tmp_path_factory, remake):
    made = {}

    def get(family):
        if family not in made:
            made[family] = remake(family, tmp_path_factory.mktemp("small"), num_hidden_layers=2, vocab_size=VOCAB)
        return made[family]

    return get


@pytest.fixture
def load_small(small, device):
    def get(family, dtype="float32", **settings):
        model = load(resolve(str(small(family).path)), dtype, device, "triton", batch_invariant="on", **settings)
        assert isinstance(model, TritonDecoder)
        return model

    return get


def config_and_weights(checkpoint: Any, dtype: torch.dtype, device: torch.device) -> tuple[DecoderConfig, Checkpoint]:
    resolved = resolve(str(checkpoint.path))
    config = decoder_config(resolved.config, resolved.name)
    assert config is not None
    return config, Checkpoint(weight_files(resolved.path), resolved.name, dtype, device)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_ids_equal_transformers(name, small, load_small, paged, tokens, device):
    checkpoint = small(name)
    engine = paged(load_small(name), backend=TritonAttention(device))
    prompts = {f"r{n}": tokens(n, seed=n, vocab=VOCAB) for n in (1, 5, 13)}
    wanted = {key: checkpoint.greedy(prompt, 3) for key, prompt in prompts.items()}
    rows = {key: [logits] for key, logits in engine.step({key: prompt[:9] for key, prompt in prompts.items()}).items()}
    rows["r13"].append(engine.step({"r13": prompts["r13"][9:]})["r13"])
    found: dict[str, list[int]] = {key: [] for key in prompts}
    for _ in range(3):
        for key, logits in rows.items():
            found[key].append(int(logits[-1][-1].argmax()))
        for key, logits in engine.step({key: ids[-1:] for key, ids in found.items()}).items():
            rows[key].append(logits)
    assert found == wanted
    for key, prompt in prompts.items():
        truth = checkpoint.truth(prompt + found[key])
        assert float((torch.cat(rows[key]).cpu() - truth).abs().max()) <= limit(truth)


@pytest.mark.parametrize("name", ["gemma2", "qwen3-moe"])
def test_a_row_does_not_depend_on_its_batch(name, load_small, paged, tokens, device):
    model = load_small(name)
    prompt = tokens(15, seed=3, vocab=VOCAB)
    alone, chunked, crowded = (paged(model, backend=TritonAttention(device)) for _ in range(3))
    whole = alone.prefill("a", prompt, 15)
    assert torch.equal(whole, chunked.prefill("a", prompt, 9))
    crowded.prefill("a", prompt[:13], 13)
    mates = {f"x{i}": tokens(3 + i, seed=i, vocab=VOCAB) for i in range(3)}
    rows = [crowded.step({**mates, "a": [token]})["a"] for token in prompt[13:]]
    assert torch.equal(whole[13:], torch.cat(rows))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_close_as_the_decoder_on_torch(dtype, small, paged, tokens, device):
    """To float32's logits. An interpreted kernel cuts bfloat16 off where a GPU rounds, which doubles its error."""
    checkpoint, kind = small("gemma2"), getattr(torch, dtype)
    prompt = tokens(20, seed=5, vocab=VOCAB)
    truth = checkpoint.truth(prompt)
    ours, theirs = (
        paged(make(*config_and_weights(checkpoint, kind, device), kind, device), backend=backend).prefill("a", prompt, 20).cpu()
        for make, backend in ((TritonDecoder, TritonAttention(device)), (Decoder, TorchAttention()))
    )
    errors = [float((found - truth).square().mean().sqrt()) for found in (ours, theirs)]
    assert errors[0] <= errors[1] * (1.5 if device.type == "cuda" or dtype == "float16" else 4)


def test_the_self_test_finds_a_product_that_depends_on_its_batch(load_small, monkeypatch, device):
    model = load_small("llama")
    assert model.numerics_probe() == (True, "")
    plain = InvariantLinear.__call__
    monkeypatch.setattr(InvariantLinear, "__call__", lambda self, x: plain(self, x) * (1 + 1e-6 * (len(x) == 1)))
    assert model.numerics_probe() == (True, ""), "it is asked once"
    ok, reason = batch_probe(model, TritonAttention(device), length=6, mates=2)
    assert not ok
    assert reason == "on this device a token's result depends on its batch: among the last 1 it is another than in its prompt"
    monkeypatch.setattr(InvariantLinear, "__call__", lambda self, x: plain(self, x) * (1 + 1e-6 * (len(x) == 3)))
    ok, reason = batch_probe(model, TritonAttention(device), length=2, mates=2)
    assert not ok
    assert "beside 2 other requests" in reason


def test_without_invariance_it_says_so_and_gives_the_same_to_rounding(small, load_small, paged, tokens, device):
    checkpoint = small("gemma3")
    free = TritonDecoder(*config_and_weights(checkpoint, torch.float32, device), torch.float32, device, invariant=False)
    assert (free.spec.lossless, free.spec.lossless_reason) == (False, GPU_IS_OFF)
    assert not free.kv_layout(4).invariant
    kept = load_small("gemma3")
    assert (kept.spec.lossless, kept.spec.lossless_reason, kept.kv_layout(4).invariant) == (True, "", True)
    prompt = tokens(9, seed=5, vocab=VOCAB)
    truth = checkpoint.truth(prompt)
    found = paged(free, backend=TritonAttention(device, invariant=False)).prefill("a", prompt, 9)
    assert float((found.cpu() - truth).abs().max()) <= limit(truth)
    on_torch = Decoder(
        *config_and_weights(checkpoint, torch.float32, device),
        torch.float32,
        device,
        CublasLinears(torch.float32),
        invariant=False,
    )
    assert on_torch.spec.lossless_reason == GPU_IS_OFF


def test_what_stands_between_two_products_is_one_kernel(load_small, paged, tokens, monkeypatch, device):
    """Norms on both sides of the residual sum, and of heads before they are turned, are no launches of their own."""
    started, plain = Counter(), elementwise.launch
    monkeypatch.setattr(
        elementwise, "launch", lambda kernel, *of, **to: started.update([kernel.fn.__name__]) or plain(kernel, *of, **to)
    )
    paged(load_small("gemma3"), backend=TritonAttention(device)).prefill("a", tokens(3, seed=1, vocab=VOCAB), 3)
    each = {"embed": 1, "rms_norm": 1, "rope": 2, "norm_add_norm": 4, "gated": 2}
    assert started == {f"{name}_kernel": count for name, count in each.items()}


def test_a_tied_model_has_its_embedding_once(load_small):
    model = load_small("qwen3")
    assert model.config.tied
    assert model.embedding.weight.data_ptr() == model.head.weight.data_ptr()


def test_angles_are_made_once_for_the_longest_request(load_small, paged, device):
    model = load_small("llama", max_model_len=10)
    assert model.spec.max_model_len == 10
    assert [len(cos) for cos, _ in model._rope_rows.values()] == [320]  # 10 + SLACK, in whole pieces
    engine = paged(model, backend=TritonAttention(device))
    engine.lengths["a"], engine.tables["a"] = 10 + SLACK, list(range(80))
    with pytest.raises(ValueError, match="a context of 267 tokens: this model was loaded for 10"):
        engine.hidden({"a": [1]})
    assert model.capturable
    assert not load_small("qwen3-moe").capturable


def test_rows_of_media_go_in_as_in_the_plain_decoder(load_small, small, paged, device):
    """None of the Triton decoder's own steps knows of them."""
    tokens, media = [3, 17, 5, 99, 4, 31, 8], MediaRows(torch.tensor([1, 2], device=device), torch.ones(2, 64, device=device))
    models = [load_small("gemma3"), load(resolve(str(small("gemma3").path)), "float32", device, "torch", batch_invariant="on")]
    assert models[0].capturable
    found = []
    for model in models:
        model.take_media(looks_ahead=True)
        forward = model.forward
        model.forward = lambda batch, *more, run=forward: run(dataclasses.replace(batch, media=media), *more)
        found.append(paged(model, backend=TorchAttention()).step({"a": tokens})["a"])
        assert model.kv_layout(16).looks_ahead
    assert not models[0].capturable
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    text = paged(load_small("gemma3"), backend=TorchAttention()).step({"a": tokens})["a"]
    assert float((text[-1] - found[0][-1]).abs().max()) > 0.01, "the rows did not matter"
