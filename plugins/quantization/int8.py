"""`quantization.int8`: weights int8 with a scale per output, activations int8 with a scale per row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...core.plugin import Plugin, PluginInfo, hookimpl
from .checks import no_kernels

if TYPE_CHECKING:
    from ...core.models.linears import Linears, ModelToLoad, Refusal


class Int8Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keep: tuple[str, ...] = ("down_proj",)
    """Ends of names of matrices that stay in the model's dtype ("layers.0.mlp.down_proj", "lm_head"). What enters a down projection has
    outliers that no change of the weights removes."""


class Int8(Plugin):
    info = PluginInfo(
        name="quantization.int8",
        summary="int8 weights (a scale per output) and activations (a scale per row) in matrix products",
        scope="engine",
        lossless=False,
        slot="quantization",
    )
    Settings = Int8Settings
    settings: Int8Settings

    @hookimpl
    def quantization(self, model: ModelToLoad) -> Linears | Refusal:
        from ...core.models.linears import Refusal
        from ...core.models.sizing import matrices

        config = model.config
        if config is None or no_kernels(model):
            return Refusal(no_kernels(model))
        names = [name for matrix in matrices(config) for name in matrix.names]
        if unknown := [end for end in self.settings.keep if not end or not any(name.endswith(end) for name in names)]:
            return Refusal(f"its setting `keep` names {unknown[0]!r}, and no matrix of the model ends so")
        if model.triton:
            from .int8_triton import int8_linears

            return int8_linears(model, config, self.settings.keep)
        from .int8_linears import Int8Linears

        return Int8Linears(config, model.dtype, self.settings.keep)
