"""Block sizes of the Triton kernels: looked up when a kernel is launched, in tables written beforehand. Nothing is tuned at start.

configs/default.json serves every device, and is complete. It is untuned: sizes that fit every card since Ampere (99 KiB of shared memory),
chosen by rule of thumb; how fast they are is not yet measured. configs/DEVICE.json, named after the device (`file_name`), comes first
for what it has. A table:

    {
        "device": "NVIDIA H200",
        "status": "tuned",
        "from": "when, with which driver, torch and triton it was measured",
        "kernels": {
            "matmul": [
                {"when": {"bits": 16, "m": 16}, "use": {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, ...}},
                {"use": {...}}
            ]
        }
    }

The first rule whose bounds all hold is used. A bound is the largest value of that dimension that the rule is for; a rule with a bound
on a dimension that the caller didn't name isn't used. `use` is what the kernel is launched with.

A kernel whose name ends in "_invariant" gives a row the same bits whatever rows are beside it. Its sums are ordered by its sizes, so no
rule of it may look at the number of rows, `m`.

Attention has three entries: "attention_invariant", "attention_decode" (the batch's longest query has few rows) and "attention_prompt". Of
it `m` is the rows of the longest query (its tokens times the query heads that share a KV head), `kv_bits` those of a cached value.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("configs")
DEFAULT = "default"
INVARIANT = "_invariant"


@dataclass(frozen=True)
class Rule:
    when: Mapping[str, int]
    """Largest value of each dimension that the rule looks at."""
    use: Mapping[str, int]

    def fits(self, shape: Mapping[str, int]) -> bool:
        return all(name in shape and shape[name] <= bound for name, bound in self.when.items())


@dataclass(frozen=True)
class Table:
    device: str
    tuned: bool
    kernels: Mapping[str, tuple[Rule, ...]]


def config(kernel: str, /, **shape: int) -> dict[str, int]:
    """Sizes to launch a kernel with on the current CUDA device: block sizes, num_warps, num_stages. A new dict.

    shape: what is known of the call: `m` rows, `n` outputs, `k` inputs, `bits` of an activation (8, 16, 32), or what else the kernel's
    rules look at. Raises ValueError for a kernel of which no table knows, and for a table that is malformed (with its name)."""
    return config_for(device_name(), kernel, **shape)


def config_for(device: str, kernel: str, /, **shape: int) -> dict[str, int]:
    """`config` for a device of that name, as torch gives it. "": the default table."""
    return dict(_find(kernel, device, tuple(sorted(shape.items()))))


def is_tuned(device: str, kernel: str) -> bool:
    """Whether the kernel's sizes were measured on a device of that name. False: they are the default ones."""
    table = load(file_name(device))
    return table is not None and table.tuned and kernel in table.kernels


@cache
def device_name() -> str:
    """Of the current CUDA device when this is first called; "" without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def file_name(device: str) -> str:
    """A device's table, without ".json": "NVIDIA H200" -> "nvidia_h200", "" -> "default"."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_") or DEFAULT


