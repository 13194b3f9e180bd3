"""The decoder on the C++ kernels against transformers' own, as tests/models does for torch's: tiny models of every dense family."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch

from tokenbus.core.errors import ModelError
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.worker.cpu_attention import CpuAttention
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.kernels.cpu import lib

from ..models.conftest import Paged, make_tiny, random_tokens
from ..models.test_families import limit

DENSE = ("llama", "llama-linear", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp("tiny"))
        return made[family]

    return get


def model_of(checkpoint, dtype="auto"):
    model = load(resolve(str(checkpoint.path)), dtype, kernels="cpu")
    assert isinstance(model, CpuDecoder)
    return model


@pytest.mark.parametrize("backend", [CpuAttention, TorchAttention])
@pytest.mark.parametrize("family", DENSE)
def test_logits_and_greedy_ids_equal_transformers(family, backend, tiny, threads):
    threads(2)
    checkpoint = tiny(family)
    engine = Paged(model_of(checkpoint), backend=backend())
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in (1, 9, 38, 61)}
    wanted = {key: checkpoint.greedy(prompt, 24) for key, prompt in prompts.items()}
    rows = {key: [engine.prefill(key, prompt, 7)] for key, prompt in prompts.items()}
    found = {key: [] for key in prompts}
    for _ in range(24):
        for key, logits in rows.items():
            found[key].append(int(logits[-1][-1].argmax()))
        for key, logits in engine.step({key: ids[-1:] for key, ids in found.items()}).items():
            rows[key].append(logits)
    assert found == wanted
    for key, prompt in prompts.items():
        truth = checkpoint.truth(prompt + found[key])
        assert float((torch.cat(rows[key]) - truth).abs().max()) <= limit(truth)


@pytest.mark.parametrize("family", DENSE)
def test_every_instruction_set(family, tiny, isa):
    checkpoint = tiny(family)
    prompt = random_tokens(48, seed=5)
    found = Paged(model_of(checkpoint), backend=CpuAttention()).prefill("a", prompt, 48)
    truth = checkpoint.truth(prompt)
    assert float((found - truth).abs().max()) <= limit(truth)


@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 4), ("bfloat16", 4), ("bfloat16", 16)])
@pytest.mark.parametrize("family", DENSE)
def test_a_row_does_not_depend_on_its_batch(family, dtype, block_size, tiny, isa, threads):
    model, backend = model_of(tiny(family), dtype), CpuAttention()
    prompt = random_tokens(53, seed=3)
    threads(1)
    alone = Paged(model, backend=backend).prefill("a", prompt, 53)
    for count in (2, 3, 4):
        threads(count)
        assert torch.equal(Paged(model, 256, block_size, backend).prefill("a", prompt, 3 * count - 1), alone)
    threads(2)
    engine = Paged(model, 256, block_size, backend)
    crowd = {f"x{i}": random_tokens(3 + i, seed=i) for i in range(9)}
    rows = [
        engine.step({**{k: t[i : i + 1] or t[:1] for k, t in crowd.items()}, "a": [token]})["a"]
        for i, token in enumerate(prompt)
    ]
    assert torch.equal(alone, torch.cat(rows))


@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_errs_no_more_than_transformers(family, tiny, threads):
    from transformers import AutoModelForCausalLM

    threads(2)
    path = str(tiny(family).path)
    eager = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(path, **eager).eval()
    exact = AutoModelForCausalLM.from_pretrained(path, **eager).eval().double()
    for name in lib.available_isas()[::-2]:  # bfloat16 products, and widened ones
        lib.use_isa(name)
        model = model_of(tiny(family), "bfloat16")
        own_error = their_error = 0.0
        for seed in range(6):
            prompt = random_tokens(48, seed=100 + seed)
            with torch.no_grad():
                truth, other = (
                    m(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].double() for m in (exact, theirs)
                )
            own = Paged(model, backend=CpuAttention()).prefill("a", prompt, 16).double()
            own_error += float((own - truth).square().mean())
            their_error += float((other - truth).square().mean())
        assert own_error**0.5 <= 1.2 * their_error**0.5, name
    lib.use_isa(lib.available_isas()[-1])


def test_many_tokens_and_many_requests_at_once(tiny, threads):
    """More rows than a task takes, few long requests beside many short ones."""
    model, backend = model_of(tiny("gemma2"), "bfloat16"), CpuAttention()
    prompts = {f"r{n}": random_tokens(n, seed=n) for n in (1, 2, 3, 250, 5, 131, 8, 1, 64)}
    threads(1)
    alone = {key: Paged(model, backend=backend).prefill(key, prompt, 300) for key, prompt in prompts.items()}
    threads(3)
    together = Paged(model, backend=backend).step(prompts)
    assert all(torch.equal(together[key], alone[key]) for key in prompts)


def test_what_torch_and_the_library_compute_is_close(tiny):
    checkpoint = tiny("qwen3")
    prompt = random_tokens(40, seed=1)
    ours = Paged(model_of(checkpoint), backend=CpuAttention()).prefill("a", prompt, 9)
    torchs = load(resolve(str(checkpoint.path)), kernels="torch")
    assert type(torchs) is Decoder
    torch.testing.assert_close(Paged(torchs).prefill("a", prompt, 9), ours, rtol=1e-4, atol=1e-4)
    assert torch.equal(
        Paged(torchs, backend=CpuAttention()).prefill("a", prompt, 9),
        Paged(torchs, backend=CpuAttention()).prefill("a", prompt, 40),
    )


def test_kernels_that_cannot_be_had(tiny, monkeypatch):
    path = str(tiny("mixtral").path)
    with pytest.raises(ModelError, match="kernels = cpu: it is a mixture of experts"):
        load(resolve(path), kernels="cpu")
    assert type(load(resolve(path))) is Decoder
    monkeypatch.setattr(lib._Loading, "done", True)
    monkeypatch.setattr(lib._Loading, "library", None)
    monkeypatch.setattr(lib._Loading, "reason", "no compiler")
    path = str(tiny("llama").path)
    with pytest.raises(ModelError, match="kernels = cpu: no compiler"):
        load(resolve(path), kernels="cpu")
    assert type(load(resolve(path))) is Decoder


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"intermediate_size": 128}, r"gate of layer 0 is \[96, 64\], not \[128, 64\]"),
        ({"num_key_value_heads": 4}, r"qkv of layer 0 is \[128, 64\], not \[192, 64\]"),
        ({"hidden_size": 32, "head_dim": 16}, r"qkv of layer 0 is \[128, 64\], not \[128, 32\]"),
        ({"vocab_size": 300}, "the embedding has 256 rows, and the vocabulary 300 tokens"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(tiny, tmp_path, changes, problem):
    """Steps would read past the ends of what was packed."""
    source = tiny("llama-linear").path
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    with pytest.raises(ModelError, match=f"can't be loaded: {problem}"):
        load(resolve(str(tmp_path)), kernels="cpu")


def test_the_probe_finds_rows_that_depend_on_their_batch(tiny, monkeypatch):
    model = model_of(tiny("llama"))
    assert model.numerics_probe() == (True, "")
    from tokenbus.kernels.cpu import probe

    monkeypatch.setattr(probe, "rms_norm", lambda x, weight, eps: x * x.shape[0])
    ok, reason = model.numerics_probe()
    assert not ok
    assert "row functions" in reason


def test_layers_are_not_shared_between_models(tiny):
    """Two decoders of different shapes in one process keep their own weights and scratch."""
    prompt = random_tokens(30, seed=2)
    engines = {f: Paged(model_of(tiny(f)), backend=CpuAttention()) for f in ("llama", "gemma3")}
    first = {f: engine.step({"a": prompt[:20]})["a"] for f, engine in engines.items()}
    rest = {f: engine.step({"a": prompt[20:]})["a"] for f, engine in engines.items()}
    for family in engines:
        whole = Paged(model_of(tiny(family)), backend=CpuAttention()).prefill("a", prompt, 30)
        assert torch.equal(torch.cat([first[family], rest[family]]), whole)
    assert dataclasses.asdict(engines["llama"].model.config)["hidden_size"] == 64


@pytest.mark.parametrize("name", [pytest.param("avx2", marks=pytest.mark.long), "avx512bf16", "amx"])
def test_the_demo_model_in_chunks_of_every_kind(name, library, threads):
    """bfloat16, real sizes: a prompt of 512 tokens at once, and in pieces around the kernels' own sizes."""
    if name not in lib.available_isas():
        pytest.skip(f"this machine has no {name}")
    before = lib.isa()
    lib.use_isa(name)
    try:
        model, backend = load(resolve("demo"), "bfloat16", kernels="cpu"), CpuAttention()
        prompt = random_tokens(512, seed=1, vocab=40000)
        whole, pieces, alone = (Paged(model, 64, 16, backend) for _ in range(3))
        threads(2)
        found = whole.hidden({"a": prompt})
        sizes = [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127]
        sizes.append(512 - sum(sizes))
        parts = torch.tensor(prompt).split(sizes)
        assert torch.equal(torch.cat([pieces.hidden({"a": part.tolist()}) for part in parts]), found)
        threads(1)
        crowd = {f"x{i}": random_tokens(2, seed=i) for i in range(31)}
        beside = alone.hidden({**crowd, "a": prompt[:40]})[-40:]
        assert torch.equal(beside, found[:40])
    finally:
        lib.use_isa(before)
