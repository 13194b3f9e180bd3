"""Paged attention's speed: decode steps against the copy bandwidth, prompts against the matmul rate, both against torch's SDPA.

torch's side has K and V of the same sizes in one piece for each request and head; the fastest of its backends that takes them counts, with
`enable_gqa` or with the group's query heads as rows of one query, which a decode step allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tokenbus.kernels.triton.attention import paged_attention

from .caches import Paged, filled
from .reaches import CONTEXTS
from .record import Record, finish, make_record, part_options
from .timing import Times, measure
from .warm import compile_beforehand

BF16, FP8, INT8 = torch.bfloat16, torch.float8_e4m3fn, torch.int8
STORED = {"bf16": BF16, "fp8": FP8, "int8": INT8}
BATCH = 64
WARM_TOKENS = 2100
"""More than one split of any size."""
HEAD_DIM = 128
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, BF16: 1e-2}
"""Of a result's distance from its reference, relative to the reference's norm: weights and results are rounded to the dtype; what one-byte
caches round is in both."""


@dataclass(frozen=True)
class Decode:
    context: int
    kv: str = "bf16"
    heads: int = 64
    kv_heads: int = 8
    block_size: int = 16
    main: bool = False
    """Judged by a reach."""

    @property
    def name(self) -> str:
        return f"{self.heads} / {self.kv_heads} heads, context {self.context}, block {self.block_size}, {self.kv}"


def cases() -> Iterator[Decode]:
    """The judged ones first, from short to long contexts."""
    for context in CONTEXTS:
        for kv in ("bf16", "fp8"):
            yield Decode(context, kv, main=True)
    yield Decode(CONTEXTS[1], "int8")
    yield Decode(CONTEXTS[1], heads=32, kv_heads=4)
    yield Decode(CONTEXTS[1], heads=32, kv_heads=8)
    yield Decode(CONTEXTS[1], block_size=128)
    yield Decode(1024)


def decode(record: Record, case: Decode, batch: int = BATCH, device: str = "cuda") -> None:
    cache = filled(
        [case.context] * batch, case.kv_heads, HEAD_DIM, block_size=case.block_size, stored=STORED[case.kv], device=device
    )
    q = torch.randn(batch, case.heads, HEAD_DIM, device=device).to(BF16)
    plan, scale = cache.plan([1] * batch), HEAD_DIM**-0.5

    def call(**options: Any) -> torch.Tensor:
        return paged_attention(q, cache.k, cache.v, plan, scale, **options)

    free = {"invariant": False, "longest": 1}
    times = measure(lambda _: call(**free))
    exact = measure(lambda _: call())
    record.check(f"decode attention, {case.name}", *close(call(**free), q, cache, [1] * batch, scale))
    read = cache.read_bytes
    cache.drop()
    share = read / times.median / record.known.get("limit.copy", float("nan"))
    row = {"case": case.name, "us": times.shown(), "TB/s": f"{read / times.median / 1e12:.3f}", "of copy": f"{share:.1%}"}
    row["invariant, us"] = exact.shown()
    known, key = record.known, f"decode.{case.kv}.{case.context}"
    if case.main:
        record.figure(f"{key}.share", share)
        record.figure(f"{key}.seconds", times.median)
    if case.kv == "bf16":
        theirs, which = sdpa_decode(case, batch, device)
        row |= {"torch SDPA, us": theirs.shown() if theirs else "none", "which": which}
        if theirs and case.main:
            record.figure(f"{key}.over_sdpa", times.median / theirs.median)
    elif (bf16 := known.get(f"decode.bf16.{case.context}.seconds")) and case.main:
        record.figure(f"{key}.speedup", bf16 / times.median)
        row["times the bf16 rate"] = f"{bf16 / times.median:.2f}"
    record.row(f"Decode attention, batch {batch}, head {HEAD_DIM}", **row)


def sdpa_decode(case: Decode, batch: int, device: str) -> tuple[Times | None, str]:
    k, v = (torch.randn(batch, case.kv_heads, case.context, HEAD_DIM, device=device, dtype=BF16) for _ in "kv")
    q = torch.randn(batch, case.heads, 1, HEAD_DIM, device=device, dtype=BF16)
    group = q.view(batch, case.kv_heads, case.heads // case.kv_heads, HEAD_DIM)
    return fastest(
        {
            "gqa": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
            "group as rows": lambda: F.scaled_dot_product_attention(group, k, v),
        }
    )


def fastest(calls: dict[str, Callable[[], torch.Tensor]]) -> tuple[Times | None, str]:
    """The quickest of the calls under each of torch's backends that takes it, and which it was."""
    best: tuple[Times | None, str] = None, ""
    for backend in BACKENDS:
        for name, call in calls.items():
            try:
                with sdpa_kernel(backend):
                    times = measure(lambda _, call=call: call(), seconds=0.1)
            except RuntimeError:  # this backend doesn't take these shapes, or isn't there
                continue
            if best[0] is None or times.median < best[0].median:
                best = times, f"{backend.name.removesuffix('_ATTENTION').lower()}, {name}"
    return best


