"""AWQ checkpoints (Lin et al., arXiv 2306.00978), in AutoAWQ's "gemm" version.

qweight   int32 [K, N / 8]        eight outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits up
qzeros    int32 [groups, N / 8]   the same
scales    float [groups, N]"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .formats import (
    DTYPES,
    Format,
    Listed,
    Module,
    Scheme,
    StoredWeight,
    check_keys,
    check_shape,
    group_size,
    head,
    names_in,
    one_of,
    take,
    unpack,
)
from .stored import UnreadableError

if TYPE_CHECKING:
    from ....core.models.linears import Weights
    from .formats import Heads

KNOWN = {
    "quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "modules_to_not_convert",
    # how they were made, or what is to multiply them
    "backend", "do_fuse", "fuse_max_seq_len", "exllama_config", "damp_percent", "desc_act", "act_group_aware", "sym", "true_sequential",
    "batch_size", "cache_block_outputs", "tokenizer", "dataset", "model_seqlen", "pad_token_id", "max_input_length", "meta",
}  # fmt: skip
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Output i of a word's eight: 4 bits from bit 4 * PLACES[i]."""


class Awq(Format):
    markers: ClassVar[tuple[str, ...]] = (".qweight",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadableError."""
        check_keys(config, KNOWN)
        config = {"bits": config.get("w_bit"), "group_size": config.get("q_group_size"), **config}
        one_of(config, "bits", 4, 4)
        one_of({"zero_point": config.get("zero_point")}, "zero_point", True, True)
        version = config.get("version") or config.get("format") or "gemm"
        one_of({"version": str(version).lower()}, "version", "gemm", "gemm")
        self._group = group_size({"group_size": config["group_size"] or 128})
        if self._group % 8:
            raise UnreadableError(f"its groups of {self._group} inputs are no multiple of 8")
        self._ignore = Listed.of_transformers(names_in(config, "modules_to_not_convert"))

    def ignored(self, name: str) -> bool:
        return self._ignore.means(self.spellings(name))

    def module(self, name: str, heads: Heads) -> Module:
        inputs, words = head(heads, f"{name}.qweight", {"I32"})
        made = Module(Scheme("int4", (1, self._group), zeros=True), words * 8, inputs)
        groups = made.scales[1]
        check_shape(heads, f"{name}.qzeros", {"I32"}, (groups, words))
        check_shape(heads, f"{name}.scales", DTYPES, (groups, words * 8))
        return made

    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        values, zeros = (self._outputs(take(weights, f"{name}.{part}")) for part in ("qweight", "qzeros"))
        return StoredWeight(module, values, take(weights, f"{name}.scales").T, zeros)

    @staticmethod
    def _outputs(words: torch.Tensor) -> torch.Tensor:
        """int32 [A, N / 8] -> uint8 [N, A]."""
        order = torch.tensor(PLACES, device=words.device)
        return unpack(words, 4)[:, :, order].reshape(words.shape[0], -1).T
