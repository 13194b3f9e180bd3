from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # engine_fakes, also for engine processes started by these tests

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 128, 32, 64, 4, 2, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": 2, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": DIM, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers: 128 tokens, sequences of 512, with a tokenizer."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny-llama")
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return 0.3 * torch.randn(*shape, generator=generator)

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": random(HEADS * DIM, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * DIM, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * DIM),
            prefix + "mlp.gate_proj.weight": random(INNER, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INNER, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INNER),
        }
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _tokenizer() -> Any:
    """Three control tokens, then those of printable ASCII, and words up to the end of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(0x21, 0x7F)), "Ġ"]
    merges = [(a, b) for a in "aeiou" for b in "dnrst"]
    pieces += [a + b for a, b in merges]
    pieces += [f"<{index}>" for index in range(VOCAB - len(pieces))]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    return made