def prompt(record: Record, lengths: list[int], heads: int = 32, kv_heads: int = 8, device: str = "cuda") -> None:
    """Causal attention of whole prompts, all in one launch."""
    cache = filled(lengths, kv_heads, HEAD_DIM, device=device)
    q = torch.randn(sum(lengths), heads, HEAD_DIM, device=device).to(BF16)
    plan, scale = cache.plan(lengths), HEAD_DIM**-0.5

    def call(**options: Any) -> torch.Tensor:
        return paged_attention(q, cache.k, cache.v, plan, scale, **options)

    free = {"invariant": False, "longest": max(lengths)}
    times = measure(lambda _: call(**free))
    exact = measure(lambda _: call())
    name = f"{len(lengths)} x {lengths[0]} tokens, {heads} / {kv_heads} heads"
    record.check(f"prompt attention, {name}", *close(call(**free), q, cache, lengths, scale))
    flops = sum(4 * HEAD_DIM * heads * n * (n + 1) // 2 for n in lengths)
    share = flops / times.median / record.known.get("limit.matmul", float("nan"))
    shape = (len(lengths), -1, lengths[0], HEAD_DIM)
    qs, ks, vs = (
        torch.randn(len(lengths), h, lengths[0], HEAD_DIM, device=device, dtype=BF16) for h in (heads, kv_heads, kv_heads)
    )
    wide = [x.repeat_interleave(heads // kv_heads, dim=1).view(shape) for x in (ks, vs)]
    theirs, which = fastest(
        {
            "gqa": lambda: F.scaled_dot_product_attention(qs, ks, vs, is_causal=True, enable_gqa=True),
            "heads repeated": lambda: F.scaled_dot_product_attention(qs, wide[0], wide[1], is_causal=True),
        }
    )
    record.row(
        f"Prompt attention, causal, head {HEAD_DIM}, bf16",
        **{
            "case": name,
            "us": times.shown(),
            "TFLOP/s": f"{flops / times.median / 1e12:.0f}",
            "of matmul": f"{share:.1%}",
            "invariant, us": exact.shown(),
            "torch SDPA, us": theirs.shown() if theirs else "none",
            "which": which,
            "over SDPA": f"{times.median / theirs.median:.2f}" if theirs else "",
        },
    )
    if lengths == [8192]:
        record.figure("prompt.8192.share", share)


def close(out: torch.Tensor, q: torch.Tensor, cache: Paged, new: list[int], scale: float) -> tuple[bool, str]:
    """Whether the first and the last request's results are those of float32 on what the caches hold, and how far they are."""
    worst = 0.0
    for request in {0, len(new) - 1}:
        start, length = sum(new[:request]), cache.lengths[request]
        rows = slice(start + max(0, new[request] - 64), start + new[request])  # the last 64 tokens: references are slow
        k, v = (stored(of, cache.slots(request)) for of in (cache.k, cache.v))
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        scores = q[rows].float().transpose(0, 1) @ k.transpose(1, 2) * scale
        count = rows.stop - rows.start
        hidden = torch.arange(length, device=q.device) > torch.arange(length - count, length, device=q.device)[:, None]
        expected = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)
        error = (out[rows].float() - expected).norm() / expected.norm()
        worst = max(worst, float(error)) if torch.isfinite(error) else float("inf")
    bound = BOUNDS[q.dtype]
    return worst <= bound, f"relative error {worst:.1e}, bound {bound:.0e}"


def stored(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [len(slots), kv_heads, head_dim] of a cache of any dtype."""
    from tokenbus.kernels.triton.attention import values_and_scales

    values, scales = values_and_scales(cache)
    size = cache.shape[1]
    rows = values[slots // size, slots % size]
    if cache.itemsize > 1:
        return rows.float()
    return rows.view(cache.dtype).float() * scales[slots // size, slots % size][..., None]


PROMPTS = ([8192], [2048] * 4, [32768])


def warm(case: Decode | int, device: str = "cuda") -> None:
    """Compile what a decode case, or prompts (with any number), will run: few requests, of more than one split."""
    one = case if isinstance(case, Decode) else Decode(0, heads=32, kv_heads=8)
    new = 1 if isinstance(case, Decode) else WARM_TOKENS
    cache = filled([WARM_TOKENS] * 2, one.kv_heads, HEAD_DIM, block_size=one.block_size, stored=STORED[one.kv], device=device)
    q = torch.randn(2 * new, one.heads, HEAD_DIM, device=device).to(BF16)
    for invariant in (True, False):
        paged_attention(
            q, cache.k, cache.v, cache.plan([new] * 2), HEAD_DIM**-0.5, invariant=invariant, longest=None if invariant else new
        )


def main() -> None:
    record = make_record(part_options(__doc__).parse_args())
    kinds = {(case.kv, case.heads, case.kv_heads, case.block_size): case for case in cases()}
    compile_beforehand(record, warm, [0, *kinds.values()])
    torch.manual_seed(0)
    record.attempt("prompt attention", lambda: prompt(record, PROMPTS[0]))
    for case in cases():
        record.attempt(case.name, lambda case=case: decode(record, case), needs=5)
        torch.cuda.empty_cache()
    for lengths in PROMPTS[1:]:
        record.attempt("prompt attention", lambda lengths=lengths: prompt(record, lengths), needs=5)
    finish(record)


if __name__ == "__main__":
    main()
