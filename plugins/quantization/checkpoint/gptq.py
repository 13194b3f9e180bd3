"""GPTQ checkpoints (Frantar et al., arXiv 2210.17323) of 4 and 8 bits, as AutoGPTQ and GPTQModel write them.

qweight   int32 [K * bits / 32, N]        inputs from the lowest bits up
qzeros    int32 [groups, N * bits / 32]   outputs from the lowest bits up. Format "gptq" has them less one: GPTQModel takes 1 from each of a
                                          word's by one subtraction, so that a 0 borrows from the next; "gptq_v2" as they are
scales    float [groups, N]
g_idx     int32 [K]                       the group of each input; sorted by activation with `desc_act`"""

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
    kind_of,
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
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "lm_head", "modules_to_not_convert",
    "pack_dtype", "dynamic", "modules_in_block_to_quantize",
    # how they were made, or what is to multiply them
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "model_file_base_name", "meta", "mse",
    "act_group_aware", "tokenizer", "dataset", "backend", "use_exllama", "exllama_config", "use_cuda_fp16", "model_seqlen",
    "disable_exllama",
    "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id", "max_input_length", "cache_block_outputs",
    "quantizer", "version", "method", "hyb_act", "gptaq", "v2", "v2_alpha", "failsafe", "offload_to_disk", "offload_to_disk_path",
}  # fmt: skip
ONES = {4: 0x11111111, 8: 0x01010101}
"""1 in each field of a word."""


class Gptq(Format):
    markers: ClassVar[tuple[str, ...]] = (".qweight",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Raises UnreadableError."""
        check_keys(config, KNOWN)
        self._bits: int = one_of(config, "bits", 4, 4, 8)
        self._group = group_size(config)
        if self._group % 8:
            raise UnreadableError(f"its groups of {self._group} inputs are no multiple of 8")
        self._symmetric: bool = one_of(config, "sym", True, True, False)
        one_of(config, "desc_act", False, True, False)
        one_of(config, "pack_dtype", "int32", "int32")
        written = config.get("checkpoint_format") or config.get("format") or "gptq"
        self._less_one = one_of({"checkpoint_format": written}, "checkpoint_format", "gptq", "gptq", "gptq_v2") == "gptq"
        dynamic = config.get("dynamic") or {}
        if own := [pattern for pattern in dynamic if not str(pattern).startswith("-:")]:
            raise UnreadableError(f"its quantization_config has settings of their own for modules {own[0]!r}")
        self._ignore = Listed.of_transformers(names_in(config, "modules_to_not_convert"))

    def ignored(self, name: str) -> bool:
        return self._ignore.means(self.spellings(name))

    def module(self, name: str, heads: Heads) -> Module:
        packed = 32 // self._bits
        words, outputs = head(heads, f"{name}.qweight", {"I32"})
        made = Module(Scheme(kind_of(self._bits), (1, self._group), zeros=True), outputs, words * packed)
        groups = made.scales[1]
        if outputs % packed:
            raise UnreadableError(f"its tensor {name}.qweight has {outputs} outputs, no multiple of {packed}")
        check_shape(heads, f"{name}.qzeros", {"I32"}, (groups, outputs // packed))
        check_shape(heads, f"{name}.scales", DTYPES, (groups, outputs))
        if f"{name}.g_idx" in heads:
            check_shape(heads, f"{name}.g_idx", {"I32", "I64"}, (words * packed,))
        scheme = Scheme(made.scheme.kind, made.scheme.block, zeros=not self._symmetric)
        return Module(scheme, outputs, words * packed)

    def read(self, weights: Weights, name: str, module: Module) -> StoredWeight:
        bits, middle = self._bits, 1 << self._bits - 1
        values = unpack(take(weights, f"{name}.qweight"), bits).permute(1, 0, 2).reshape(module.rows, module.columns)
        words = take(weights, f"{name}.qzeros")
        zeros = unpack(words + ONES[bits] if self._less_one else words, bits).reshape(words.shape[0], -1).T
        if self._symmetric:
            if not bool((zeros == middle).all()):
                raise ValueError(f"qzeros are not all {middle}, as `sym` says")
            values, zeros = (values.to(torch.int16) - middle).to(torch.int8), None
        indices = weights.raw(f"{name}.g_idx")
        group_of = None if indices is None else indices.long()
        if group_of is not None and torch.equal(group_of, self._in_order(module, group_of.device)):
            group_of = None
        return StoredWeight(module, values, take(weights, f"{name}.scales").T, zeros, group_of)

    def _in_order(self, module: Module, device: torch.device) -> torch.Tensor:
        return torch.arange(module.columns, device=device) // (self._group or module.columns)
