"""compressed-tensors checkpoints (llm-compressor's): int8 and e4m3 weights as they are, 4- and 8-bit ones packed into words.

int-, float-, naive-quantized   weight int8 or e4m3 [N, K], weight_scale, input_scale for static activations
pack-quantized                  weight_packed int32 [N, K * bits / 32], inputs from the lowest bits up, each plus 2^(bits - 1); weight_shape
                                [2]; weight_zero_point int32 [N * bits / 32, groups], outputs packed alike (int8 [N, groups] in old ones);
                                weight_g_idx [K] where inputs were sorted by activation
weight_scale                    [N, 1], [N, groups], [N / 128, K / 128], or one number"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .formats import (
    DTYPES,
    Format,
    Listed,
    Module,
    StoredWeight,
    check_keys,
    check_shape,
    head,
    names_in,
    scalar,
    take,
    unpack,
)
from .groups import Group, read_group
from .stored import UnreadableError

if TYPE_CHECKING:
    from ....core.models.linears import Weights
    from .formats import Heads

KNOWN = {"quant_method", "format", "config_groups", "ignore", "quantization_status", "global_compression_ratio", "version"}


class CompressedTensors(Format):
    markers: ClassVar[tuple[str, ...]] = (".weight_scale",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadableError."""
        if scheme := config.get("kv_cache_scheme"):
            raise UnreadableError(f"it wants K and V quantised by its own scales (kv_cache_scheme = {scheme!r:.80})")
        if (sparsity := config.get("sparsity_config") or {}) and sparsity.get("format", "dense") != "dense":
            raise UnreadableError(f"its weights are sparse ({sparsity.get('format')!r:.80})")
        rest = {key: value for key, value in config.items() if key != "sparsity_config"}
        check_keys(rest, KNOWN)
        if config.get("quantization_status", "compressed") not in {"compressed", None}:
            raise UnreadableError(f"its quantization_status is {config['quantization_status']!r:.80}, not 'compressed'")
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise UnreadableError("its quantization_config has no config_groups")
        read = [read_group(name, group, config.get("format")) for name, group in groups.items()]
        self._groups = [(group, Listed.of_compressed_tensors(group.targets)) for group in read]
        self._ignore = Listed.of_compressed_tensors(names_in(config, "ignore"))

    def ignored(self, name: str) -> bool:
        return self._ignore.means(self.spellings(name))

    def module(self, name: str, heads: Heads) -> Module:
        group = self._group(name)
        scheme, packed = group.scheme, 32 // group.bits
        if group.packed:
            rows, words = head(heads, f"{name}.weight_packed", {"I32"})
            columns = words * packed
            check_shape(heads, f"{name}.weight_shape", {"I64", "I32"}, (2,))
        else:
            rows, columns = head(heads, f"{name}.weight", {"F8_E4M3" if scheme.kind == "e4m3" else "I8"})
        made = Module(scheme, rows, columns)
        scales = heads[f"{name}.weight_scale"]
        flat = {(rows,)} if made.scales == (rows, 1) else {(), (1,)} if made.scales == (1, 1) else set()
        if scales.dtype not in DTYPES or scales.shape not in {made.scales, *flat}:
            raise UnreadableError(
                f"the scales of its {name} must be {list(made.scales)}, not {scales.dtype} {list(scales.shape)}"
            )
        if scheme.zeros:
            zeros = heads.get(f"{name}.weight_zero_point")
            words = (-(-rows // packed), made.scales[1])
            if zeros is None or (zeros.dtype, zeros.shape) not in {("I32", words), ("I8", made.scales)}:
                raise UnreadableError(f"it has no tensor {name}.weight_zero_point that is I32 {list(words)}")
        if group.sorted:
            check_shape(heads, f"{name}.weight_g_idx", {"I32", "I64"}, (columns,))
        if scheme.activations == "static":
            scalar(heads, f"{name}.input_scale")
        return made

    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        group = self._group(name)
        if group.packed:
            shape = tuple(take(weights, f"{name}.weight_shape").tolist())
            if shape != (module.rows, module.columns):
                raise ValueError(f"weight_shape is {list(shape)}, the words hold {[module.rows, module.columns]}")
            values = _signed(unpack(take(weights, f"{name}.weight_packed"), group.bits).flatten(1), group.bits)
        else:
            values = take(weights, f"{name}.weight")
        indices = weights.raw(f"{name}.weight_g_idx") if group.sorted else None
        static = take(weights, f"{name}.input_scale") if module.scheme.activations == "static" else None
        return StoredWeight(
            module,
            values,
            take(weights, f"{name}.weight_scale").reshape(module.scales),
            self._zeros(weights, name, module, group) if module.scheme.zeros else None,
            None if indices is None else indices.long(),
            None if static is None else static.float().reshape(()),
        )

    @staticmethod
    def _zeros(weights: Weights, name: str, module: Module, group: Group) -> torch.Tensor:
        stored = take(weights, f"{name}.weight_zero_point")
        if stored.dtype == torch.int8:
            return stored
        fields = unpack(stored, group.bits).permute(0, 2, 1).reshape(-1, stored.shape[1])[: module.rows]
        return _signed(fields, group.bits)

    def _group(self, name: str) -> Group:
        """The group whose targets name the module; else one for all linear layers."""
        names = self.spellings(name)
        for group, targets in self._groups:
            if targets.means(names):
                return group
        for group, _ in self._groups:
            if "Linear" in group.targets:
                return group
        raise UnreadableError(f"none of its config_groups is for {name}, but its files have it quantised")


def _signed(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 in 0 .. 2^bits - 1 -> int8, less 2^(bits - 1)."""
    return (fields.to(torch.int16) - (1 << bits - 1)).to(torch.int8)
