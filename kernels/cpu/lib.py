"""The compiled library: found or built, loaded with ctypes, told which instruction set and how many threads to use.

Imports neither torch nor numpy. A call into the library releases the GIL. All calls share one pool of threads and take turns; after a fork
the child gets a pool of its own (fork while no other thread is inside the library)."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..cache import cache_root, locked, publish
from . import build

DType = Literal["float32", "bfloat16"]
DTYPES: dict[DType, int] = {"float32": 0, "bfloat16": 1}
ISAS = ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""By level: each includes those before it (src/dispatch.h)."""
TILE_N = 32
STORED_INT8 = 17
"""TB_STORED_INT8 of src/quant.h."""
GGUF_FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 4, "Q5_1": 5, "Q8_0": 6, "Q4_K": 7, "Q5_K": 8, "Q6_K": 9}
"""Types of GGUF's that weights may stay packed in (enum tb_format)."""

TASK = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_int)

SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "tb_run": ((c_int, TASK, c_void_p), None),
    "tb_barrier": ((), None),
    "tb_threads": ((), c_int),
    "tb_set_threads": ((c_int,), None),
    "tb_set_spin": ((c_int,), None),
    "tb_isa_best": ((), c_int),
    "tb_isa": ((), c_int),
    "tb_use_isa": ((c_int,), c_int),
    "tb_pack": (
        (c_int, c_int, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64), c_int64, POINTER(c_void_p)),
        c_void_p,
    ),
    "tb_pack_int8": (
        (c_int, c_int, c_int, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64), c_int64, POINTER(c_void_p)),
        c_void_p,
    ),
    "tb_pack_gguf": (
        (c_int, c_int, POINTER(c_int), POINTER(c_void_p), POINTER(c_int64), POINTER(c_int64), c_int64, POINTER(c_void_p)),
        c_void_p,
    ),
    "tb_gguf_row_bytes": ((c_int, c_int64), c_size_t),
    "tb_packed_rows": ((c_void_p, c_void_p, c_int, c_int, c_void_p), None),
    "tb_pack_free": ((c_void_p,), None),
    "tb_packed_bytes": ((c_void_p,), c_size_t),
    "tb_linear": ((c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_int, c_int), None),
    "tb_linear_part": ((c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_int, c_int, c_int, c_int), None),
}


@dataclass(frozen=True)
class Library:
    path: Path
    c: ctypes.CDLL
    """Functions of SIGNATURES are declared; who calls others declares those with `declare`."""

    def declare(self, signatures: dict[str, tuple[Sequence[object], object]]) -> None:
        """Argument and result types of C functions, by name. Raises AttributeError for a function that isn't there."""
        for name, (arguments, result) in signatures.items():
            function = getattr(self.c, name)
            function.argtypes, function.restype = list(arguments), result


class _Loading:
    """What `load` found, once for the process."""

    lock = threading.Lock()
    done = False
    library: Library | None = None
    reason = ""


def load() -> Library | None:
    """The library, built first where it must be (about 10 s, once per version of the sources); None when it cannot be had.

    The first call decides for the process. Thread-safe; several processes build it once between them."""
    with _Loading.lock:
        if not _Loading.done:
            try:
                _Loading.library = _open(find_or_build())
            except (build.BuildError, OSError, AttributeError) as error:
                _Loading.reason = str(error) or type(error).__name__
            _Loading.done = True
    return _Loading.library


def unavailable_reason() -> str:
    """Why `load()` gives None; empty when it doesn't."""
    load()
    return _Loading.reason


def find_or_build() -> Path:
    """The library that came with the installation, if it is of these sources; else the cached one; else a new one, cached.

    Raises BuildError, or OSError when the cache folder cannot be written."""
    key = build.source_key()
    if (installed := Path(__file__).parent / build.file_name(key)).exists():
        return installed
    command = build.compiler()
    if command is None:
        raise build.BuildError(build.NO_COMPILER)
    target = cache_root() / "kernels" / build.file_name(f"{key}-{build.compiler_key(command)}")
    if not target.exists():
        with locked(target):
            if not target.exists():
                with publish(target) as draft:
                    build.build(draft)
    return target


def isa() -> str:
    """The instruction set in use. Raises RuntimeError when there is no library, as do the functions below."""
    return ISAS[_c().tb_isa()]


