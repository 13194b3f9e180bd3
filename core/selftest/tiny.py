"""Models to try things on: one small enough for every combination, with a tokenizer as small, and copies of others with fewer layers."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path

END = 7
VOCAB = 256
_OTHER_BYTES = (*range(0x80, 0xC0), 0xC2, 0xC3, 0xC4, 0xC5, 0xE2, 0xE3, 0xF0, 0xF1)
"""Bytes beyond ASCII that have a token: those that continue a character, and a few that begin one."""


def make_tiny(folder: Path) -> Path:
    """A random Llama whose attention is peaked, so that every effect on a logit shows. Saved in `folder`, which is returned."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=END,
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
    make_tokenizer(folder / "tokenizer.json")
    return folder


def make_tokenizer(path: Path) -> None:
    """Byte-level BPE: id N is the byte N up to 127, but for the end token; then other bytes, then pairs of characters."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from ..front.token_bytes import byte_alphabet

    spelled = {byte: char for char, byte in byte_alphabet().items()}
    vocabulary = {spelled[byte]: byte for byte in range(128) if byte != END} | {"<end>": END}
    for byte in _OTHER_BYTES:
        vocabulary[spelled[byte]] = len(vocabulary)
    letters = [spelled[byte] for byte in b"etaoinsr"]
    pairs = [(first, second) for first in (*letters[:6], spelled[ord(" ")]) for second in letters]
    merges = pairs[: VOCAB - len(vocabulary)]
    vocabulary |= {first + second: len(vocabulary) + index for index, (first, second) in enumerate(merges)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    path.write_text(json.dumps(json.loads(tokenizer.to_str())), encoding="utf-8")


def truncate(model: str, layers: int | None, folder: Path, noise: float = 0.0) -> Path:
    """A copy of a model of the Llama family with its first `layers` layers (None: all), its head and its tokenizer, in `folder`, which is
    returned: a draft model that needs no training. noise: normal, relative to a matrix's own spread; with all layers and a little of it
    the copy is often right and sometimes wrong."""
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
    kept: int = config["num_hidden_layers"] if layers is None else layers
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": kept}), encoding="utf-8")
    files = weight_files(resolved.path) if resolved.gguf is None else [weights(resolved.gguf, torch.bfloat16)]
    tensors = {
        name: tensor
        for path in files
        for name, tensor in load_file(path).items()
        if not (layer := re.match(r"model\.layers\.(\d+)\.", name)) or int(layer[1]) < kept
    }
    if noise:
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                draw = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * noise
                tensors[name] = (tensor.float() + draw).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
