"""From a resolved model to one that runs: picks the decoder or the fallback, reads the weights by memory map, casts them.

On a GPU each tensor goes there as it is read: the host holds one at a time, beside pages of the file that the system can drop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog
import torch

from ..device import batch_invariant as invariance
from ..device import resolve_device
from ..errors import ConfigError, ModelError
from .decoder import Decoder
from .families import decoder_config
from .linears import ModelToLoad, Tensor, own_spelling
from .mapped import release_pages
from .media_config import is_multimodal, quantization_of, spellings, text_names, without_quantization
from .sizing import read_header, resolve_dtype, tower_heads, weight_files

if TYPE_CHECKING:
    from .base import CausalModel
    from .config import DecoderConfig
    from .gguf_packed import PackedFile
    from .linears import ChooseLinears, Linears, PackedMatrix, Stored
    from .media import MediaCheckpoint
    from .resolve import ResolvedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Kernels = Literal["auto", "cpu", "torch", "triton"]
Invariance = Literal["auto", "on", "off"]
IGNORED = ("rotary_emb.inv_freq", ".masked_bias", ".attention.bias")
"""Ends of names of tensors that old checkpoints hold and nobody reads: buffers, computed anew."""

log = structlog.get_logger(__name__)


def load(
    resolved: ResolvedModel,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = "auto",
    choose: ChooseLinears | None = None,
    *,
    batch_invariant: Invariance = "auto",
    max_model_len: int | None = None,
) -> CausalModel:
    """The model with its weights, on the device. Settings as in [model]. Raises ModelError, naming model and reason, and ConfigError for
    settings that contradict each other.

    kernels: "cpu" and "triton" raise where those can't run the model, "auto" takes torch there. The log says which it became. choose:
    who makes the matrix products; None, or its None: core. max_model_len: of the longest request, where it is less than the model's."""
    where = torch.device(device)
    if where.type == "cuda" and where.index is None:  # tensors that are there say which one
        where = resolve_device("cuda")
    model = describe(resolved, dtype, where, kernels, batch_invariant)
    linears = choose(model) if choose else None
    chosen = DTYPES[model.dtype]
    if model.method and linears is None:
        raise ModelError(f"{model.name} can't be run here: its weights are quantised ({model.method})")
    if model.config is None:
        if linears is not None:
            raise ModelError(f"{model.name} can't be run with other matrix products than its own: {model.no_cpu_kernels}")
        reason = "it runs through transformers"
        _log_kernels(resolved, kernels, Choice("torch", {"cpu": reason, "triton": reason}), where)
        from .fallback import load_fallback

        found = load_fallback(resolved, chosen, where, invariant=model.invariant)
    else:
        choice = _choose_kernels(model.config, chosen, where, kernels)
        found = _load_decoder(resolved, model.config, chosen, where, kernels, choice, linears, model.invariant, max_model_len)
        found.beside = media_checkpoint(resolved, model.config.hidden_size, chosen, where)
    if batch_invariant == "on" and not found.spec.lossless:
        raise ModelError(f"{model.name} can't be run with model.batch_invariant = on: {found.spec.lossless_reason}")
    return found


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
        config=without_quantization(resolved.config),
        dtype=dtype,
        device=device,
        hidden_size=hidden_size,
        tensors=lambda: _tower(resolved, dtype, device),
    )


def _tower(resolved: ResolvedModel, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    tower_heads(resolved)  # raises ModelError for a quantised one
    return Checkpoint(weight_files(resolved.path), resolved.name, dtype, device, text_only=True).others()


def describe(
    resolved: ResolvedModel,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    kernels: Kernels = "auto",
    batch_invariant: Invariance = "auto",
) -> ModelToLoad:
    """What the holder of the slot "quantization" is asked about. Reads no weights. Raises as `load` does."""
    where = torch.device(device)
    if kernels == "cpu" and where.type != "cpu":
        raise ConfigError(
            "model.kernels = cpu runs on the CPU, and the model is on a GPU: set model.device = cpu, or model.kernels = auto"
        )
    name = resolve_dtype(resolved, dtype, where.type)
    config = decoder_config(resolved.config, resolved.name)
    choice = Choice("torch") if config is None else _choose_kernels(config, DTYPES[name], where, kernels)
    multimodal = is_multimodal(resolved.config)
    elsewhere = "its text part is none that core's decoder knows" if multimodal else "it runs through transformers"
    return ModelToLoad(
        name=resolved.name,
        config=config,
        dtype=name,
        no_cpu_kernels=elsewhere if config is None else choice.missing.get("cpu", ""),
        read_formats=None if resolved.gguf is None else lambda: _formats(resolved),
        read_heads=None if resolved.gguf is not None else lambda: _heads(resolved),
        quantization=quantization_of(resolved.config, resolved.name),
        device=where.type,
        triton=choice.kind == "triton",
        invariant=invariance(batch_invariant, where.type),
        spellings=spellings if multimodal else own_spelling,
    )


def _heads(resolved: ResolvedModel) -> dict[str, Tensor]:
    """By a text model's names, if it is the text part of a multimodal checkpoint."""
    heads = {name: t for path in weight_files(resolved.path) for name, t in read_header(path).items()}
    names = text_names(heads) if is_multimodal(resolved.config) else {name: name for name in heads}
    return {name: Tensor(heads[stored]["dtype"], tuple(heads[stored]["shape"])) for name, stored in names.items()}


def _formats(resolved: ResolvedModel) -> dict[str, Stored]:
    from .gguf_packed import PackedFile

    return PackedFile(resolved).stored()


@dataclass(frozen=True)
class Choice:
    """What a decoder's layers run on."""

    kind: Literal["cpu", "torch", "triton"]
    missing: Mapping[str, str] = field(default_factory=dict)
    """Why not on other kernels, by their name; nothing about those that nobody asked about."""


def _choose_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels) -> Choice:
    if kernels == "torch":
        return Choice("torch", {"cpu": "model.kernels is torch"})
    if kernels == "triton" or (kernels == "auto" and device.type != "cpu"):
        from .triton_support import unsupported as no_triton_for

        others = {"cpu": "they do not run on a GPU" if device.type != "cpu" else "model.kernels is triton"}
        reason = no_triton_for(config, dtype, device)
        return Choice("torch", {**others, "triton": reason}) if reason else Choice("triton", others)
    from .cpu_decoder import unsupported

    reason = unsupported(config, dtype, device)
    return Choice("torch", {"cpu": reason}) if reason else Choice("cpu")


