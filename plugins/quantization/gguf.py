"""`quantization.gguf`: a GGUF file's matrices stay packed in memory and are multiplied as they are, with int8 activations.

The file is read in place. No dequantised copy of it is made or read, so that the model is ready sooner and takes little memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .checks import no_kernels

if TYPE_CHECKING:
    from ...core.models.config import DecoderConfig
    from ...core.models.linears import Linears, ModelToLoad, Refusal, Stored

PLAIN = frozenset({"F32", "F16", "BF16"})
"""Formats that are no quantisation: such matrices are multiplied in the model's dtype."""
MULTIPLIED_TOGETHER = {"q_proj.weight": ("k_proj.weight", "v_proj.weight"), "gate_proj.weight": ("up_proj.weight",)}
"""The same row enters them, in one form."""


class Gguf(Plugin):
    info = PluginInfo(
        name="quantization.gguf",
        summary="keeps a GGUF file's weights packed, activations int8 per 32 values (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K)",
        scope="engine",
        lossless=False,
        slot="quantization",
    )

    @hookimpl
    def quantization(self, model: ModelToLoad) -> Linears | Refusal:
        from ...core.models.linears import Refusal

        if model.stored is None:
            return Refusal("it is not a GGUF file")
        if model.config is None or no_kernels(model):
            return Refusal(no_kernels(model))
        if reason := _missing(model.config, model.stored):
            return Refusal(reason)
        if model.triton:
            return _on_triton(model)
        if reason := _unfit(model.stored):
            return Refusal(reason)
        from .packed import PackedLinears

        return PackedLinears(model)


def _on_triton(model: ModelToLoad) -> Linears | Refusal:
    from ...core.models.linears import Refusal
    from .gguf_triton import PACKED, gguf_linears

    stored = model.stored or {}
    if not any(tensor.type == PACKED for tensor in stored.values()):
        kinds = ", ".join(sorted({tensor.type for tensor in stored.values() if tensor.dims > 1}))
        return Refusal(
            f"of its formats ({kinds}) none can stay packed on a GPU, only {PACKED} can; without the plugin it runs dequantised"
        )
    return gguf_linears(model)


def _missing(config: DecoderConfig, stored: Mapping[str, Stored]) -> str:
    """The first matrix that the file does not have; empty when it has all."""
    from ...core.models.sizing import matrices

    names = (f"{name}.weight" for matrix in matrices(config) for name in matrix.names)
    return next((f"its file has no tensor {name}" for name in names if name not in stored), "")


def _unfit(stored: Mapping[str, Stored]) -> str:
    """The first matrix that can't stay packed; empty when all can."""
    from ...kernels.cpu.quantized import supported_gguf_types

    known = supported_gguf_types()
    for name, tensor in stored.items():
        if tensor.dims > 1 and tensor.type not in known | PLAIN:
            return f"its tensor {name} is {tensor.type}; what can stay packed is {', '.join(sorted(known))}"
        for first, others in MULTIPLIED_TOGETHER.items():
            if name.endswith(first):
                stem = name.removesuffix(first)
                kinds = [stored[f"{stem}{part}"].type for part in (first, *others)]
                if len({kind in PLAIN for kind in kinds}) > 1:
                    return f"its {stem}{first} and {', '.join(others)} are {', '.join(kinds)}: they can't be packed in part"
    return ""
