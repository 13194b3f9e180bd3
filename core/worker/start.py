"""What a runner does once, while it loads: the model, models beside it, what memory is left, which promises of the settings hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from ..config import Config
from ..contexts import Vocabulary
from ..device import resolve_device
from ..errors import ConfigError, plain_text
from ..models.base import CausalModel
from ..models.linears import ChooseLinears
from .device import Device, out_of_memory
from .side import Beside
from .vocabulary import LazyVocabulary

if TYPE_CHECKING:
    from .attention import AttentionBackend, KVLayout
    from .plugins import WorkerPlugins

ModelLoader = Callable[[Config, ChooseLinears], tuple[str, CausalModel]]
"""Gives the model's name and the loaded model; raises ModelError."""


def load_model(config: Config, choose: ChooseLinears | None) -> tuple[str, CausalModel]:
    from ..models.loader import load
    from ..models.resolve import resolve

    settings = config.model
    resolved, device = resolve(settings.model), resolve_device(settings.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment or a plugin has set
    model = load(
        resolved,
        settings.dtype,
        device,
        settings.kernels,
        choose,
        batch_invariant=settings.batch_invariant,
        max_model_len=settings.max_model_len,
    )
    return resolved.name, model


def load_sides(
    config: Config,
    plugins: WorkerPlugins,
    name: str,
    model: CausalModel,
    layout: KVLayout,
    vocabulary: Callable[[], Vocabulary],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Make and load the models that plugins run beside the served one. Raises ModelError and what the plugins raise."""

    def at(path: str) -> Config:
        return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=path))

    plugins.make_sides(name, config.model.dtype, layout.block_size, layout.device.type)
    beside = Beside(
        spec=model.spec,
        layout=layout,
        vocabulary=vocabulary,
        logits=head,
        load=lambda path: load_model(at(path), choose=None)[1],
        vocabulary_of=lambda path, spec: LazyVocabulary(path, lambda: spec)(),
        attention=plugins.attention_beside,
    )
    for side in plugins.sides:
        side.load(beside)


def check_graphs(config: Config, device: Device, model: CausalModel, attention: AttentionBackend) -> None:
    """ConfigError when graphs were asked for and can't be had."""
    if config.model.cuda_graphs != "on":
        return
    if not device.graphs:
        raise ConfigError('model.cuda_graphs is "on": only a GPU has them; "auto" uses them where they are')
    for what, has in ((f"the model ({type(model).__name__})", model), (f"attention backend {attention.name!r}", attention)):
        if not has.capturable:
            raise ConfigError(f'model.cuda_graphs is "on", and {what} can\'t be recorded in a graph; use "auto" or "off"')


def free_bytes(config: Config, device: Device, model: CausalModel, layout: KVLayout, attention: AttentionBackend) -> int:
    """What is free for the cache; room is left for the largest step where memory is counted. ConfigError when even that has none."""
    if not device.counts_memory:
        return device.free_bytes()
    from .peak import reserve

    graphs = config.model.cuda_graphs != "off" and model.capturable and attention.capturable
    budget = config.scheduler.token_budget
    try:
        needed = reserve(device, model, layout, attention, config.scheduler, graphs=graphs)
    except Exception as error:
        if not out_of_memory(error):
            raise
        raise ConfigError(
            f"beside the weights there is no memory for a step of scheduler.token_budget = {budget} tokens, even without K/V: lower it, "
            f"or free memory on the GPU ({plain_text(error)})"
        ) from error
    return max(0, device.free_bytes() - needed)
