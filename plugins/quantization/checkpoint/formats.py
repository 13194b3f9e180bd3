"""The contract of a format, and what all of them need to read: settings, tensors, packed integers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ....core.errors import ModelError
from ....core.models.linears import own_spelling
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

    spellings: Callable[[str], Sequence[str]] = staticmethod(own_spelling)
    """See `ModelToLoad.spellings`."""

    @abstractmethod
    def module(self, name: str, heads: Heads) -> Module:
        """Of a module that has a marker, from its tensors' shapes. Raises UnreadableError."""

    @abstractmethod
    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        """Raises ValueError for tensors that don't fit each other, ModelError when one is missing."""

    @abstractmethod
    def ignored(self, name: str) -> bool:
        """Whether the config says that this module is not quantised."""

    def stack(self, weights: Weights, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of several matrices [experts, A, B], multiplied out; None: it is not quantised. Raises ValueError as `read` does."""
        return None

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


class Listed:
    """What a config's list of modules means."""

    def __init__(self, names: Iterable[str], patterns: Mapping[str, str], ends: Iterable[str] = ()) -> None:
        """names: each is that module and all below it. patterns: what the beginning of a module's name matches, by how the config has it.
        ends: of names. Raises UnreadableError for what is no regular expression."""
        self._names, self._ends = frozenset(names), tuple(ends)
        self._patterns = [(_denies(written), _regex(pattern, written)) for written, pattern in patterns.items()]

    @classmethod
    def of_transformers(cls, listed: Sequence[str]) -> Listed:
        """As `modules_to_not_convert` is read: the beginning of a module's name up to a dot, as a regular expression, or the end of it."""
        plain = {one for one in listed if re.fullmatch(r"[\w.-]+", one)}
        patterns = {one: rf"(?:{one})(?:(?<=\.)|(?=\.|$))" for one in listed if one not in plain}
        return cls((one.removesuffix(".") for one in plain), patterns, listed)

    @classmethod
    def of_compressed_tensors(cls, listed: Sequence[str]) -> Listed:
        """Names, and regular expressions behind "re:"."""
        patterns = {one: one.removeprefix("re:") for one in listed if one.startswith("re:")}
        return cls(set(listed) - set(patterns), patterns)

    def means(self, spellings: Sequence[str]) -> bool:
        """Whether the module that has these names is listed. The list was written for one of them, so it is when one matches; by a pattern
        that says what must not be in a name, when all do: of the other spellings it would not have been said."""
        for name in spellings:
            if name.endswith(self._ends) or not self._names.isdisjoint(accumulate(name.split("."), "{}.{}".format)):
                return True
        return any((all if denies else any)(map(pattern.match, spellings)) for denies, pattern in self._patterns)


def _denies(pattern: str) -> bool:
    return "(?!" in pattern or "(?<!" in pattern


def _regex(expression: str, written: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error:
        raise UnreadableError(f"its quantization_config names modules by {written!r}, which is no regular expression") from None


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
    "DTYPES", "Format", "Heads", "Listed", "Module", "Scheme", "StoredWeight", "UnreadableError", "check_keys", "check_shape", "group_size",
    "head", "kind_of", "names_in", "one_of", "scalar", "take", "unpack",
]  # fmt: skip
