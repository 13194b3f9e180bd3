"""What `tune` measures: the rules of the tables, the calls that each is measured on, and the candidates for it."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenbus.kernels.triton import configs
from tokenbus.kernels.triton.attention import paged_attention
from tokenbus.kernels.triton.int4_weight import quantize_int4
from tokenbus.kernels.triton.matmul import matmul
from tokenbus.kernels.triton.quantized_matmul import quantize_activations, quantize_weight, w8a8_matmul
from tokenbus.kernels.triton.weight_only_matmul import int4_matmul, int8_weight_matmul

from .caches import filled

BF16 = torch.bfloat16
HEAD_DIM = 128
Config = Mapping[str, int]
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (16384, 2048))
"""Outputs and inputs."""
NARROW = 8192
"""Outputs up to which invariant kernels have a rule of their own."""


@dataclass(frozen=True)
class Case:
    """A product of m rows with a weight of n outputs and k inputs."""

    m: int
    n: int
    k: int

    @property
    def shape(self) -> dict[str, int]:
        """As the tables' rules look at it."""
        return {"m": self.m, "n": self.n, "k": self.k}

    @property
    def nbytes(self) -> int:
        """Of a set of inputs, at least half of it."""
        return self.n * self.k

    @property
    def small(self) -> Case:
        """One that needs the same machine code."""
        return self


