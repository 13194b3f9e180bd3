"""The contract of a format, and what all of them need to read: settings, tensors, packed integers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ....core.errors import ModelError
from .stored import Module, Scheme, StoredWeight, UnreadableError

if TYPE_CHECKING:
    from ....core.models.linears import Tensor, Weights
    from .stored import Survey

Heads = Mapping[str, "Tensor"]
DTYPES = {"F32", "F16", "BF16"}


class Format(ABC):
    """One way of storing quantised matrices, with one checkpoint's settings."""

    markers: ClassVar[tuple[str, ...]]
    """Ends of names of tensors; each quantised module has one of them, and no other has."""

    report: Mapping[str, Any] = MappingProxyType({})
    """What the log says of this checkpoint once it is read."""

    @abstractmethod
    def module(self, name: str, heads: Heads) -> Module:
        """Of a module that has a marker, from its tensors' shapes. Raises UnreadableError."""

    @abstractmethod
    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        """Raises ValueError for tensors that don't fit each other, ModelError when one is missing."""

    @abstractmethod
    def ignored(self, name: str) -> bool:
        """Whether the config says that this module is not quantised."""

    def survey(self, heads: Heads) -> Survey:
        """Which modules are quantised is what the files have; that must not contradict the config. Raises UnreadableError."""
        names = sorted({name.removesuffix(end) for name in heads for end in self.markers if name.endswith(end)})
        if not names:
            raise UnreadableError(
                f"none of its tensors ends in {' or '.join(self.markers)}: nothing is stored as its config says"
            )
        for name in names:
            if self.ignored(name):
                raise UnreadableError(f"its config says that {name} is not quantised, but its files have it quantised")
        found = {name: self.module(name, heads) for name in names}
        for name, tensor in heads.items():
            stem, _, part = name.rpartition(".")
            if part.endswith(("weight", "weight_packed")) and tensor.dtype not in DTYPES and stem not in found:
                raise UnreadableError(f"its tensor {name} is {tensor.dtype}, and there are no scales for it")
        return found


def check_keys(config: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises UnreadableError for a setting that nobody here knows, unless it says nothing."""
    for key, value in config.items():
        if key not in known and value not in (None, False, "", [], {}):
            raise UnreadableError(f"its quantization_config has {key} = {value!r:.80}, which is not known here")


def one_of(config: Mapping[str, Any], key: str, default: Any, *values: Any) -> Any:
    """A setting; raises UnreadableError unless it is one of those."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) != isinstance(values[0], bool) or value not in values:
        what = " or ".join(map(repr, values))
        raise UnreadableError(f"its quantization_config has {key} = {value!r:.80}; what can be run is {what}")
    return value


def group_size(config: Mapping[str, Any], key: str = "group_size", default: int = 128) -> int:
    """Of columns; 0: all of them."""
    size = config.get(key, default)
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise UnreadableError(f"its quantization_config has {key} = {size!r:.80}, neither a number of inputs nor -1")
    return max(size, 0)


def names_in(config: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The settings' names of modules, one after the other."""
    found: list[str] = []
    for key in keys:
        value = config.get(key) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise UnreadableError(f"its quantization_config has {key} = {value!r:.80}, no list of names")
        found += value
    return tuple(found)


def is_listed(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of transformers' `modules_to_not_convert` means the module: the beginning of its name up to a dot, as a regular
    expression, or the end of it."""
    for pattern in patterns:
        try:
            begins = re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", name)
        except re.error:
            raise UnreadableError(
                f"its quantization_config names modules by {pattern!r}, which is no regular expression"
            ) from None
        if begins or name.endswith(pattern):
            return True
    return False


def head(heads: Heads, name: str, dtypes: Iterable[str], dims: int = 2) -> tuple[int, ...]:
    """The shape of a tensor that must be there. Raises UnreadableError."""
    found = heads.get(name)
    if found is None:
        raise UnreadableError(f"its files have no tensor {name}")
    if found.dtype not in dtypes or len(found.shape) != dims:
        wanted = f"{' or '.join(sorted(dtypes))} of {dims} dimensions"
        raise UnreadableError(f"its tensor {name} is {found.dtype} {list(found.shape)}, not {wanted}")
    return found.shape


def check_shape(heads: Heads, name: str, dtypes: Iterable[str], shape: tuple[int, ...]) -> None:
    """Raises UnreadableError unless the tensor is there and of that shape."""
    if (found := head(heads, name, dtypes, len(shape))) != shape:
        raise UnreadableError(f"its tensor {name} must be {list(shape)}, not {list(found)}")


def scalar(heads: Heads, name: str) -> None:
    """Raises UnreadableError unless the tensor is there, with one number."""
    found = heads.get(name)
    if found is None or found.dtype not in DTYPES or found.shape not in {(), (1,), (1, 1)}:
        raise UnreadableError(f"its files have no tensor {name} with one number, as its static activations need")


def take(weights: Weights, name: str) -> torch.Tensor:
    """A tensor as it is stored. Raises ModelError when there is none."""
    tensor = weights.raw(name)
    if tensor is None:
        raise ModelError(f"the checkpoint has no tensor {name}")
    return tensor


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, B, 32 / bits], lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return (words[:, :, None] >> shifts & ((1 << bits) - 1)).to(torch.uint8)


def kind_of(bits: int) -> Any:
    return f"int{bits}"


__all__ = [
    "DTYPES", "Format", "Heads", "Module", "Scheme", "StoredWeight", "UnreadableError", "check_keys", "check_shape", "group_size", "head",
    "is_listed", "kind_of", "names_in", "one_of", "scalar", "take", "unpack",
]  # fmt: skip
