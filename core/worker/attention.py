"""The contract of the "attention" slot: paged attention over block tables. No implementation here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Upload = Callable[[np.ndarray, torch.Tensor | None], torch.Tensor]
    """(int32 numbers, a tensor of that shape or None): a copy on the device, in the tensor if given. Nobody waits for it."""


SCALE_BYTES = 4
"""Of the float32 at the end of a quantized row."""
Stored = Literal["", "int8", "fp8"]
"""How K and V are stored: in the layout's `dtype`, or in one byte with a scale: int8, or float8 e4m3."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of the paged cache: per layer one K and one V tensor [num_blocks, block_size, num_kv_heads, row]. Within a block a backend that
    is a kernel set of its own (not lossless) may keep another order: nobody else reads what it has written.

    A row is head_dim values of `dtype`. If quantized, head_dim + 4 bytes: head_dim values of one byte, then the float32 that they are
    multiplied with, of that token and head alone: max |x| / 127 for int8, max |x| / 448 for fp8 (float8_e4m3fn, whose largest number is
    448). Raises ConfigError when head_dim is no multiple of 4 then."""

    num_layers: int
    num_kv_heads: tuple[int, ...]
    """By layer."""
    head_dim: tuple[int, ...]
    """By layer (of K and V alike)."""
    block_size: int
    dtype: torch.dtype
    """Of the activations, and of K and V as they are given to attention."""
    device: torch.device
    stored: Stored = ""
    invariant: bool = True
    """The model keeps rows independent of their batch, and asks attention for it. False: a backend may do what is faster."""
    looks_ahead: bool = False
    """Batches may have an `AttentionBatch.reach`. A backend without `looks_ahead` is not used with such layouts."""

    def __post_init__(self) -> None:
        odd = [d for d in self.head_dim if d % SCALE_BYTES]
        if self.quantized and odd:
            raise ConfigError(
                f"a K/V cache in {self.stored} needs a head_dim that is a multiple of {SCALE_BYTES}; this model's is {odd[0]}"
            )

    @property
    def quantized(self) -> bool:
        """Rows of one byte a value, and a scale."""
        return self.stored != ""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Of the caches' tensors."""
        import torch

        return {"": self.dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[self.stored]

    @property
    def bytes_per_token(self) -> int:
        rows = ((d + SCALE_BYTES) if self.quantized else d * self.dtype.itemsize for d in self.head_dim)
        return sum(2 * heads * row for heads, row in zip(self.num_kv_heads, rows, strict=True))

    def shapes(self, num_blocks: int) -> list[tuple[int, int, int, int]]:
        """By layer: of its K and of its V tensor, in elements of `cache_dtype`."""
        widths = (d + SCALE_BYTES if self.quantized else d for d in self.head_dim)
        return [(num_blocks, self.block_size, heads, width) for heads, width in zip(self.num_kv_heads, widths, strict=True)]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of attention."""

    scale: float
    window: int | None = None
    """Sliding window in tokens: position i sees positions j with i - window < j <= i. None: all j <= i."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap), before masking."""


@dataclass(slots=True)
class AttentionBatch:
    """One step's ragged batch: request r's new tokens are rows query_start[r] : query_start[r+1] of the flat token dimension."""

    query_start: list[int]
    """len = num_requests + 1, starts at 0, strictly increasing."""
    context_len: list[int]
    """Tokens of each request that have K/V once this step's are written (old + new)."""
    block_tables: list[list[int]]
    """Each request's blocks in order; covers at least context_len tokens."""
    slots: torch.Tensor
    """int64 [T]: where each new token's K/V goes: block_id * block_size + offset. Negative: nowhere, the token is padding; only a
    backend that is `capturable` is shown such."""
    prepared: Any = None
    """Whatever the backend's `prepare` returned."""
    tables: torch.Tensor | None = None
    """int32 [rows, width], contiguous, on the layout's device: block tables that stay there, a row for each request. None: there are
    none, only `block_tables`."""
    table_rows: list[int] | None = None
    """Each request's row in `tables`."""
    upload: Upload | None = None
    """How `prepare` and `attend` bring index numbers to the device; None: as the backend likes."""
    reach: torch.Tensor | None = None
    """int64 [T]: row at position i sees positions below reach (i < reach <= context_len), not only up to i; a window still ends at
    i - window. For spans whose tokens attend to each other in both directions. None: all rows see up to themselves."""


class Replayable(Protocol):
    """What `prepare` of a `capturable` backend returns. Its work can be written into buffers of fixed sizes, which a CUDA graph reads."""

    def bucket(self) -> Hashable | None:
        """Of the buffers that hold this step's work: equal for all steps that one graph can serve. None: not known yet, because no step
        of its kind has run."""
        ...

    def padded(self, tokens: int) -> Replayable:
        """Such buffers with this step's work in them, for `tokens` rows (at least this step's); goes into `AttentionBatch.prepared`."""
        ...

    def fill(self, padded: Any) -> None:
        """Write this step's work into the buffers of what `padded` gave for the same `bucket`."""
        ...


class AttentionBackend(ABC):
    """One implementation of paged attention. Must not depend, for a row, on the other rows of the batch (if `invariant`)."""

    name: ClassVar[str]
    invariant: bool
    """Holds the determinism contract: a row's result depends on its own position and K/V as stored only, bit by bit."""
    quantized_kv: ClassVar[bool] = False
    """Serves layouts that are `quantized`; one that serves not all of them answers None for those. If not, it is not used with them, and
    the plugin it is from goes off with a reason."""
    capturable: ClassVar[bool] = False
    """`prepare` gives a Replayable and does not look at `slots`. `attend` may be recorded in a CUDA graph: it waits for nothing, and what
    depends on data it does on the device. Rows that are padding (slot below 0, in no query) may come out as anything."""
    looks_ahead: ClassVar[bool] = False
    """Serves layouts that are `looks_ahead`. If not, it is not used with them: core's computes in its place."""

    @property
    def inner(self) -> AttentionBackend:
        """The backend itself, under whatever guards it: a model that fuses attention into a larger call looks at this."""
        return self

    @abstractmethod
    def prepare(self, batch: AttentionBatch) -> Any:
        """Once a step, before the first layer: index tensors that all layers share. Stored as `batch.prepared`."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Write k, v into the cache at `batch.slots`, then attend causally over everything stored.

        q: [T, num_heads, head_dim]; k, v: [T, num_kv_heads, head_dim] (num_heads is a multiple; head h reads KV head
        h // (num_heads // num_kv_heads)); caches: as the KVLayout has them, written in
        place.
        Returns [T, num_heads, head_dim] in q's dtype; sums are kept in float32. K/V is read back as stored, the new tokens' included.
        """