@dataclass(frozen=True)
class Attention:
    """Requests of one context length, the last `new` tokens of each being queries."""

    requests: int
    context: int
    new: int
    heads: int = 64
    kv_heads: int = 8
    stored: torch.dtype = BF16

    @property
    def shape(self) -> dict[str, int]:
        return {"m": self.new * self.heads // self.kv_heads, "head_dim": HEAD_DIM, "kv_bits": 8 * self.stored.itemsize}

    @property
    def nbytes(self) -> int:
        return 2 * self.requests * self.context * self.kv_heads * HEAD_DIM * self.stored.itemsize

    @property
    def small(self) -> Attention:
        return dataclasses.replace(self, requests=1, context=1100, new=min(self.new, 1100))


@dataclass(frozen=True)
class RuleToTune:
    """One rule of a table."""

    kernel: str
    when: Mapping[str, int]
    cases: tuple[Case | Attention, ...]

    @property
    def invariant(self) -> bool:
        return self.kernel.endswith(configs.INVARIANT)


def rules(kernel: str) -> Iterator[RuleToTune]:
    """For activations of 16 bits (8 where the kernel multiplies 8-bit ones); of attention, for heads of up to 128."""
    if kernel in ATTENTION:
        wide = {"bits": 16, "head_dim": HEAD_DIM}
        for when, cases in ATTENTION[kernel]:
            yield RuleToTune(kernel, wide | when, cases)
        return
    bits = {} if kernel.removesuffix(configs.INVARIANT) in {"int8_matmul", "fp8_matmul"} else {"bits": 16}
    if kernel.endswith(configs.INVARIANT):
        for when, shapes in (
            ({"n": NARROW}, [s for s in SHAPES if s[0] <= NARROW]),
            ({}, [s for s in SHAPES if s[0] > NARROW]),
        ):
            yield RuleToTune(kernel, {**bits, **when}, tuple(Case(m, n, k) for n, k in shapes for m in (1, 32, 1024)))
        return
    for when, rows in (({"m": 16}, (1, 16)), ({"m": 64}, (32, 64)), ({}, (256, 2048))):
        yield RuleToTune(kernel, {**bits, **when}, tuple(Case(m, n, k) for n, k in SHAPES[1:4] for m in rows))


def tunable() -> list[str]:
    """Kernels of the default table that have candidates and that this knows how to call."""
    table = configs.load(configs.DEFAULT)
    assert table is not None
    return [kernel for kernel in table.kernels if kernel.removesuffix(configs.INVARIANT) in CALLS]


def _product(case: Case, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
    x = torch.randn(case.m, case.k, device=device).to(BF16)
    weights = [torch.randn(case.n, case.k, device=device).to(BF16) for _ in range(copies)]
    return lambda i, config: matmul(x, weights[i], config=config)


def _w8a8(kept: torch.dtype) -> Callable[[Case, str, int], Callable[[int, Config], torch.Tensor]]:
    def make(case: Case, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
        x, scales = quantize_activations(torch.randn(case.m, case.k, device=device).to(BF16), kept)
        weights = [quantize_weight(torch.randn(case.n, case.k, device=device), kept) for _ in range(copies)]
        return lambda i, config: w8a8_matmul(x, scales, *weights[i], dtype=BF16, config=config)

    return make


def _w8a16(case: Case, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
    x = torch.randn(case.m, case.k, device=device).to(BF16)
    weights = [quantize_weight(torch.randn(case.n, case.k, device=device)) for _ in range(copies)]
    return lambda i, config: int8_weight_matmul(x, *weights[i], config=config)


def _w4a16(case: Case, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
    x = torch.randn(case.m, case.k, device=device).to(BF16)
    weights = [quantize_int4(torch.randn(case.n, case.k, device=device)) for _ in range(copies)]
    return lambda i, config: int4_matmul(x, weights[i], config=config)


def _attention(*, invariant: bool) -> Callable[[Attention, str, int], Callable[[int, Config], torch.Tensor]]:
    def make(case: Attention, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
        lengths, new = [case.context] * case.requests, [case.new] * case.requests
        longest = None if invariant else case.new
        sets = []
        for _ in range(copies):
            cache = filled(lengths, case.kv_heads, HEAD_DIM, stored=case.stored, device=device)
            q = torch.randn(sum(new), case.heads, HEAD_DIM, device=device).to(BF16)
            sets.append((q, cache.k, cache.v, cache.plan(new), HEAD_DIM**-0.5))
        return lambda i, config: paged_attention(*sets[i], config=config, invariant=invariant, longest=longest)

    return make


_DECODE, _PROMPT = Attention(64, 4096, 1), Attention(1, 8192, 8192, heads=32)
_FP8 = dataclasses.replace(_DECODE, stored=torch.float8_e4m3fn)
ATTENTION: dict[str, list[tuple[dict[str, int], tuple[Attention, ...]]]] = {
    "attention_decode": [
        ({"m": 16, "kv_bits": 8}, (_FP8, dataclasses.replace(_FP8, requests=8, context=8192))),
        ({"m": 16}, (_DECODE, dataclasses.replace(_DECODE, requests=8, context=8192))),
    ],
    "attention_prompt": [({}, (_PROMPT, dataclasses.replace(_PROMPT, requests=4, context=2048, new=2048)))],
    "attention_invariant": [({}, (_DECODE, _PROMPT))],
}
"""Rules of attention's tables, for queries of 16 bits."""
CALLS: dict[str, Callable[[Any, str, int], Callable[[int, Config], torch.Tensor]]] = {
    "attention_decode": _attention(invariant=False),
    "attention_prompt": _attention(invariant=False),
    "attention": _attention(invariant=True),
    "matmul": _product,
    "int8_matmul": _w8a8(torch.int8),
    "fp8_matmul": _w8a8(torch.float8_e4m3fn),
    "int8_weight_matmul": _w8a16,
    "int4_weight_matmul": _w4a16,
}
"""By kernel: (case, device, sets of weights) -> a function that runs it on the i-th set with a config."""


def call_of(kernel: str, case: Case | Attention, device: str, copies: int) -> Callable[[int, Config], torch.Tensor]:
    """A function that runs the kernel on the i-th of so many sets of inputs, with a config."""
    return CALLS[kernel.removesuffix(configs.INVARIANT)](case, device, copies)


def default_config(rule: RuleToTune) -> dict[str, int]:
    """What the default table has for the rule's first case."""
    shape = {**rule.cases[0].shape, "bits": rule.when.get("bits", 8)}
    if rule.invariant:
        del shape["m"]
    return configs.config_for("", rule.kernel, **shape)


def candidates(rule: RuleToTune, seed: int = 0) -> list[dict[str, int]]:
    """The default, then the others in an order drawn by chance. Narrow calls get no tiles that are much taller than they are."""
    default = default_config(rule)
    tallest = max(case.shape["m"] for case in rule.cases)
    options = {"kv_bits": rule.when["kv_bits"]} if "kv_bits" in rule.when else {}
    found = [
        c for c in configs.candidates(rule.kernel, **options) if c != default and c.get("BLOCK_M", 0) <= max(16, 2 * tallest)
    ]
    random.Random(seed).shuffle(found)
    return [default, *found]