def load_decoder(
    resolved: ResolvedModel, config: DecoderConfig, dtype: torch.dtype, device: torch.device, kernels: Kernels = "torch"
) -> Decoder:
    choice = _choose_kernels(config, dtype, device, kernels)
    return _load_decoder(resolved, config, dtype, device, kernels, choice, None, invariant=True, max_len=None)


def _load_decoder(
    resolved: ResolvedModel,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
    choice: Choice,
    linears: Linears | None,
    invariant: bool,
    max_len: int | None,
) -> Decoder:
    if choice.kind == "cpu" and linears is not None and not linears.fused:
        choice = Choice("torch", {"cpu": "the plugin's matrix products are not theirs"})
    _log_kernels(resolved, kernels, choice, device)
    make: Callable[..., Decoder] = Decoder
    if choice.kind == "cpu":
        from .cpu_decoder import CpuDecoder

        make = CpuDecoder
    elif choice.kind == "triton":
        from .triton_decoder import TritonDecoder

        make = partial(TritonDecoder, max_len=max_len)
    elif linears is None and not invariant:
        from .triton_linears import CublasLinears

        linears = CublasLinears(dtype)
    try:
        checkpoint = _open(resolved, dtype, device, linears)
        model = make(config, checkpoint, dtype, device, linears, invariant=invariant)
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

        return PackedFile(resolved, dtype, device)
    from .gguf_file import weights

    return Checkpoint([weights(resolved.gguf, dtype)], resolved.name, dtype, device)


def _log_kernels(resolved: ResolvedModel, kernels: Kernels, choice: Choice, device: torch.device) -> None:
    """Say what runs the layers. ModelError if only others were asked for."""
    if kernels in ("cpu", "triton") and choice.kind != kernels:
        raise ModelError(f"{resolved.name} can't be run with model.kernels = {kernels}: {choice.missing[kernels]}")
    if choice.kind == "triton":
        log.info("kernels", model=resolved.name, kernels="triton", device=str(device))
        if device.type == "cpu":
            log.warning("kernels_interpreted", hint="TRITON_INTERPRET=1 is for tests: kernels run slowly, on the CPU")
    elif choice.kind == "torch":
        native = "cpu" if device.type == "cpu" else "triton"
        reason = choice.missing.get(native, f"model.kernels is {kernels}")
        log.info(
            "kernels", model=resolved.name, kernels="torch", reason=reason, device=str(device), threads=torch.get_num_threads()
        )
    else:
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
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ModelError(
                f"{self._name} can't be loaded: tensor {name} is {tensor.dtype}, and nothing says what it stands for"
            )
        return tensor.to(self._device).to(self._dtype)  # cast on the device, which is quicker at it

    def others(self) -> dict[str, torch.Tensor]:
        """What is not of the text part, by the files' names; floating point in the model's dtype. May share the mapped files' memory."""
        names = self._where.keys() - set(self._names.values())
        found = {name: self._where[name].get_tensor(name) for name in sorted(names)}
        return {name: t.to(self._device, self._dtype if t.is_floating_point() else t.dtype) for name, t in found.items()}

    def packed(self, name: str) -> PackedMatrix:
        raise ModelError(f"{self._name} can't be loaded: {name} was asked for packed, but is not read from a GGUF file")

    def raw(self, name: str) -> torch.Tensor | None:
        stored = self._names.get(name)
        if stored is None:
            return None
        self._unread.discard(name)
        return self._where[stored].get_tensor(stored).to(self._device)

    def check_all_read(self, *, tied: bool) -> None:
        """ModelError when a tensor was left over: the checkpoint holds something that would be ignored in silence."""
        check_all_read(self._unread, self._name, tied=tied)


def check_all_read(unread: set[str], model: str, *, tied: bool) -> None:
    left = {n for n in unread if not n.endswith(IGNORED) and not (tied and n == "lm_head.weight")}
    if left:
        raise ModelError(f"{model} can't be run: its checkpoint holds {min(left)} ({len(left)} tensors unknown to us)")
