"""Tiny random models of every family, made with transformers, and a small paged harness to run ours with."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenbus.core.models.base import CausalModel, ForwardBatch, KVCache
from tokenbus.core.worker.attention import AttentionBackend, AttentionBatch
from tokenbus.core.worker.torch_attention import TorchAttention

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 13}
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16, "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 13, "head_dim": 24}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma": ("GemmaConfig", {"head_dim": 24, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2Config", {**GEMMA, "attn_logit_softcapping": 8.0, "final_logit_softcapping": 6.0}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 19, "partial_rotary_factor": 0.5}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 17}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
        },
    ),
    "gpt-neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.25, "hidden_act": "gelu"}),
    "gpt2": ("GPT2Config", {"num_key_value_heads": None}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
}
FALLBACK = {"gpt-neox", "gpt2", "granite", "cohere"}


class Tiny:
    """A saved checkpoint, and transformers' own model of it."""

    def __init__(self, family: str, path: Path, reference: Any) -> None:
        self.family = family
        self.path = path
        self.reference = reference

    def truth(self, tokens: list[int]) -> torch.Tensor:
        """transformers' float32 logits [n, vocab], eager attention."""
        with torch.no_grad():
            return self.reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=count,
                use_cache=True,
            )
        return out[0, len(prompt) :].tolist()


def make_tiny(family: str, folder: Path, std: float = 0.3, **changes: Any) -> Tiny:
    """Weights from a normal distribution wide enough that attention is peaked; norms about 1 (or 0 where 1 is added)."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    name, own = TINY[family]
    options = {**BASE, **own, **changes}
    if options["num_key_value_heads"] is None:
        del options["num_key_value_heads"]
    config = getattr(transformers, name)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(hash_of(family))
    for key, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1 and key.endswith("weight")
        parameter.data = parameter.data + 0.3 * noise if is_norm else noise * std
    path = folder / family
    model.save_pretrained(path)
    return Tiny(family, path, model)


def hash_of(text: str) -> int:
    return sum((i + 1) * ord(c) for i, c in enumerate(text))


class Paged:
    """Runs sequences over a paged cache with shuffled blocks, as the runner would. Returns logits of every row."""

    def __init__(
        self,
        model: CausalModel,
        num_blocks: int = 256,
        block_size: int = 4,
        backend: AttentionBackend | None = None,
        *,
        stored: Any = "",
    ) -> None:
        self.model = model
        self.size = block_size
        layout = dataclasses.replace(model.kv_layout(block_size), stored=stored)
        self.device = layout.device
        self.kv = KVCache(
            *(
                [torch.zeros(s, dtype=layout.cache_dtype, device=self.device) for s in layout.shapes(num_blocks)]
                for _ in range(2)
            )
        )
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.tables: dict[Any, list[int]] = {}
        self.lengths: dict[Any, int] = {}
        self.backend = backend or TorchAttention()

    def hidden(self, work: dict[Any, list[int]]) -> torch.Tensor:
        """One step: {sequence: new tokens}. Returns hidden states of all new tokens in order."""
        ids, positions, slots, starts, lengths, tables = [], [], [], [0], [], []
        for key, tokens in work.items():
            old = self.lengths.get(key, 0)
            table = self.tables.setdefault(key, [])
            while len(table) * self.size < old + len(tokens):
                table.append(self.free.pop())
            where = range(old, old + len(tokens))
            ids += tokens
            positions += where
            slots += [table[p // self.size] * self.size + p % self.size for p in where]
            starts.append(starts[-1] + len(tokens))
            self.lengths[key] = old + len(tokens)
            lengths.append(old + len(tokens))
            tables.append(table)
        attention = AttentionBatch(starts, lengths, tables, torch.tensor(slots, device=self.device))
        attention.prepared = self.backend.prepare(attention)
        with torch.inference_mode():
            batch = ForwardBatch(*(torch.tensor(x, device=self.device) for x in (ids, positions)), attention)
            return self.model.forward(batch, self.kv, self.backend)

    def step(self, work: dict[Any, list[int]]) -> dict[Any, torch.Tensor]:
        """One step; logits [new tokens, vocab] by sequence."""
        hidden = self.hidden(work)
        with torch.inference_mode():
            logits = self.model.logits(hidden)
        return dict(zip(work, logits.split([len(t) for t in work.values()]), strict=True))

    def prefill_hidden(self, key: Any, tokens: list[int], chunk: int) -> torch.Tensor:
        return torch.cat([self.hidden({key: tokens[i : i + chunk]}) for i in range(0, len(tokens), chunk)])

    def prefill(self, key: Any, tokens: list[int], chunk: int) -> torch.Tensor:
        return torch.cat([self.step({key: tokens[i : i + chunk]})[key] for i in range(0, len(tokens), chunk)])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tiny(family): its Tiny, made once a session."""
    return functools.cache(lambda family: make_tiny(family, tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    return Paged


@pytest.fixture(scope="session")
def remake() -> Any:
    """make_tiny, for a checkpoint with changes of its own."""
    return make_tiny


def random_tokens(count: int, seed: int = 0, vocab: int = 256) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def tokens() -> Any:
    return random_tokens


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`family` runs over all families, `decoder_family` over those of our own decoder, `fallback_family` over the others."""
    groups = {
        "family": list(TINY),
        "decoder_family": [f for f in TINY if f not in FALLBACK],
        "fallback_family": sorted(FALLBACK),
    }
    for name, values in groups.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values)
