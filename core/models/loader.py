"""From a resolved model to one that runs: picks the decoder or the fallback, reads the weights by memory map, casts them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..errors import ModelError
from .decoder import Decoder
from .families import decoder_config
from .sizing import resolve_dtype, weight_files

if TYPE_CHECKING:
    from .base import CausalModel
    from .config import DecoderConfig
    from .resolve import ResolvedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IGNORED = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Ends of names of tensors that old checkpoints hold and nobody reads: buffers, computed anew."""


def load(resolved: ResolvedModel, dtype: str = "auto", device: str = "cpu") -> CausalModel:
    """The model with its weights; dtype is "auto", "float32" or "bfloat16". Raises ModelError, naming model and reason."""
    chosen = DTYPES[resolve_dtype(resolved, dtype)]
    config = decoder_config(resolved.config, resolved.name)
    if config is None:
        from .fallback import load_fallback

        return load_fallback(resolved, chosen, torch.device(device))
    return load_decoder(resolved, config, chosen, torch.device(device))


def load_decoder(resolved: ResolvedModel, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    if resolved.gguf is not None:
        from .gguf_file import weights

        files = [weights(resolved.gguf, dtype)]
    else:
        files = weight_files(resolved.path)
    checkpoint = Checkpoint(files, resolved.name, dtype, device)
    model = Decoder(config, checkpoint, dtype, device)
    checkpoint.check_all_read(tied=config.tied)
    return model


class Checkpoint:
    """The tensors of some safetensors files, mapped into memory."""

    def __init__(self, files: list[Path], name: str, dtype: torch.dtype, device: torch.device) -> None:
        from safetensors import SafetensorError, safe_open

        self._name = name
        self._dtype = dtype
        self._device = device
        self._where = {}
        for path in files:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{name} can't be loaded: {path.name}: {error}") from None
            self._where |= dict.fromkeys(handle.keys(), handle)
        self._unread = set(self._where)

    def get(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype, on its device. May share the mapped file's memory: not to be written."""
        handle = self._where.get(name)
        if handle is None:
            raise ModelError(f"{self._name} can't be loaded: its checkpoint has no tensor {name}")
        self._unread.discard(name)
        tensor = handle.get_tensor(name)
        if not tensor.is_floating_point():
            raise ModelError(f"{self._name} can't be loaded: tensor {name} is {tensor.dtype}, not floating point")
        return tensor.to(self._device, self._dtype)

    def check_all_read(self, *, tied: bool) -> None:
        """ModelError when a tensor was left over: the checkpoint holds something that would be ignored in silence."""
        left = {n for n in self._unread if not n.endswith(IGNORED) and not (tied and n == "lm_head.weight")}
        if left:
            raise ModelError(f"{self._name} can't be run: its checkpoint holds {min(left)} ({len(left)} tensors unknown to us)")
