"""Engines of their own for the arms of one experiment: what each is started with, so that they have equal cores and equal K/V memory.

    front ──┬── engine of the control: the server's own; whoever is in no arm goes there, too
            └── an engine for each other arm

They live as long as the server, whether the experiment runs or not: cores and memory are shared out once. What can't be shared out is
refused at start with the way out, which is time slices: the arms then take turns on one engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .. import live_settings
from ..config import Config
from ..device import device_kind
from ..errors import ConfigError, TokenbusError
from ..front.media import FIELD as MEDIA
from ..host import PluginHost
from ..kv.sizing import CPU_FRACTION, MIB, free_memory
from ..worker.threads import available_cores, cores_in_order, format_cores, parse_cores
from .config import ArmConfig, ExperimentConfig

START = frozenset({"model.dtype", "model.kernels", "model.worker", "cache.block_size"})
"""Settings that an engine starts with and that may differ between arms, beside all of the scheduler's and the plugins'."""
TAKE_TURNS = 'use split = "slice": the arms then take turns on one engine'


def experiment_with_engines(config: Config) -> str | None:
    """The experiment whose arms have engines of their own. ConfigError when there are several: cores can be shared out once."""
    found = [name for name, experiment in config.experiments.items() if experiment.own_engines]
    if len(found) > 1:
        raise ConfigError(f"experiments.{found[1]}.engines: those of {found[0]!r} have engines of their own already; one can")
    return found[0] if found else None


def check_settings(name: str, arm: str, settings: Mapping[str, Any], config: Config, host: PluginHost) -> None:
    """ConfigError for a setting that engines behind one front can't differ in, or a value that it can't have."""
    where = f"experiments.{name}.arms.{arm}.settings"
    try:
        live_settings.typed(config, host, settings)
    except TokenbusError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    for setting in settings:
        if setting not in START and not setting.startswith(("scheduler.", "plugins.")):
            takes = ", ".join(sorted(START))
            raise ConfigError(
                f"{where}: {setting!r} can't differ between engines behind one front. Those that can: {takes}, scheduler.* and plugins.*"
            )
        if setting.startswith("plugins.") and setting.removeprefix("plugins.").rpartition(".")[0] in host.claimers(MEDIA):
            raise ConfigError(
                f"{where}: {setting!r} can't differ between engines behind one front: pictures and sounds are processed before a request "
                "has an arm. Set it for the whole server"
            )


def engine_configs(name: str, config: Config, host: PluginHost) -> dict[str, Config]:
    """What the engine of each arm is started with, by arm. ConfigError when the machine has not enough for all of them, or an arm
    contradicts itself. Reads the model's configuration, not its weights."""
    experiment = config.experiments[name]
    configs = {arm: _of_arm(name, arm, given, config, host) for arm, given in experiment.arms.items()}
    parts = _share_cores(name, config, experiment)
    configs = {
        arm: msgspec.structs.replace(one, model=_on_cores(one.model, *part))
        for (arm, one), part in zip(configs.items(), parts, strict=True)
    }
    cache = _share_memory(name, config, list(configs.values()))
    return {
        arm: msgspec.structs.replace(one, cache=msgspec.structs.replace(one.cache, **cache)) for arm, one in configs.items()
    }


def _of_arm(name: str, arm: str, given: ArmConfig, config: Config, host: PluginHost) -> Config:
    check_settings(name, arm, given.settings, config, host)
    made = live_settings.with_values(config, live_settings.typed(config, host, given.settings))
    on, off = ({plugin for plugin, wish in given.features.items() if wish == value} for value in (True, False))
    features = msgspec.structs.replace(
        config.features,
        enable=(*(p for p in config.features.enable if p not in off), *sorted(on)),
        disable=(*(p for p in config.features.disable if p not in on), *sorted(off)),
    )
    return msgspec.structs.replace(made, features=features)


def _share_cores(name: str, config: Config, experiment: ExperimentConfig) -> list[tuple[list[int], int]]:
    """For each arm its CPUs and its threads."""
    arms = len(experiment.arms)
    usable = cores_in_order()
    if config.model.cores is not None:
        chosen = set(parse_cores(config.model.cores))
        usable = [cpu for cpu in usable if cpu in chosen]
    each = len(usable) // arms
    worth = min(available_cores(), len(usable))  # a CPU quota may be less than the CPUs
    threads = worth // arms
    if threads < 1:
        raise ConfigError(
            f"experiments.{name}.engines: {arms} engines need {arms} cores, and {worth} may be used; {TAKE_TURNS}"
        )
    if config.model.threads is not None:
        threads = min(threads, config.model.threads)
    return [(usable[i * each : (i + 1) * each], threads) for i in range(arms)]


def _on_cores(model: Any, cores: Sequence[int], threads: int) -> Any:
    return msgspec.structs.replace(model, cores=format_cores(cores), threads=threads)


def _share_memory(name: str, config: Config, configs: Sequence[Config]) -> dict[str, int]:
    """The settings of `[cache]` that give every engine the same."""
    from ..models.resolve import resolve
    from ..models.sizing import model_size

    arms, cache, where = len(configs), config.cache, f"experiments.{name}.engines"
    if device_kind(config.model.device) != "cpu":
        raise ConfigError(f"{where}: engines of their own share out the machine's memory and cores, not a GPU's; {TAKE_TURNS}")
    sizes = [model_size(resolve(one.model.model), one.model.dtype) for one in configs]
    free = free_memory() - sum(size.weights_bytes for size in sizes)
    if free <= 0:
        raise ConfigError(f"{where}: there is no memory for the weights of {arms} engines; {TAKE_TURNS}")
    if cache.num_blocks is not None:
        if cache.num_blocks < arms:
            raise ConfigError(f"{where}: cache.num_blocks = {cache.num_blocks} can't be shared out to {arms} engines")
        return {"num_blocks": cache.num_blocks // arms}
    wanted = (
        cache.kv_memory_mb * MIB if cache.kv_memory_mb is not None else int(free * (cache.kv_memory_fraction or CPU_FRACTION))
    )
    if wanted > free:
        raise ConfigError(
            f"{where}: cache.kv_memory_mb asks for more than is free beside the weights of {arms} engines; {TAKE_TURNS}"
        )
    share = wanted // arms
    if cache.kv_memory_mb is None:  # as for one engine: never more than 256 of the longest requests need
        share = min(share, max(256 * size.max_model_len * size.kv_bytes_per_token for size in sizes))
    if share < MIB:
        raise ConfigError(f"{where}: {wanted / MIB:.1f} MiB for K/V can't be shared out to {arms} engines; {TAKE_TURNS}")
    return {"kv_memory_mb": share // MIB}
