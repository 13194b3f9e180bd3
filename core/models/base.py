"""The contract of a model that the runner can drive. No implementation here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ModelError

if TYPE_CHECKING:
    import torch

    from ..worker.attention import AttentionBackend, AttentionBatch, KVLayout
    from .media import MediaCheckpoint, MediaRows


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What the rest of the engine needs to know about a loaded model."""

    architecture: str
    vocab_size: int
    """Columns of the logits (padding of the embedding table included)."""
    max_model_len: int
    hidden_size: int
    num_heads: int
    weights_bytes: int
    """In memory, as the slot "quantization" stores them."""
    step_bytes: int
    """Of the weights, what a step reads: all but an embedding of its own; the LM head once."""
    head_bytes: int
    """Of the LM head alone."""
    linear_params: int
    """Parameters that every token is multiplied with (experts counted as often as they are used), LM head excluded."""
    head_params: int
    """Parameters of the LM head, multiplied with sampled rows only."""
    eos_token_ids: tuple[int, ...]
    lossless: bool = True
    lossless_reason: str = ""


@dataclass(slots=True)
class ForwardBatch:
    """One step's tokens, all requests behind each other."""

    token_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]: position of each token in its own sequence."""
    attention: AttentionBatch
    media: MediaRows | None = None
    """Set only for models that `take_media`."""


@dataclass(slots=True)
class KVCache:
    """The paged cache: one K and one V tensor a layer, as the KVLayout has them."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]


class CausalModel(ABC):
    """A decoder with its weights. Stateless: everything that lasts is in the KVCache."""

    spec: ModelSpec
    capturable: bool = False
    """`forward` may be recorded in a CUDA graph: it needs nothing but the batch's tensors and `attention.prepared`, waits for nothing, and
    no shape depends on data. Then it is also run with rows that are padding (position 0, slot below 0), whose results nobody reads, and
    with a `context_len` of `max_model_len`."""
    beside: MediaCheckpoint | None = None
    """What else there is in a multimodal model's checkpoint; None: it is a text model, or can only be run as one."""

    @abstractmethod
    def kv_layout(self, block_size: int) -> KVLayout: ...

    @abstractmethod
    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Run all tokens; write their K/V. Returns the final, normalised hidden states [T, hidden_size].

        Bit for bit, a row depends only on its own request's tokens up to it (if `spec.lossless`)."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden_size], any R >= 1. Returns float32 [R, vocab_size], soft-capped and scaled as the model defines."""

    def take_media(self, *, looks_ahead: bool) -> None:
        """Make ready for batches with `media`. Called at most once, before `kv_layout`, whose answer is `looks_ahead` then if asked for.
        From then on every batch is computed in a way that media fit into, so that a row does not depend on whether one has any.
        Raises ModelError when the model can't."""
        raise ModelError(f"{self.spec.architecture} runs in a way that takes no pictures or sounds")

    def numerics_probe(self) -> tuple[bool, str]:
        """A start-up self test: (True, "") or (False, why a row's result depends on its batch on this machine). Well below a second on a
        CPU; on a GPU the model itself is run, and kernels may be compiled for it."""
        if self.kv_layout(16).device.type != "cpu":
            from .batch_probe import batch_probe

            return batch_probe(self)
        from ...kernels.torch_ops.probe import numerics_probe

        return numerics_probe()
