"""What the worker knows about a request, and the rows it samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..plugin import Stash

if TYPE_CHECKING:
    import torch

    from ..host import HookTable
    from ..plan import WorkerRequest
    from .encoder import MediaState


UNKNOWN = -1
"""In `tokens`: sampled on a device, and not known here yet."""


@dataclass(frozen=True, slots=True)
class FusedFilters:
    """What a plugin's `filter_logits` does to a request's rows, in numbers that a sampling kernel knows: in this order, each on what the
    one before left, renormalised; of equally likely tokens the one with the lower id counts as more likely."""

    top_k: int = 0
    """Tokens that are kept; 0: all."""
    top_p: float = 1.0
    """Of the shortest run of most likely tokens that is kept (at least one), the probability; 1: all."""
    min_p: float = 0.0
    """Tokens less likely than this, times the most likely one, go; 0: none."""


class WorkerRequestState:
    """The worker's own copy of a request; plugins write only `stash`."""

    __slots__ = (
        "blocks", "choice", "computed", "fields", "fused", "hooks", "media", "num_prompt_tokens", "pinned", "prompt_logits", "request_id",
        "seed", "stash", "temperature", "tokens",
    )  # fmt: skip

    def __init__(self, order: WorkerRequest, hooks: HookTable) -> None:
        self.request_id = order.request_id
        self.tokens: list[int] = list(order.tokens)
        """Prompt, then output. With steps on a device in flight the last ones may be UNKNOWN; no hook sees that."""
        self.num_prompt_tokens = order.num_prompt_tokens
        self.computed = order.num_computed
        self.blocks: list[int] = list(order.blocks)
        self.temperature = order.temperature
        self.seed = order.seed
        self.choice = order.choice
        self.fields: dict[str, Any] = order.fields
        self.pinned = order.pinned
        self.prompt_logits = order.prompt_logits
        self.hooks = hooks
        self.fused: FusedFilters | None = None
        """Its tokens can be sampled on the device, with these filters. None: on the host."""
        self.stash = Stash()
        self.media: MediaState | None = None
        """Its pictures and sounds, if it has any."""

    def draw(self, logits: torch.Tensor, position: int) -> int:
        """The id that its own random numbers and temperature choose from a row of logits [vocab_size] at a position; masks, penalties and
        filters are left out. For drafts: where two models find the same token likely, they draw the same."""
        from ..rng import sample
        from ..sampler import MIN_TEMPERATURE

        values = logits.float().cpu().contiguous().numpy()
        if self.temperature < MIN_TEMPERATURE:
            return int(values.argmax())
        values = values - values.max()
        values /= values.dtype.type(self.temperature)
        return sample(values, self.seed, position, self.choice)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: it predicts the token at `position` of `request`."""

    request: WorkerRequestState
    position: int
    """Index of the predicted token in the sequence (prompt plus output); the random key's counter."""
    is_prompt: bool = False
    """True for a prompt position whose token is already known (prompt logprobs)."""
    drafts: int = 0
    """How many of `tokens`, at its end, are drafts that may turn out wrong: what a plugin remembers must not count on them. Rows of a
    request follow each other, with 0, 1, 2 ... drafts; behind a wrong draft a row is not used."""

    @property
    def tokens(self) -> list[int]:
        """The tokens before `position`. Do not change the list."""
        known = self.request.tokens
        return known if len(known) == self.position else known[: self.position]
