"""Checkpoints in float8 e4m3 by the `quant_method` "fp8": as transformers writes them (FineGrainedFP8, DeepSeek's format), and vLLM's.

weight                e4m3 [N, K]
weight_scale_inv      [N / 128, K / 128] for blocks, or one number (also called weight_scale): what the weight is multiplied with
activation_scale      one number, with `activation_scheme: static` (also called input_scale)
NAME, NAME_scale_inv  experts that are stacked: e4m3 [experts, A, B], [experts, A / 128, B / 128], whichever of A and B are the inputs"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .formats import (
    DTYPES,
    Format,
    Listed,
    Module,
    Scheme,
    StoredWeight,
    check_keys,
    check_shape,
    head,
    names_in,
    one_of,
    scalar,
    take,
)
from .stored import UnreadableError

if TYPE_CHECKING:
    from ....core.models.linears import Weights
    from .formats import Heads
    from .stored import Survey

KNOWN = {
    "quant_method", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers", "scale_fmt", "fmt",
    "expert_dtype",
}  # fmt: skip
STACKED = "_scale_inv"
"""Behind the name of stacked experts: their scales'."""
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATIONS = ("activation_scale", "input_scale")


class Fp8(Format):
    markers: ClassVar[tuple[str, ...]] = tuple(f".{name}" for name in SCALES)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadableError."""
        check_keys(config, KNOWN)
        self._static = one_of(config, "activation_scheme", "dynamic", "dynamic", "static") == "static"
        one_of(config, "scale_fmt", "float", "float", "ue8m0")
        one_of(config, "fmt", "e4m3", "e4m3")
        one_of(config, "expert_dtype", "fp8", "fp8")
        block = config.get("weight_block_size")
        is_block = isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        if block is not None and not is_block:
            raise UnreadableError(f"its quantization_config has weight_block_size = {block!r:.80}, no two numbers")
        if block is not None and self._static:
            raise UnreadableError("its activations are static, and its weights in blocks: nothing says how these go together")
        self._block: tuple[int, int] = (0, 0) if block is None else (block[0], block[1])
        self._ignore = Listed.of_transformers(names_in(config, "modules_to_not_convert", "ignored_layers"))

    def ignored(self, name: str) -> bool:
        return self._ignore.means(self.spellings(name))

    def module(self, name: str, heads: Heads) -> Module:
        rows, columns = head(heads, f"{name}.weight", {"F8_E4M3"})
        activations = "group" if self._block != (0, 0) else "static" if self._static else "token"
        made = Module(Scheme("e4m3", self._block, activations=activations), rows, columns)
        scales = heads[_first(heads, name, SCALES)]
        shapes = {made.scales} | ({(), (1,)} if self._block == (0, 0) else set())
        if scales.dtype not in DTYPES | {"F8_E8M0"} or scales.shape not in shapes:
            raise UnreadableError(
                f"the scales of its {name} must be {list(made.scales)}, not {scales.dtype} {list(scales.shape)}"
            )
        if self._static:
            scalar(heads, _first(heads, name, ACTIVATIONS))
        return made

    def survey(self, heads: Heads) -> Survey:
        scales = [name for name in heads if name.endswith(STACKED) and not name.endswith(self.markers)]
        for name in (one.removesuffix(STACKED) for one in scales):
            count, *shape = head(heads, name, {"F8_E4M3"}, dims=3)
            if self.ignored(name):
                raise UnreadableError(f"its config says that {name} is not quantised, but its files have it quantised")
            if self._block[0] != self._block[1] or self._block == (0, 0):
                raise UnreadableError(f"its {name} has several matrices, and its blocks are {list(self._block)}, not square")
            check_shape(heads, f"{name}{STACKED}", DTYPES, (count, *(-(-n // self._block[0]) for n in shape)))
        return super().survey(heads)

    def stack(self, weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        scales = weights.raw(f"{name}{STACKED}")
        if scales is None:
            return None
        values = take(weights, name)
        module = Module(Scheme("e4m3", self._block), values.shape[1], values.shape[2])
        return torch.stack([StoredWeight(module, *one).dequantized().to(dtype) for one in zip(values, scales, strict=True)])

    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        scales = _read_first(weights, name, SCALES).float().reshape(module.scales)
        static = _read_first(weights, name, ACTIVATIONS).float().reshape(()) if self._static else None
        return StoredWeight(module, take(weights, f"{name}.weight"), scales, activation_scale=static)


def _first(heads: Heads, name: str, parts: tuple[str, ...]) -> str:
    return next((f"{name}.{part}" for part in parts if f"{name}.{part}" in heads), f"{name}.{parts[0]}")


def _read_first(weights: Weights, name: str, parts: tuple[str, ...]) -> Any:
    found = weights.raw(f"{name}.{parts[0]}")
    return take(weights, f"{name}.{parts[1]}") if found is None else found
