"""A model small enough to try every combination on."""

from __future__ import annotations

import warnings
from pathlib import Path


def make_tiny(folder: Path) -> Path:
    """A random Llama whose attention is peaked, so that every effect on a logit shows. Saved in `folder`, which is returned."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder)
    return folder