def available_isas() -> tuple[str, ...]:
    """Those that this machine can run, the best one last."""
    return ISAS[: _c().tb_isa_best() + 1]


def use_isa(name: str) -> None:
    """Use another instruction set from now on; no kernel may be running. Raises ValueError where the machine lacks it."""
    if name not in available_isas():
        raise ValueError(f"instruction set {name!r} is none of this machine's: {', '.join(available_isas())}")
    _c().tb_use_isa(ISAS.index(name))


def set_threads(count: int) -> None:
    """Threads that kernels use, the calling one included; 1 until it is set. At most 256."""
    if count < 1:
        raise ValueError(f"at least one thread, not {count}")
    _c().tb_set_threads(count)


def threads() -> int:
    return _c().tb_threads()


def pack(
    dtype: DType, blocks: Sequence[tuple[int, int, int]], k: int, biases: Sequence[int] | None = None
) -> tuple[int, Callable[[], None]]:
    """Pack matrices [rows, k] into one layer (tb_pack in src/linear.h). blocks: (address, rows, elements between rows) each;
    biases: an address each, 0 for none. Returns the address of its tb_packed, and what frees it. Raises MemoryError."""
    layer = _c().tb_pack(DTYPES[dtype], *_sources(blocks), k, _pointers(biases))
    return _owned(layer, blocks, k, dtype)


def pack_int8(
    dtype: DType,
    source: DType | Literal["stored"],
    blocks: Sequence[tuple[int, int, int]],
    k: int,
    biases: Sequence[int] | None = None,
) -> tuple[int, Callable[[], None]]:
    """As `pack`, quantising weights of dtype `source` (tb_pack_int8 in src/quant.h). dtype: the activations'; biases: float32. source
    "stored": int8 with a scale at each row's end (TB_STORED_INT8 there), bytes between rows."""
    kind = STORED_INT8 if source == "stored" else DTYPES[source]
    layer = _c().tb_pack_int8(DTYPES[dtype], kind, *_sources(blocks), k, _pointers(biases))
    return _owned(layer, blocks, k, "int8")


def pack_gguf(
    dtype: DType, types: Sequence[str], blocks: Sequence[tuple[int, int, int]], k: int, biases: Sequence[int] | None = None
) -> tuple[int, Callable[[], None]]:
    """As `pack`, of GGUF's blocks (tb_pack_gguf in src/quant.h), one type a matrix; (address, rows, bytes between rows) each."""
    formats = (c_int * len(types))(*(GGUF_FORMATS[name] for name in types))
    count, *sources = _sources(blocks)
    layer = _c().tb_pack_gguf(DTYPES[dtype], count, formats, *sources, k, _pointers(biases))
    return _owned(layer, blocks, k, "/".join(dict.fromkeys(types)))


def gguf_row_bytes(type_name: str, k: int) -> int:
    """Bytes of a row of k weights; 0 where k is no multiple of the type's block."""
    return _c().tb_gguf_row_bytes(GGUF_FORMATS[type_name], k)


def _sources(blocks: Sequence[tuple[int, int, int]]) -> tuple[int, ctypes.Array, ctypes.Array, ctypes.Array]:
    count = len(blocks)
    return (
        count,
        (c_void_p * count)(*(b[0] for b in blocks)),
        (c_int64 * count)(*(b[1] for b in blocks)),
        (c_int64 * count)(*(b[2] for b in blocks)),
    )


def _pointers(addresses: Sequence[int] | None) -> ctypes.Array | None:
    return None if addresses is None else (c_void_p * len(addresses))(*addresses)


def _owned(handle: int | None, blocks: Sequence[tuple[int, int, int]], k: int, kind: str) -> tuple[int, Callable[[], None]]:
    if not handle:
        raise MemoryError(f"no memory for a packed layer of {sum(b[1] for b in blocks)} x {k} {kind}")
    free = _c().tb_pack_free
    return handle, lambda: free(handle)


def _open(path: Path) -> Library:
    library = Library(path, ctypes.CDLL(str(path)))
    library.declare(SIGNATURES)
    return library


def _c() -> ctypes.CDLL:
    library = load()
    if library is None:
        raise RuntimeError(f"the CPU kernels are not available: {_Loading.reason}")
    return library.c
