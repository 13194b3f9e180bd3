"""The plugin: finds the format of a checkpoint, looks whether it can be run, and says how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....core.plugin import Plugin, PluginInfo, hookimpl

if TYPE_CHECKING:
    from ....core.models.linears import Linears, ModelToLoad, Refusal
    from .formats import Format
    from .stored import Survey


class QuantizedCheckpoints(Plugin):
    info = PluginInfo(
        name="quantization.checkpoint",
        summary="runs quantised checkpoints: AWQ, GPTQ, compressed-tensors, FP8; on CPUs dequantised when loaded, but for W8A8 in int8",
        scope="engine",
        lossless=True,  # it reads what the checkpoint has; without it such a model does not run, and others are not touched
        default=True,
    )

    @hookimpl
    def quantized_checkpoint(self, model: ModelToLoad) -> Linears | Refusal | None:
        if model.quantization is None:
            return None
        from ....core.models.linears import Refusal
        from .stored import UnreadableError

        try:
            form = _format(model)
            form.spellings = model.spellings
            survey = form.survey(model.tensors)
            _check_fit(model, survey)
        except UnreadableError as error:
            return Refusal(str(error))
        if model.triton:
            from .device import device_linears

            linears = device_linears(model, form, survey)
            how = linears.ways
        else:
            from .dequantized import cpu_linears

            linears, how = cpu_linears(model, form, survey)
        schemes = sorted({str(module.scheme) for module in survey.values()})
        form.report = {"model": model.name, "method": model.method, "schemes": schemes, "runs": how}
        return linears


def _format(model: ModelToLoad) -> Format:
    """Raises UnreadableError when its settings are not known here."""
    from .awq import Awq
    from .compressed import CompressedTensors
    from .fp8 import Fp8
    from .gptq import Gptq
    from .stored import UnreadableError

    formats = {"awq": Awq, "gptq": Gptq, "compressed-tensors": CompressedTensors, "fp8": Fp8}
    config = model.quantization or {}
    if model.method not in formats:
        raise UnreadableError(f"it is quantised by {model.method!r:.40}; what can be read is {', '.join(formats)}")
    if model.config is None:
        raise UnreadableError(f"its weights are quantised ({model.method}), and {model.no_cpu_kernels}")
    return formats[model.method](config)


def _check_fit(model: ModelToLoad, survey: Survey) -> None:
    """Raises UnreadableError unless the quantised matrices are the decoder's, of its sizes."""
    from ....core.models.sizing import EMBEDDING, matrices
    from .stored import UnreadableError

    if model.config is None:
        return
    if EMBEDDING in survey:
        raise UnreadableError("its embedding is quantised")
    for matrix in matrices(model.config):
        rows = 0
        for name in matrix.names:
            found = survey.get(name)
            tensor = model.tensors.get(f"{name}.weight")
            shape = (found.rows, found.columns) if found else tensor.shape if tensor else None
            if shape is None or len(shape) != 2:
                raise UnreadableError(f"its files have no matrix {name}, quantised or not")
            if shape[1] != matrix.columns:
                raise UnreadableError(f"its {name} has {shape[1]} inputs, its config says {matrix.columns}")
            rows += shape[0]
        if rows != matrix.rows:
            raise UnreadableError(f"its {', '.join(matrix.names)} have {rows} outputs, its config says {matrix.rows}")
