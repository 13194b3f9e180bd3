"""From a resolved model to one that runs: picks the decoder or the fallback, reads the weights by memory map, casts them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog
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
Kernels = Literal["auto", "cpu", "torch"]
IGNORED = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Ends of names of tensors that old checkpoints hold and nobody reads: buffers, computed anew."""

log = structlog.get_logger(__name__)


def load(resolved: ResolvedModel, dtype: str = "auto", device: str = "cpu", kernels: Kernels = "auto") -> CausalModel:
    """The model with its weights; dtype is "auto", "float32" or "bfloat16". Raises ModelError, naming model and reason.

    kernels: "cpu" raises where the C++ kernels can't run the model, "auto" takes torch there. The log says which it became."""
    chosen, where = DTYPES[resolve_dtype(resolved, dtype)], torch.device(device)
    config = decoder_config(resolved.config, resolved.name)
    if config is None:
        _log_kernels(resolved, kernels, "it runs through transformers")
        from .fallback import load_fallback

        return load_fallback(resolved, chosen, where)
    return load_decoder(resolved, config, chosen, where, kernels)


def load_decoder(
    resolved: ResolvedModel, config: DecoderConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels = "torch"
) -> Decoder:
    make = Decoder
    reason = "model.kernels is torch"
    if kernels != "torch":
        from .cpu_decoder import CpuDecoder, unsupported

        reason = unsupported(config, dtype, device)
        if not reason:
            make = CpuDecoder
    _log_kernels(resolved, kernels, reason)
    if resolved.gguf is not None:
        from .gguf_file import weights

        files = [weights(resolved.gguf, dtype)]
    else:
        files = weight_files(resolved.path)
    checkpoint = Checkpoint(files, resolved.name, dtype, device)
    model = make(config, checkpoint, dtype, device)
    checkpoint.check_all_read(tied=config.tied)
    return model


def _log_kernels(resolved: ResolvedModel, kernels: Kernels, reason: str) -> None:
    """Say what runs the layers; reason: why not the C++ kernels, empty if they do. ModelError if only they were asked for."""
    if reason and kernels == "cpu":
        raise ModelError(f"{resolved.name} can't be run with model.kernels = cpu: {reason}")
    if reason:
        log.info("kernels", model=resolved.name, kernels="torch", reason=reason, threads=torch.get_num_threads())
        return
    from ...kernels.cpu import lib

    log.info("kernels", model=resolved.name, kernels="cpu", isa=lib.isa(), threads=torch.get_num_threads())


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
