"""The `config_groups` of a compressed-tensors checkpoint: schemes, and the modules that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import check_keys, group_size, kind_of, names_in, one_of
from .stored import Scheme, UnreadableError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
WEIGHT_KEYS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "observer", "observer_kwargs",
    "scale_dtype", "zp_dtype",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    targets: tuple[str, ...]
    """Names, "re:" and a regular expression, or "Linear"."""
    scheme: Scheme
    bits: int
    packed: bool
    sorted: bool
    """Groups of inputs are sorted by activation: there is a weight_g_idx."""


def read_group(name: str, group: Any, form: Any) -> Group:
    """form: the format of all groups that have none of their own. Raises UnreadableError."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise UnreadableError(f"its config_groups.{name} has no weights")
    check_keys(group, {"targets", "weights", "input_activations", "output_activations", "format"})
    if group.get("output_activations"):
        raise UnreadableError(f"its config_groups.{name} quantises the outputs of products")
    form = one_of({"format": group.get("format") or form}, "format", "", *FORMATS)
    weights = group["weights"]
    check_keys(weights, WEIGHT_KEYS)
    if weights.get("dynamic"):
        raise UnreadableError(f"its config_groups.{name} quantises weights anew in each step")
    kind = one_of(weights, "type", "int", "int", "float")
    bits: int = one_of(weights, "num_bits", 8, *((8,) if kind == "float" or form != "pack-quantized" else (4, 8)))
    if (kind == "float") != (form == "float-quantized") and form != "naive-quantized":
        raise UnreadableError(f"its config_groups.{name} has {kind} weights in the format {form!r}")
    symmetric: bool = one_of(weights, "symmetric", True, True, False)
    if not symmetric and form != "pack-quantized":
        raise UnreadableError(f"its config_groups.{name} has zero points in the format {form!r}")
    block = _block(weights)
    activations = _activations(name, group.get("input_activations"), kind, block, packed=form == "pack-quantized")
    scheme = Scheme("e4m3" if kind == "float" else kind_of(bits), block, zeros=not symmetric, activations=activations)
    order = one_of({"actorder": _word(weights.get("actorder"))}, "actorder", "", "", "weight", "static", "group", "dynamic")
    return Group(
        names_in(group, "targets"),
        scheme,
        bits,
        form == "pack-quantized",
        sorted=order in {"group", "dynamic"} and block[1] > 0,
    )


def _word(value: Any) -> str:
    return "" if value in (None, False) else "group" if value is True else str(value)


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    """See `Scheme.block`."""
    match one_of(
        weights, "strategy", "group" if weights.get("group_size") else "channel", "tensor", "channel", "group", "block"
    ):
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group":
            return 1, group_size(weights)
    shape = weights.get("block_structure")
    if not (isinstance(shape, list | tuple) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape)):
        raise UnreadableError(f"its quantization_config has block_structure = {shape!r:.80}, no two numbers")
    return shape[0], shape[1]


def _activations(name: str, found: Any, kind: str, block: tuple[int, int], *, packed: bool) -> Any:
    """See `Scheme.activations`. Of weights in blocks they have groups of as many inputs."""
    if not found:
        return ""
    if not isinstance(found, dict):
        raise UnreadableError(f"its config_groups.{name} has input_activations = {found!r:.80}")
    check_keys(found, WEIGHT_KEYS)
    if packed or found.get("type", "int") != kind or found.get("num_bits", 8) != 8 or not found.get("symmetric", True):
        what = (
            f"{found.get('num_bits', 8)}-bit {found.get('type', 'int')}{'' if found.get('symmetric', True) else ' asymmetric'}"
        )
        raise UnreadableError(f"its config_groups.{name} has {what} activations, which go with none of the products here")
    if found.get("dynamic", False):
        strategy = one_of(found, "strategy", "token", "token", "tensor", "group")
        return "group" if block[0] > 1 else "" if strategy == "group" else "token"
    one_of(found, "strategy", "tensor", "tensor")
    if kind == "int" or block[0] > 1:
        raise UnreadableError(f"its config_groups.{name} has static scales for int8 activations, or for blocks of weights")
    return "static"
