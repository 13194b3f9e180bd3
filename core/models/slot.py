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
    """The answer of the slot "quantization"; None when nobody holds it. The plugins are loaded. ModelError when the holder can't serve
    the model, PluginLoadError when it raises."""
    holder = host.holder("quantization", on)
    if holder is None:
        return None
    try:
        answer = host.table(frozenset({holder})).first("quantization", model=model)
    except PluginError as error:
        raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
    if answer is None or isinstance(answer, Refusal):
        raise _refused(model.name, holder, "quantization", answer)
    return answer


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


def choose_sides(host: PluginHost, residents: Iterable[str], model: str, dtype: str, block_size: int) -> list[SideModel]:
    """What the plugins run beside the model; nothing of it is loaded. dtype: the setting. Raises as `choose_linears` does."""
    from .resolve import resolve
    from .sizing import model_size

    sides = []
    for impl in host.table(frozenset(residents)).side_model:
        try:
            answer = impl(model=model, block_size=block_size, size_of=lambda path: model_size(resolve(path), dtype))
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
            raise PluginLoadError(error.message, plugin=error.plugin, hook=error.hook) from error
        if isinstance(answer, Refusal):
            raise _refused(checkpoint.name, impl.plugin, "media_encoder", answer)
        if answer is not None:
            return answer
    return None


def _refused(model: str, plugin: str, hook: str, answer: Refusal | None) -> ModelError:
    reason = "it does not say why" if answer is None else answer.reason
    return ModelError(f"{model} can't be run with {plugin}: {reason}", plugin=plugin, hook=hook)
