"""Models to try things on: one that is small enough for every combination, and copies of others with fewer layers."""

from __future__ import annotations

import json
import re
import shutil
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


def truncate(model: str, layers: int, folder: Path) -> Path:
    """A copy of a model of the Llama family with its first `layers` layers, its head and its tokenizer, in `folder`, which is returned: a
    draft model that needs no training, and drafts as well as such a one can."""
    import torch
    from safetensors.torch import load_file, save_file

    from ..models.gguf_file import weights
    from ..models.resolve import resolve
    from ..models.sizing import weight_files

    resolved = resolve(model)
    for path in resolved.path.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}), encoding="utf-8")
    files = weight_files(resolved.path) if resolved.gguf is None else [weights(resolved.gguf, torch.bfloat16)]
    tensors = {
        name: tensor
        for path in files
        for name, tensor in load_file(path).items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < layers
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
