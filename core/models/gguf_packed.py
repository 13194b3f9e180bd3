"""A GGUF file read in place: the table of its tensors, and their packed rows. No dequantised copy is made, read or kept.

The head of the file is walked once, without decoding the vocabulary (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ModelError
from .gguf_file import IGNORED, STACKED, from_file, hf_name, unpermute
from .linears import PackedMatrix, Stored

if TYPE_CHECKING:
    import torch

    from .resolve import ResolvedModel

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a metadata value by its type."""
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    shape: tuple[int, ...]
    """Rows first."""
    type: str
    offset: int
    """Bytes from the file's beginning."""
    nbytes: int


class Head:
    """Metadata's alignment and architecture, and the tensors, of a file in memory. ModelError when it is no GGUF file."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self._data, self._at = data, 0
        try:
            self._read(name)
        except (struct.error, ArithmeticError, IndexError, UnicodeDecodeError, KeyError) as error:
            raise ModelError(f"{name} is not a readable GGUF file: {error}") from None

    def _read(self, name: str) -> None:
        magic, version, tensors, values = self._data[:4], *self._take("<IQQ", at=4)
        if magic != MAGIC or version not in VERSIONS:
            raise ModelError(f"{name} is not a GGUF file of version 2 or 3 (little-endian)")
        self.architecture, alignment = "", 32
        for _ in range(values):
            key, (kind,) = self._string(), self._take("<I")
            if key == b"general.architecture" and kind == STRING:
                self.architecture = self._string().decode()
            elif key == b"general.alignment" and kind == 4:
                alignment = self._take("<I")[0]
            else:
                self._skip(kind)
        table = [self._tensor() for _ in range(tensors)]
        start = -(-self._at // alignment) * alignment
        self.tensors = {n: Entry(e.shape, e.type, start + e.offset, e.nbytes) for n, e in table}
        if any(e.offset + e.nbytes > len(self._data) for e in self.tensors.values()):
            raise ModelError(f"{name} is shorter than its table of tensors says")

    def _take(self, form: str, at: int | None = None) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at if at is None else at)
        self._at = (self._at if at is None else at) + struct.calcsize(form)
        return found

    def _string(self) -> bytes:
        size = self._take("<Q")[0]
        self._at += size
        return self._data[self._at - size : self._at]

    def _skip(self, kind: int) -> None:
        if kind == STRING:
            self._string()
        elif kind != ARRAY:
            self._at += SCALARS[kind]
        else:
            inner, count = self._take("<IQ")
            if inner == STRING:
                data, at, unpack = self._data, self._at, struct.Struct("<Q").unpack_from
                for _ in range(count):
                    at += 8 + unpack(data, at)[0]
                self._at = at
            elif inner == ARRAY:
                for _ in range(count):
                    self._skip(inner)
            else:
                self._at += SCALARS[inner] * count

    def _tensor(self) -> tuple[str, Entry]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        name = self._string().decode()
        dims = self._take(f"<{self._take('<I')[0]}Q")
        number, offset = self._take("<IQ")
        if number not in GGMLQuantizationType._value2member_map_:
            raise ModelError(f"its tensor {name} is of an unknown GGUF type ({number})")
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        return name, Entry(tuple(reversed(dims)), kind.name, offset, math.prod(dims) // block * size)


class PackedFile:
    """The tensors of a resolved GGUF model by Hugging Face's names; a `linears.Weights`. `dtype`, `device`: of what `get` gives."""

    def __init__(self, resolved: ResolvedModel, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        path = resolved.gguf
        if path is None:
            raise ModelError(f"{resolved.name} is not a GGUF file")
        self.files = [path]
        self._model, self._dtype, self._device = resolved.name, dtype, device
        self._heads = {
            "q_proj": resolved.config["num_attention_heads"],
            "k_proj": resolved.config.get("num_key_value_heads") or resolved.config["num_attention_heads"],
        }
        self._data = _map(path)
        head = Head(self._data, path.name)
        self._arch = head.architecture
        self._entries = {
            hf_name(name, head.architecture, resolved.name): (name, entry)
            for name, entry in head.tensors.items()
            if not name.startswith(IGNORED)
        }
        self._unread = set(self._entries)

    def stored(self) -> dict[str, Stored]:
        """Of each tensor; a stack of experts is one."""
        return {name: Stored(entry.type, entry.nbytes, len(entry.shape)) for name, (_, entry) in self._entries.items()}

    def packed(self, name: str) -> PackedMatrix:
        entry = self._entry(name)[1]
        if len(entry.shape) != 2:
            raise ModelError(f"{self._model} can't be loaded: tensor {name} is no matrix")
        rows = self._bytes(entry).reshape(entry.shape[0], -1)
        part = name.split(".")[-2]
        if self._arch == "llama" and part in self._heads:
            rows = np.ascontiguousarray(unpermute(rows, self._heads[part]))
        return PackedMatrix(rows, entry.type, entry.shape[1])

    def get(self, name: str) -> torch.Tensor:
        import torch
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        original, entry = self._entry(name)
        rows = self._bytes(entry).reshape(*entry.shape[:-1], -1)
        kind = GGMLQuantizationType[entry.type]
        if entry.type in {"F32", "F16"}:
            rows = rows.view(np.float32 if entry.type == "F32" else np.float16)
        try:
            value = dequantize(rows, kind)
        except NotImplementedError:
            raise ModelError(f"{self._model} can't be run: GGUF type {entry.type} is not supported") from None
        owned = np.require(from_file(value, original, self._arch, self._heads), np.float32, ["C", "W"])
        return torch.from_numpy(owned).to(self._device, self._dtype)

    def raw(self, name: str) -> torch.Tensor | None:
        raise ModelError(f"{self._model} can't be loaded: {name} was asked for as it is stored, but a GGUF file has it packed")

    def check_all_read(self, *, tied: bool) -> None:
        from .loader import check_all_read

        check_all_read(self._unread, self._model, tied=tied)

    def _entry(self, name: str) -> tuple[str, Entry]:
        found = self._entries.get(name)
        if found is None or STACKED in name:
            raise ModelError(f"{self._model} can't be loaded: its checkpoint has no tensor {name}")
        self._unread.discard(name)
        return found

    def _bytes(self, entry: Entry) -> np.ndarray:
        return np.frombuffer(self._data, dtype=np.uint8, count=entry.nbytes, offset=entry.offset)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from None
