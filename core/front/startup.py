"""What start-up took, and what it found: the table that `tokenbus serve` prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..columns import columns
from ..config import Config
from ..device import device_kind
from ..errors import ConfigError, NotFoundError
from ..host import PluginHost, Switches
from ..messages import EngineInfo
from .features import shared_reason

TICKS_PER_SECOND = 100.0
"""USER_HZ, the unit in which Linux shows a process's start, whatever the kernel's own rate."""


def process_start() -> float:
    """Unix seconds at which this process was created; now, where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
        return time.time() - (uptime - float(fields[19]) / TICKS_PER_SECOND)
    except (OSError, ValueError, IndexError):
        return time.time()


def check_client_features(names: Iterable[str], host: PluginHost) -> None:
    """ConfigError for a name in `server.client_features` that a request could never switch."""
    for name in names:
        try:
            host.known(name)
        except NotFoundError as error:
            raise ConfigError(f"server.client_features: {error.message}") from None
        if (reason := shared_reason(host, name)) is not None:
            raise ConfigError(f"server.client_features: {name!r} {reason}: leave it out")


def check_pool(config: Config, host: PluginHost, switches: Switches) -> None:
    """ConfigError when the pool that was asked for is larger than what is free, before any weights are loaded. The engine looks again, and
    alone when a plugin may have changed the sizes of weights or K/V, the checkpoint is quantised, or the model runs on a GPU, whose memory
    the front keeps out of."""
    if (config.cache.num_blocks is None and config.cache.kv_memory_mb is None) or device_kind(config.model.device) != "cpu":
        return
    if any(host.info(name).scope == "engine" and not host.info(name).lossless for name in switches.on):
        return
    from ..kv.sizing import free_memory, plan
    from ..models.media_config import quantization_of
    from ..models.resolve import resolve
    from ..models.sizing import model_size

    resolved = resolve(config.model.model)
    if quantization_of(resolved.config, resolved.name):
        return
    size = model_size(resolved, config.model.dtype)
    if (free := free_memory() - size.weights_bytes) > 0:
        plan(free, size.kv_bytes_per_token, size.weights_bytes, config.cache, size.max_model_len)


class Phases:
    """Parts of start-up and their seconds. Those of the front and those of the engine overlap."""

    def __init__(self) -> None:
        self.began = process_start()
        self.seconds: dict[str, float] = {"front: interpreter, first imports": time.time() - self.began}

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - before

    def print_report(self, info: EngineInfo, address: str) -> None:
        total = time.time() - self.began
        taken = {**self.seconds, **{f"engine: {name}": seconds for name, seconds in info.phases.items()}}
        lines = columns([("phase", "seconds"), *((name, f"{seconds:.2f}") for name, seconds in taken.items())], numbers=True)
        lines += ["", *memory_lines(info), "", f"ready in {total:.1f} s: {info.model} ({info.dtype}) at {address}"]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


def memory_lines(info: EngineInfo) -> list[str]:
    pool = info.num_blocks * info.block_size
    return [
        f"weights          {info.weights_bytes / 2**20:.1f} MiB",
        f"KV per token     {info.kv_bytes_per_token / 2**10:.1f} KiB",
        f"KV pool          {pool} tokens, {pool * info.kv_bytes_per_token / 2**20:.1f} MiB",
        f"longest request  {info.max_model_len} tokens",
        f"concurrency      {pool / info.max_model_len:.1f} requests of that length",
    ]
