"""From a resolved model to one that runs: picks the decoder or the fallback, reads the weights by memory map, casts them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog
import torch

from ..errors import ModelError
from .decoder import Decoder
from .families import decoder_config
from .linears import ModelToLoad
from .mapped import release_pages
from .media_config import is_multimodal, text_names
from .sizing import resolve_dtype, weight_files

if TYPE_CHECKING:
    from .base import CausalModel
    from .config import DecoderConfig
    from .gguf_packed import PackedFile
    from .linears import ChooseLinears, Linears, PackedMatrix, Stored
    from .media import MediaCheckpoint
    from .resolve import ResolvedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Kernels = Literal["auto", "cpu", "torch"]
IGNORED = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Ends of names of tensors that old checkpoints hold and nobody reads: buffers, computed anew."""

log = structlog.get_logger(__name__)


def load(
    resolved: ResolvedModel,
    dtype: str = "auto",
    device: str = "cpu",
    kernels: Kernels = "auto",
    choose: ChooseLinears | None = None,
) -> CausalModel:
    """The model with its weights; dtype is "auto", "float32" or "bfloat16". Raises ModelError, naming model and reason.

    kernels: "cpu" raises where the C++ kernels can't run the model, "auto" takes torch there. The log says which it became. choose:
    who makes the matrix products; None, or its None: core."""
    model = describe(resolved, dtype, device, kernels)
    linears = choose(model) if choose else None
    chosen, where = DTYPES[model.dtype], torch.device(device)
    if model.config is None:
        if linears is not None:
            raise ModelError(f"{model.name} can't be run with other matrix products than its own: {model.no_cpu_kernels}")
        _log_kernels(resolved, kernels, model.no_cpu_kernels)
        from .fallback import load_fallback

        return load_fallback(resolved, chosen, where)
    decoder = _load_decoder(resolved, model.config, chosen, where, kernels, model.no_cpu_kernels, linears)
    decoder.beside = media_checkpoint(resolved, model.config.hidden_size, chosen, where)
    return decoder


def media_checkpoint(
    resolved: ResolvedModel, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> MediaCheckpoint | None:
    """What there is beside the text part of a multimodal checkpoint, whose decoder is `hidden_size` wide; None for any other."""
    if resolved.gguf is not None or not is_multimodal(resolved.config):
        return None
    from .media import MediaCheckpoint

    return MediaCheckpoint(
        name=resolved.name,
        path=resolved.path,
        config=resolved.config,
        dtype=dtype,
        device=device,
        hidden_size=hidden_size,
        tensors=lambda: Checkpoint(weight_files(resolved.path), resolved.name, dtype, device, text_only=True).others(),
    )


def describe(resolved: ResolvedModel, dtype: str = "auto", device: str = "cpu", kernels: Kernels = "auto") -> ModelToLoad:
    """What the holder of the slot "quantization" is asked about. Reads no weights."""
    name = resolve_dtype(resolved, dtype)
    config = decoder_config(resolved.config, resolved.name)
    return ModelToLoad(
        name=resolved.name,
        config=config,
        dtype=name,
        no_cpu_kernels=_no_cpu_kernels(config, DTYPES[name], device, kernels),
        read_formats=None if resolved.gguf is None else lambda: _formats(resolved),
    )


def _formats(resolved: ResolvedModel) -> dict[str, Stored]:
    from .gguf_packed import PackedFile

    return PackedFile(resolved).stored()


def _no_cpu_kernels(config: DecoderConfig | None, dtype: torch.dtype, device: str, kernels: Kernels) -> str:
    if config is None:
        return "it runs through transformers"
    if kernels == "torch":
        return "model.kernels is torch"
    from .cpu_decoder import unsupported

    return unsupported(config, dtype, torch.device(device))


def load_decoder(
    resolved: ResolvedModel, config: DecoderConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels = "torch"
) -> Decoder:
    return _load_decoder(resolved, config, dtype, device, kernels, _no_cpu_kernels(config, dtype, device.type, kernels), None)


def _load_decoder(
    resolved: ResolvedModel,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    reason: str,
    linears: Linears | None,
) -> Decoder:
    make = Decoder
    if linears is not None and not linears.fused and not reason:
        reason = "the plugin's matrix products are not theirs"
    if not reason:
        from .cpu_decoder import CpuDecoder

        make = CpuDecoder
    _log_kernels(resolved, kernels, reason)
    try:
        checkpoint = _open(resolved, dtype, device, linears)
        model = make(config, checkpoint, dtype, device, linears)
    except ValueError as error:  # sizes that fit neither each other nor the config
        raise ModelError(f"{resolved.name} can't be loaded: {error}") from error
    checkpoint.check_all_read(tied=config.tied)
    release_pages(checkpoint.files)
    return model


def _open(
    resolved: ResolvedModel, dtype: torch.dtype, device: torch.device, linears: Linears | None
) -> Checkpoint | PackedFile:
    if resolved.gguf is None:
        multimodal = is_multimodal(resolved.config)
        return Checkpoint(weight_files(resolved.path), resolved.name, dtype, device, text_only=multimodal)
    if linears is not None and linears.reads_packed:
        from .gguf_packed import PackedFile

        return PackedFile(resolved, dtype)
    from .gguf_file import weights

    return Checkpoint([weights(resolved.gguf, dtype)], resolved.name, dtype, device)


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
    """The tensors of some safetensors files, mapped into memory. text_only: the text part of a multimodal model's, by the names that a
    text model's would have; the tower's tensors are nobody's to read here."""

    def __init__(
        self, files: list[Path], name: str, dtype: torch.dtype, device: torch.device, *, text_only: bool = False
    ) -> None:
        from safetensors import SafetensorError, safe_open

        self.files = files
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
        self._names = text_names(self._where) if text_only else {key: key for key in self._where}
        """The files' names by ours."""
        self._unread = set(self._names)

    def get(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype, on its device. May share the mapped file's memory: not to be written."""
        stored = self._names.get(name)
        if stored is None:
            raise ModelError(f"{self._name} can't be loaded: its checkpoint has no tensor {name}")
        self._unread.discard(name)
        tensor = self._where[stored].get_tensor(stored)
        if not tensor.is_floating_point():
            raise ModelError(f"{self._name} can't be loaded: tensor {name} is {tensor.dtype}, not floating point")
        return tensor.to(self._device, self._dtype)

    def others(self) -> dict[str, torch.Tensor]:
        """What is not of the text part, by the files' names; floating point in the model's dtype. May share the mapped files' memory."""
        names = self._where.keys() - set(self._names.values())
        found = {name: self._where[name].get_tensor(name) for name in sorted(names)}
        return {name: t.to(self._device, self._dtype if t.is_floating_point() else t.dtype) for name, t in found.items()}

    def packed(self, name: str) -> PackedMatrix:
        raise ModelError(f"{self._name} can't be loaded: {name} was asked for packed, but is not read from a GGUF file")

    def check_all_read(self, *, tied: bool) -> None:
        """ModelError when a tensor was left over: the checkpoint holds something that would be ignored in silence."""
        check_all_read(self._unread, self._name, tied=tied)


def check_all_read(unread: set[str], model: str, *, tied: bool) -> None:
    left = {n for n in unread if not n.endswith(IGNORED) and not (tied and n == "lm_head.weight")}
    if left:
        raise ModelError(f"{model} can't be run: its checkpoint holds {min(left)} ({len(left)} tensors unknown to us)")
