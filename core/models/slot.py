"""Asks the plugins that are on what becomes of a model: who makes its matrix products, how its K/V is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ModelError, PluginError, PluginLoadError
from .linears import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..host import PluginHost
    from ..worker.attention import KVLayout
    from ..worker.side import SideModel
    from .linears import Linears, ModelToLoad
    from .media import MediaCheckpoint, MediaEncoder


def choose_linears(host: PluginHost, on: Iterable[str], model: ModelToLoad) -> Linears | None:
    """Of a plugin that knows how the checkpoint is quantised, else of the slot "quantization"; None: core's. The plugins are loaded.
    ModelError when one can't serve the model, or nobody can read it; PluginLoadError when one raises."""
    on = frozenset(on)
    holder = host.holder("quantization", on)
    reader, linears = _reader(host, on, model)
    if holder is None:
        return linears
    if linears is not None:
        raise ModelError(
            f"{model.name} can't be run with {holder}: its checkpoint is quantised already ({model.method or reader}), and is "
            f"run as it is by {reader}; leave {holder} off",
            plugin=holder,
            hook="quantization",
        )
    try:
        answer = host.table(frozenset({holder})).first("quantization", model=model)
    except PluginError as error:
        raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
    if answer is None or isinstance(answer, Refusal):
        raise _refused(model.name, holder, "quantization", answer)
    return answer


def _reader(host: PluginHost, on: frozenset[str], model: ModelToLoad) -> tuple[str, Linears | None]:
    """Who knows the checkpoint's format, and its products; ("", None) when it is an unquantised one."""
    for impl in host.table(on).quantized_checkpoint:
        try:
            answer = impl(model=model)
        except PluginError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        if isinstance(answer, Refusal):
            raise _refused(model.name, impl.plugin, "quantized_checkpoint", answer)
        if answer is not None:
            return impl.plugin, answer
    if not model.method:
        return "", None
    able = sorted(name for name, cls in host.catalogue.items() if hasattr(cls, "quantized_checkpoint") and name not in on)
    hint = f"; plugins that read quantised checkpoints and are off: {', '.join(able)} (--enable NAME)" if able else ""
    raise ModelError(
        f"{model.name} can't be run: its weights are quantised ({model.method}), and no plugin that is on reads them{hint}"
    )


def choose_layout(host: PluginHost, on: Iterable[str], model: str, layout: KVLayout) -> KVLayout:
    """The model's K/V layout as the plugins will have it. Raises as `choose_linears` does."""
    for impl in host.table(frozenset(on)).kv_layout:
        try:
            answer = impl(layout=layout)
        except PluginError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        if isinstance(answer, Refusal):
            raise _refused(model, impl.plugin, "kv_layout", answer)
        layout = answer or layout
    return layout


def choose_sides(
    host: PluginHost, residents: Iterable[str], model: str, dtype: str, block_size: int, device: str = "cpu"
) -> list[SideModel]:
    """What the plugins run beside the model; nothing of it is loaded. dtype: the setting. device: "cpu" or "cuda", the model's. Raises as
    `choose_linears` does."""
    from .resolve import resolve
    from .sizing import model_size

    sides = []
    for impl in host.table(frozenset(residents)).side_model:
        try:
            answer = impl(
                model=model, block_size=block_size, size_of=lambda path: model_size(resolve(path), dtype, device=device)
            )
        except PluginError as error:
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        if isinstance(answer, Refusal):
            raise _refused(model, impl.plugin, "side_model", answer)
        if answer is not None:
            sides.append(answer)
    return sides


def choose_encoder(host: PluginHost, residents: Iterable[str], checkpoint: MediaCheckpoint) -> MediaEncoder | None:
    """Who encodes what a multimodal model reads beside text; None: nobody, it reads text only. Loads the tower. Raises as
    `choose_linears` does."""
    for impl in host.table(frozenset(residents)).media_encoder:
        try:
            answer = impl(checkpoint=checkpoint)
        except PluginError as error:
            if isinstance(error.__cause__, ModelError):  # what reading the tower's tensors found
                raise error.__cause__ from None
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        if isinstance(answer, Refusal):
            raise _refused(checkpoint.name, impl.plugin, "media_encoder", answer)
        if answer is not None:
            return answer
    return None


def _refused(model: str, plugin: str, hook: str, answer: Refusal | None) -> ModelError:
    reason = "it does not say why" if answer is None else answer.reason
    return ModelError(f"{model} can't be run with {plugin}: {reason}", plugin=plugin, hook=hook)