@lru_cache(maxsize=4096)
def _find(kernel: str, device: str, shape: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    known = dict(shape)
    for name in dict.fromkeys((file_name(device), DEFAULT)):
        table = load(name)
        for rule in table.kernels.get(kernel, ()) if table else ():
            if rule.fits(known):
                return rule.use
    default = load(DEFAULT)
    raise ValueError(
        f"no block sizes for a kernel {kernel!r}; there are some for {', '.join(sorted(default.kernels if default else ()))}"
    )


@cache
def load(name: str) -> Table | None:
    """The table configs/NAME.json, checked. None when there is no such file. Raises ValueError for a malformed one."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    return parse(path.read_text(encoding="utf-8"), path.name)


def parse(text: str, file: str) -> Table:
    """A table from its JSON. file: its name, for errors. Raises ValueError when it is not as the module describes it."""
    try:
        return _table(json.loads(text))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no table of block sizes: {type(error).__name__}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{file} is no table of block sizes: {error}") from error


def _table(data: Mapping[str, Any]) -> Table:
    if data["status"] not in {"tuned", "untuned"}:
        raise ValueError(f"its status is {data['status']!r}, not 'tuned' or 'untuned'")
    kernels = {kernel: tuple(_rule(kernel, rule) for rule in rules) for kernel, rules in data["kernels"].items()}
    return Table(str(data["device"]), data["status"] == "tuned", kernels)


def _rule(kernel: str, rule: Mapping[str, Any]) -> Rule:
    if unknown := set(rule) - {"when", "use"}:
        raise ValueError(f"a rule of {kernel!r} has {min(unknown)!r}; rules have 'when' and 'use'")
    when, use = dict(rule.get("when", {})), dict(rule["use"])
    if kernel.endswith(INVARIANT) and "m" in when:
        raise ValueError(f"a rule of {kernel!r} looks at the number of rows, on which its sums may not depend")
    for name, value in [*when.items(), *use.items()]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} of {kernel!r} is {value!r}, not a positive integer")
    for name, value in use.items():
        if (name.startswith("BLOCK") or name == "num_warps") and value & (value - 1):
            raise ValueError(f"{name} of {kernel!r} is {value}, not a power of two")
    return Rule(when, use)


_WEIGHT_BITS = {"int8_weight_matmul": 8, "int4_weight_matmul": 4, "int8_matmul": 8, "fp8_matmul": 8}
"""Bits of a weight where it is stored in fewer than an activation has, or both are."""


_ROW_KERNELS = {
    "quantize_activations": {"BLOCK": (512, 1024, 2048, 4096, 8192), "num_warps": (2, 4, 8), "num_stages": (1,)},
    "kv_write": {"ROWS": (2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    "rms_norm": {"BLOCK": (1024, 2048, 4096, 8192), "TILE": (1024, 2048), "num_warps": (2, 4, 8, 16)},
    "rope": {"HEADS": (2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    "gated": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "embed": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "softcap": {"BLOCK": (512, 1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "sampling": {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (4, 8, 16, 32)},
    "verify": {"BLOCK": (16, 32, 64), "num_warps": (1, 2)},
}
"""Sizes of kernels that work on rows, each by itself."""


def candidates(
    kernel: str, *, bits: int = 16, shared_bytes: int = 227 * 1024, head_dim: int = 128, kv_bits: int = 16
) -> Iterator[dict[str, int]]:
    """Sizes worth measuring for a kernel of this package that has a table; for a tool that writes tables.

    bits: of an activation. shared_bytes: what a block may have of shared memory (227 KiB on Hopper, 163 on A100, 99 on other cards since
    Ampere). head_dim, kv_bits: of attention. Left out is what can't fit: stages of both operands in shared memory, at most 128
    accumulators a thread; and tiles that leave a thread fewer than 4. Raises ValueError for other kernels."""
    base = kernel.removesuffix(INVARIANT)
    if kernel in _ROW_KERNELS:
        names, values = zip(*_ROW_KERNELS[kernel].items(), strict=True)
        yield from (dict(zip(names, sizes, strict=True)) for sizes in itertools.product(*values))
    elif kernel in _ATTENTION_ROWS:
        yield from _attention(kernel, bits, kv_bits, head_dim, shared_bytes)
    elif base == "matmul" or base in _WEIGHT_BITS:
        yield from _products(base, bits, shared_bytes)
    else:
        raise ValueError(f"no candidates for a kernel {kernel!r}")


_ATTENTION_ROWS = {"attention_invariant": (16, 32, 64), "attention_decode": (16, 32), "attention_prompt": (64, 128)}


def _attention(kernel: str, bits: int, kv_bits: int, head_dim: int, shared_bytes: int) -> Iterator[dict[str, int]]:
    """Splits of prompts only say where work may be divided, so that there is one."""
    width = 1 << (head_dim - 1).bit_length()
    splits = (1024,) if kernel == "attention_prompt" else (256, 512, 1024)
    shapes = itertools.product(_ATTENTION_ROWS[kernel], (32, 64, 128), splits, (4, 8), (2, 3, 5))
    for rows, tile, split, warps, stages in shapes:
        queries, keys = rows * width * bits // 8, tile * width * (2 * kv_bits if kv_bits == bits else 2 * (kv_bits + bits)) // 8
        held = (rows * width * (2 if kernel.endswith(INVARIANT) else 1) + rows * tile) // (32 * warps)  # float32 of a thread
        if queries + keys * (stages + 1) // 2 <= shared_bytes and held <= 192:
            yield {"block_m": rows, "tile": tile, "split": split, "num_warps": warps, "num_stages": stages}


def _products(base: str, bits: int, shared_bytes: int) -> Iterator[dict[str, int]]:
    bits = 8 if base in {"int8_matmul", "fp8_matmul"} else bits
    weight_bits = _WEIGHT_BITS.get(base, bits)
    depths = (128,) if base == "int4_weight_matmul" else (64, 128) if weight_bits == 8 else (32, 64, 128)
    for m, n, k, warps, stages in itertools.product((16, 32, 64, 128, 256), (32, 64, 128, 256), depths, (4, 8), (2, 3, 4, 5)):
        if 4 <= m * n // (32 * warps) <= 128 and stages * k * (m * bits + n * weight_bits) // 8 <= shared_bytes:
            depth = {} if base == "int4_weight_matmul" else {"BLOCK_K": k}
            yield {"BLOCK_M": m, "BLOCK_N": n, **depth, "GROUP_M": 8, "num_warps": warps, "num_stages": stages}
