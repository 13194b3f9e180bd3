"""`tokenbus plan-memory`: what a model would take on this machine, without loading its weights."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from ..config import Config
from ..device import free_bytes, resolve_device
from ..host import PluginHost, make_host
from ..kv.sizing import CPU_FRACTION, GPU_FRACTION, plan
from ..models.media_config import quantization_of
from ..models.resolve import ResolvedModel, resolve
from ..models.sizing import ModelSize, model_size, plain_layout, tower_bytes

if TYPE_CHECKING:
    import torch


def run(arguments: argparse.Namespace, config: Config) -> int:
    resolved = resolve(config.model.model)
    device = resolve_device(config.model.device)
    host = make_host("worker", config)
    on = host.start_switches(config.features.enable, config.features.disable).on
    size = model_size(resolved, config.model.dtype, device=device.type)
    if _may_change_sizes(host, on) or quantization_of(resolved.config, resolved.name):
        size = _with_plugins(resolved, config, device, host, on)
    longest = min(size.max_model_len, config.model.max_model_len or size.max_model_len)
    free = max(0, free_bytes(device) - size.weights_bytes - size.fixed_bytes)
    fraction = CPU_FRACTION if device.type == "cpu" else GPU_FRACTION
    memory = plan(free, size.kv_bytes_per_token, size.weights_bytes, config.cache, longest, fraction)
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": resolved.name,
                    "dtype": size.dtype,
                    "device": device.type,
                    "weights_bytes": memory.weights_bytes,
                    "free_bytes": memory.free_bytes,
                    "kv_bytes": memory.kv_bytes,
                    "kv_bytes_per_token": memory.kv_bytes_per_token,
                    "num_blocks": memory.num_blocks,
                    "block_size": memory.block_size,
                    "longest_request": memory.longest_request,
                    "concurrency": memory.concurrency,
                },
                indent=2,
            )
        )
    else:
        print(f"{resolved.name} ({size.dtype}, {device.type})\n{memory.table()}")
    return 0


def _may_change_sizes(host: PluginHost, on: frozenset[str]) -> bool:
    return any((host.info(name).scope == "engine" and not host.info(name).lossless) or host.info(name).resident for name in on)


def _with_plugins(
    resolved: ResolvedModel, config: Config, device: torch.device, host: PluginHost, on: frozenset[str]
) -> ModelSize:
    """As the worker will have it, or ModelError as it would raise it."""
    from ..models.loader import describe
    from ..models.slot import choose_layout, choose_linears, choose_sides

    host.load(on)
    settings = config.model
    model = describe(resolved, settings.dtype, device, settings.kernels, settings.batch_invariant)
    linears = choose_linears(host, on, model)
    size = model_size(resolved, settings.dtype, linears, device.type)
    layout = choose_layout(host, on, resolved.name, plain_layout(resolved, settings.dtype, device, config.cache.block_size))
    tower = tower_bytes(resolved, size.dtype) if host.table(host.residents(on)).media_encoder else 0
    sides = choose_sides(host, host.residents(on), resolved.name, settings.dtype, config.cache.block_size, device.type)
    return dataclasses.replace(
        size,
        weights_bytes=size.weights_bytes + tower + sum(side.weights_bytes for side in sides),
        kv_bytes_per_token=layout.bytes_per_token + sum(side.kv_bytes_per_token for side in sides),
        fixed_bytes=(config.cache.encoder_memory_mb << 20 if tower else 0) + sum(side.fixed_bytes for side in sides),
    )
