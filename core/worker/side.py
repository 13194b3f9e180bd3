"""A model that a plugin runs beside the served one: what `side_model` and `drafts_after_step` deal in. No implementation here.

K/V of a side model lives in the same blocks as the served model's: it has tensors of its own, with a place for each block of the pool. So
both come out of one byte budget, are taken in one transaction, and are shared and evicted together. What a block holds of the side model
is for its owner to know: `handed_out` tells when a block's old contents are void.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..contexts import Vocabulary
    from ..models.base import CausalModel, ModelSpec
    from .attention import AttentionBackend, KVLayout
    from .state import WorkerRequestState


class SideModel(ABC):
    """Made before any weights of its own are read: the sizes come first."""

    weights_bytes: int
    kv_bytes_per_token: int
    """Of each token that the pool has room for, whether or not it is ever used for this model; 0: it keeps none."""
    fixed_bytes: int = 0
    """Other memory, whatever the pool's size."""

    @abstractmethod
    def load(self, beside: Beside) -> None:
        """Read the weights. Raises ModelError."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Make the K/V tensors, and forget what was in earlier ones. After `load`."""

    @abstractmethod
    def handed_out(self, blocks: Sequence[int]) -> None:
        """The pool gave these blocks to somebody, empty. Before the step that writes to them."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a side model is given at start."""

    spec: ModelSpec
    """The served model's."""
    layout: KVLayout
    """The served model's K/V, as stored."""
    vocabulary: Callable[[], Vocabulary]
    """The served model's."""
    logits: Callable[[torch.Tensor], torch.Tensor]
    """The served model's LM head: hidden states [R, hidden_size] -> float32 [R, vocab_size]."""
    load: Callable[[str], CausalModel]
    """Loads another model by directory, hub id or GGUF file, with the server's dtype, device and kernels. Raises ModelError."""
    vocabulary_of: Callable[[str, ModelSpec], Vocabulary]
    """Of such a model. Raises ModelError when it has no tokenizer."""
    attention: Callable[[KVLayout], AttentionBackend]
    """A backend that serves a layout: of the attention slot's holder, or core's."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One request's part in a step that is over."""

    request: WorkerRequestState
    """`tokens` ends with what was sampled; `computed` says how many have K/V in the served model (all but the last, if it sampled)."""
    first: int
    """Position of the first row of `hidden`."""
    hidden: torch.Tensor
    """The served model's final, normalised hidden states [n, hidden_size] at positions first ... first + n - 1, those of rejected drafts
    left out. Not to be changed."""
    drafts: int
    """Drafts that were run, anybody's."""
    sampled: int
    """Tokens that were added: accepted drafts and one more; 0 when part of a prompt ran, or the request failed."""


@dataclass(frozen=True, slots=True)
class StepRan:
    """A step that is over, as `drafts_after_step` sees it."""

    runs: Sequence[Ran]
    """Of the requests that use the plugin, in the order of the plan."""
    most: int
    """Drafts of one request that a step runs at most."""
    num_requests: int
    """In the whole step."""
    num_tokens: int
    decode_only: bool
    """Nothing of a prompt ran in it."""
    seconds: float
    """From the step's arrival to the end of sampling."""
