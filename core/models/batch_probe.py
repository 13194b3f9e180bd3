"""A start-up self test on a device: the loaded model's own kernels, on one sequence in different company, compared bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import torch

from ..worker.batch import Piece, ragged
from ..worker.default_attention import default_attention
from ..worker.paged import make_cache

if TYPE_CHECKING:
    from ..worker.attention import AttentionBackend
    from .base import CausalModel

log = structlog.get_logger(__name__)

BLOCK = 16
LENGTH = 600
"""Tokens of the sequence: more than a split of attention and than any tile of a product."""
LAST = (1, 3, 33)
"""How many of its last tokens are run again in a step of their own."""
MATES = 70
"""Other requests, of a token each, beside its last one."""


def batch_probe(
    model: CausalModel, backend: AttentionBackend | None = None, *, length: int = LENGTH, mates: int = MATES
) -> tuple[bool, str]:
    """(True, "") or (False, in which company the sequence's last tokens have other bits). backend: default: core's for the model.

    The sequence is run as one prompt; then its last tokens again by themselves, on the K/V that is there, and the very last one
    beside other requests. Takes memory for about 2 * `length` tokens of K/V, and gives it back."""
    with torch.inference_mode():
        company = _Sequence(model, backend, min(length, model.spec.max_model_len), mates).differs()
    if model.kv_layout(BLOCK).device.type == "cuda":
        torch.cuda.empty_cache()
    if not company:
        return True, ""
    reason = f"on this device a token's result depends on its batch: {company} it is another than in its prompt"
    log.warning("not_batch_invariant", reason=reason)
    return False, reason


class _Sequence:
    def __init__(self, model: CausalModel, backend: AttentionBackend | None, length: int, mates: int) -> None:
        self.model = model
        self.layout = model.kv_layout(BLOCK)
        self.backend = backend or default_attention(self.layout)
        self.length, self.mates = length, mates
        self.blocks = -(-length // BLOCK)
        draw = torch.Generator().manual_seed(0)
        self.tokens: list[int] = torch.randint(0, model.spec.vocab_size, (length + mates,), generator=draw).tolist()
        self.kv = make_cache(self.layout, self.blocks + mates)

    def differs(self) -> str:
        """The first company in which it does; empty when it does in none."""
        hidden, logits = self._run(self.length)
        companies = [(f"among the last {n}", n, 0) for n in LAST if n <= self.length]
        for name, count, mates in (*companies, (f"beside {self.mates} other requests", 1, self.mates)):
            found = self._run(count, mates)
            if not (torch.equal(found[0], hidden[-count:]) and torch.equal(found[1], logits[-count:])):
                return name
        return ""

    def _run(self, count: int, mates: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the last `count` tokens beside other requests: their hidden states, and logits of the last of them. The LM head is given
        the others' rows too."""
        first = self.length - count
        pieces = [Piece(self.tokens[first : self.length], first, list(range(self.blocks)))]
        pieces += [Piece([self.tokens[self.length + i]], 0, [self.blocks + i]) for i in range(mates)]
        batch = ragged(pieces, self.layout)
        batch.attention.prepared = self.backend.prepare(batch.attention)
        hidden = self.model.forward(batch, self.kv, self.backend)
        some = min(count, max(LAST))
        return hidden[:count], self.model.logits(hidden[count - some :])[:some]
