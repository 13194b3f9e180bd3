"""A model without weights, small enough to predict by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.contexts import Vocabulary
from ..core.models.base import CausalModel, ForwardBatch, KVCache, ModelSpec
from ..core.worker.attention import AttentionBackend, KVLayout

if TYPE_CHECKING:
    from ..core.config import Config
    from ..core.models.linears import ChooseLinears

EOS = 0
CHARACTERS = "".join(map(chr, range(32, 127)))
"""Token id i is the (i-1)-th of these."""
VOCAB_SIZE = 1 + len(CHARACTERS)
MAX_MODEL_LEN = 512
STATES = 8191
"""A prime: what a sequence is hashed to."""


def tokenize(text: str) -> list[int]:
    """One token a character. ValueError for one that isn't printable ASCII."""
    return [1 + CHARACTERS.index(character) for character in text]


def detokenize(tokens: Iterable[int]) -> str:
    return "".join("" if token == EOS else CHARACTERS[token - 1] for token in tokens)


VOCABULARY = Vocabulary(
    tokens=[b"<eos>", *(character.encode() for character in CHARACTERS)],
    special_ids=frozenset({EOS}),
    eos_token_ids=(EOS,),
    exact=True,
    tokenize=tokenize,
)


class FakeModel(CausalModel):
    """Stores token ids as K. A row's hidden state is a hash of all ids that it finds in its block table, up to its own; its logits are
    the row of a fixed table of normal noise at that hash. Attention backends are prepared but not asked to attend."""

    spec = ModelSpec(
        architecture="Fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        hidden_size=1,
        num_heads=2,
        weights_bytes=1000,
        step_bytes=1000,
        head_bytes=200,
        linear_params=200,
        head_params=50,
        eos_token_ids=(EOS,),
    )

    def __init__(self) -> None:
        self.table = torch.from_numpy(logits_table(self.spec.vocab_size))
        """float32 [STATES, vocab_size]."""

    def kv_layout(self, block_size: int) -> KVLayout:
        return KVLayout(1, (1,), (1,), block_size, torch.float32, torch.device("cpu"))

    def forward(self, batch: ForwardBatch, kv: KVCache, attention: AttentionBackend) -> torch.Tensor:
        where, keys, block_size = batch.attention, kv.k[0].view(-1), kv.k[0].shape[1]
        keys[where.slots] = batch.token_ids.to(torch.float32)
        hidden = []
        for r, (start, end) in enumerate(itertools.pairwise(where.query_start)):
            table = torch.tensor(where.block_tables[r])
            slots = (table[:, None] * block_size + torch.arange(block_size)).view(-1)[: where.context_len[r]]
            stored = keys[slots].to(torch.int64).tolist()
            hidden += [prefix_hash(stored[: p + 1]) for p in batch.positions[start:end].tolist()]
        return torch.tensor(hidden, dtype=torch.float32)[:, None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.table[hidden[:, 0].to(torch.int64)]

    def numerics_probe(self) -> tuple[bool, str]:
        return True, ""


def prefix_hash(tokens: Sequence[int]) -> int:
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % STATES
    return value


def logits_table(vocab_size: int) -> np.ndarray:
    """float32 [STATES, vocab_size]."""
    return np.random.Generator(np.random.Philox(5)).normal(0, 3, (STATES, vocab_size)).astype(np.float32)


def greedy(prompt: Sequence[int], count: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """The `count` tokens that the model goes on with at temperature 0, its end token being one like any other."""
    table, tokens = logits_table(vocab_size), list(prompt)
    for _ in range(count):
        tokens.append(int(table[prefix_hash(tokens)].argmax()))
    return tokens[len(prompt) :]


def load_fake(make: Callable[[], CausalModel] = FakeModel) -> Callable[[Config, ChooseLinears | None], tuple[str, CausalModel]]:
    """A loader for `ModelRunner`."""
    return lambda _config, _choose: ("fake", make())
