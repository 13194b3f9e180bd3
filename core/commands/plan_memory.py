"""`tokenbus plan-memory`: what a model would take on this machine, without loading its weights."""

from __future__ import annotations

import argparse
import json

from ..config import Config
from ..kv.sizing import free_memory, plan
from ..models.resolve import resolve
from ..models.sizing import model_size


def run(arguments: argparse.Namespace, config: Config) -> int:
    resolved = resolve(config.model.model)
    size = model_size(resolved, config.model.dtype)
    longest = min(size.max_model_len, config.model.max_model_len or size.max_model_len)
    free = max(0, free_memory() - size.weights_bytes)
    memory = plan(free, size.kv_bytes_per_token, size.weights_bytes, config.cache, longest)
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": resolved.name,
                    "dtype": size.dtype,
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
        print(f"{resolved.name} ({size.dtype})\n{memory.table()}")
    return 0
