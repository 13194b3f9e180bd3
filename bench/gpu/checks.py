"""Each Triton kernel against a reference in float32 or wider, at the sizes of real models where a device runs them, and rows by themselves
against the same rows in a batch, bit by bit. The tests of tests/kernels_triton go over odd sizes; this goes over large ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tokenbus.core import rng
from tokenbus.kernels.torch_ops import elementwise as reference
from tokenbus.kernels.torch_ops.attention import quantize
from tokenbus.kernels.triton import elementwise
from tokenbus.kernels.triton.attention import paged_attention
from tokenbus.kernels.triton.int4_weight import quantize_int4
from tokenbus.kernels.triton.kv_write import write_kv
from tokenbus.kernels.triton.matmul import matmul
from tokenbus.kernels.triton.quantized_matmul import quantize_activations, quantize_weight, w8a8_matmul
from tokenbus.kernels.triton.sampling import OK, SamplingRows, filter_logits, sample
from tokenbus.kernels.triton.verify import verify
from tokenbus.kernels.triton.weight_only_matmul import int4_matmul, int8_weight_matmul

from .attention import close, stored
from .caches import Paged, filled
from .record import Record, finish, make_record, part_options

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INT8, FP8 = torch.int8, torch.float8_e4m3fn
NORM_ERROR = {F32: 1e-5, F16: 2e-3, BF16: 1e-2}
"""Of a result relative to its reference's norm: one rounding to the dtype, and sums in another order."""
FP8_ERROR = 2e-3
"""At least, of products of e4m3: tensor cores add them with fewer bits than float32 has."""
UNLIKE = 50
"""Of so many sampled rows one may get another token than on the CPU: logarithms differ in their last bits."""


@dataclass(frozen=True)
class Sizes:
    """What is checked on a device, or tiny in the interpreter."""

    device: str
    products: tuple[tuple[int, int, int], ...]
    """Rows, outputs, inputs."""
    contexts: tuple[int, ...]
    new: tuple[int, ...]
    """Of each context: how many tokens are queries."""
    width: int
    vocabulary: int
    rows: int
    floats: tuple[torch.dtype, ...]


DEVICE = Sizes(
    "cuda", ((1, 4096, 4096), (32, 6144, 4096), (77, 1000, 4160), (300, 4096, 14336)), (1, 4097, 700, 2048, 130),
    (1, 1, 700, 65, 1), 4096, 128256, 64, (F32, BF16, F16),
)  # fmt: skip
TINY = Sizes("cpu", ((1, 48, 64), (5, 40, 160)), (1, 67, 20), (1, 1, 20), 96, 300, 4, (F32, BF16))


def run(record: Record, sizes: Sizes, shard: int = 0, shards: int = 1) -> None:
    """Every `shards`-th check, from the `shard`-th on."""
    for name, call in itertools.islice(_all(record, sizes), shard, None, shards):
        record.attempt(name, call, needs=2)


def _all(record: Record, s: Sizes) -> Iterator[tuple[str, Callable[[], object]]]:
    caches = [(dtype, dtype) for dtype in s.floats] + [(BF16, FP8), (BF16, INT8)]
    shapes = ((8, 1, 128), (32, 8, 64)) if s.device == "cuda" else ((4, 1, 16),)
    for (dtype, kept), (heads, kv_heads, dim) in itertools.product(caches, shapes):
        name = f"attention, {_name(dtype)}, KV {_name(kept)}, {heads} / {kv_heads} heads, head {dim}"
        yield name, lambda a=(name, dtype, kept, heads, kv_heads, dim): attention(record, s, *a)
    for kept in (INT8, FP8):
        yield f"KV write, {_name(kept)}", lambda k=kept: kv_write(record, s, k)
    for (m, n, k), dtype in itertools.product(s.products, s.floats):
        name = f"{m} x {n} x {k}, {_name(dtype)}"
        yield name, lambda a=(name, m, n, k, dtype): products(record, s, *a)
    for dtype in s.floats:
        yield f"elementwise, {_name(dtype)}", lambda d=dtype: rows_alike(record, s, d)
    yield "sampling", lambda: sampling(record, s)
    yield "verification of drafts", lambda: verification(record, s)


def near(record: Record, name: str, found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    """NaN never passes: no comparison with it holds."""
    expected = expected.double()
    error = float((found.double() - expected).norm() / expected.norm())
    record.check(name, error <= bound, f"relative error {error:.1e}, bound {bound:.0e}")


def equal(record: Record, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    same = found.shape == expected.shape and torch.equal(found, expected)
    record.check(name, same, "" if same else f"{int((found != expected).sum())} of {found.numel()} differ")


def attention(
    record: Record, s: Sizes, name: str, dtype: torch.dtype, kept: torch.dtype, heads: int, kv_heads: int, dim: int
) -> None:
    cache = filled(s.contexts, kv_heads, dim, dtype=dtype, stored=kept, device=s.device)
    q = torch.randn(sum(s.new), heads, dim, device=s.device).to(dtype)
    found = paged_attention(q, cache.k, cache.v, cache.plan(s.new), dim**-0.5)
    free = paged_attention(q, cache.k, cache.v, cache.plan(s.new), dim**-0.5, invariant=False, longest=max(s.new))
    record.check(f"{name}: not invariant", *close(free, q, cache, list(s.new), dim**-0.5))
    starts = list(itertools.accumulate(s.new, initial=0))
    for r, count in enumerate(s.new):
        alone = Paged(cache.k, cache.v, [cache.tables[r]], [cache.lengths[r]])
        mine = q[starts[r] : starts[r + 1]]
        ok, detail = close(found[starts[r] : starts[r + 1]], mine, alone, [count], dim**-0.5)
        record.check(f"{name}: request {r}", ok, detail)
        by_itself = paged_attention(mine, cache.k, cache.v, alone.plan([count]), dim**-0.5)
        equal(record, f"{name}: request {r} alone, bit by bit", by_itself, found[starts[r] : starts[r + 1]])
    ones = [1] * len(s.contexts)
    decoded = paged_attention(q[: len(ones)], cache.k, cache.v, cache.plan(ones), dim**-0.5, invariant=False, longest=1)
    record.check(f"{name}: decode step, not invariant", *close(decoded, q[: len(ones)], cache, ones, dim**-0.5))


def kv_write(record: Record, s: Sizes, kept: torch.dtype) -> None:
    """int8 as the CPU's reference has it, bit by bit; e4m3 within half a step of its three bits."""
    heads, dim, tokens = 4, 64, s.rows * 3
    k, v = (torch.randn(tokens, heads, dim, device=s.device) for _ in "kv")
    caches = [torch.zeros(tokens, 16, heads, dim + 4, dtype=INT8, device=s.device).view(kept) for _ in "kv"]
    slots = torch.randperm(tokens * 16, device=s.device)[:tokens]
    write_kv(k, v, caches[0], caches[1], slots)
    for which, rows, cache in (("K", k, caches[0]), ("V", v, caches[1])):
        found = stored(cache, slots)
        if kept == INT8:
            packed = quantize(rows.cpu())
            expected = packed[..., :-4].float() * packed[..., -4:].contiguous().view(F32)
            equal(record, f"KV write, int8: {which}", found.cpu(), expected)
        else:
            scale = rows.abs().amax(-1, keepdim=True) / 448
            worst = float(((found - rows).abs() / (rows.abs() / 16).clamp_min(scale * 2**-10)).max())
            record.check(f"KV write, fp8: {which}", worst <= 1.01, f"at most {worst:.3f} of half a step from the value")


def products(record: Record, s: Sizes, name: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(rows, k, device=s.device).to(dtype) for rows in (m, n))
    bias = torch.randn(n, device=s.device).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    some = slice(m // 2, m // 2 + 1)

    def compare(kind: str, call: Callable[..., torch.Tensor], expected: torch.Tensor) -> None:
        bound = max(NORM_ERROR[dtype], FP8_ERROR) if "fp8" in kind else NORM_ERROR[dtype]
        whole = call(x, invariant=True)
        near(record, f"{kind}, {name}", whole, expected, bound)
        near(record, f"{kind}, {name}, not invariant", call(x, invariant=False), expected, bound)
        equal(record, f"{kind}, {name}: a row alone, bit by bit", call(x[some], invariant=True), whole[some])

    compare("product", lambda x, invariant: matmul(x, weight, bias, invariant=invariant), exact)
    for kept in (INT8, FP8):
        q, scales = quantize_weight(weight, kept)
        rows, row_scales = quantize_activations(x, kept)
        given = rows.double() * row_scales.double()[:, None]
        expected = given @ (q.double() * scales.double()[:, None]).T + bias.double()

        def w8a8(x: torch.Tensor, *, invariant: bool, kept: torch.dtype = kept, q=q, scales=scales) -> torch.Tensor:
            return w8a8_matmul(*quantize_activations(x, kept), q, scales, bias, dtype=dtype, invariant=invariant)

        compare(f"W8A8 {_name(kept)}", w8a8, expected)
    q, scales = quantize_weight(weight)
    expected = x.double() @ (q.double() * scales.double()[:, None]).T + bias.double()
    compare("W8A16", lambda x, invariant: int8_weight_matmul(x, q, scales, bias, invariant=invariant), expected)
    packed = quantize_int4(weight)
    expected = x.double() @ packed.dequantized().double().T + bias.double()
    compare("W4A16", lambda x, invariant: int4_matmul(x, packed, bias, invariant=invariant), expected)


def rows_alike(record: Record, s: Sizes, dtype: torch.dtype) -> None:
    """Norms, activations, rotary embedding and embedding against torch's own on float32 values."""
    bound, name = NORM_ERROR[dtype], _name(dtype)
    x, other = (torch.randn(s.rows, s.width, device=s.device).to(dtype) for _ in "xy")
    weight = (1 + 0.3 * torch.randn(s.width, device=s.device)).to(dtype)
    wide = [t.float() for t in (x, other, weight)]
    normed = F.rms_norm(wide[0], (s.width,), wide[2], 1e-5)
    near(record, f"RMSNorm, {name}", elementwise.rms_norm(x, weight, 1e-5), normed, bound)
    total = (x + other).float()
    found, kept = elementwise.add_rms_norm(x, other, weight, 1e-5)
    near(record, f"add + RMSNorm, {name}", found, F.rms_norm(total, (s.width,), wide[2], 1e-5), bound)
    near(record, f"residual sum, {name}", kept, total, bound)
    total = normed + wide[1]
    found, kept = elementwise.norm_add_rms_norm(x, other, weight, weight, 1e-5)
    near(record, f"norm + add + norm, {name}", found, F.rms_norm(total, (s.width,), wide[2], 1e-5), bound)
    near(record, f"residual sum of a norm, {name}", kept, total, bound)
    near(record, f"soft-cap, {name}", elementwise.softcap(x, 3.0), 3 * torch.tanh(wide[0] / 3), bound)
    exact: dict[elementwise.Activation, torch.Tensor] = {
        "silu": F.silu(wide[0]),
        "gelu_tanh": F.gelu(wide[0], approximate="tanh"),
        "gelu": F.gelu(wide[0]),
    }
    for kind, activated in exact.items():
        near(record, f"{kind} * up, {name}", elementwise.gated(kind, x, other), activated * wide[1], bound)
    heads, dim, most = 4, s.width // 4, 512
    angles = torch.randn(most, dim // 2, device=s.device)
    positions = torch.randint(0, most, (s.rows,), device=s.device)
    q, k = (t.view(s.rows, heads, dim).clone() for t in (x, other))
    cos, sin = angles.cos(), angles.sin()
    expected = [reference.rope(t.float(), cos[positions], sin[positions]) for t in (q, k)]
    normed_q, normed_k = q.clone(), k.clone()
    elementwise.rope_(normed_q, normed_k, positions, cos, sin, q_weight=weight[:dim], k_weight=weight[-dim:], eps=1e-5)
    elementwise.rope_(q, k, positions, cos, sin)
    for which, turned, right in (("q", q, expected[0]), ("k", k, expected[1])):
        near(record, f"rotary embedding of {which}, {name}", turned, right, bound)
    for which, turned, of, w in (("q", normed_q, x, weight[:dim]), ("k", normed_k, other, weight[-dim:])):
        heads_of = F.rms_norm(of.float().view(s.rows, heads, dim), (dim,), w.float(), 1e-5)
        right = reference.rope(heads_of, cos[positions], sin[positions])
        near(record, f"norm and rotary embedding of {which}, {name}", turned, right, bound)
    ids = torch.randint(0, s.rows, (3 * s.rows,), device=s.device)
    equal(record, f"embedding, {name}", elementwise.embed(x, ids), x[ids])


def sampling(record: Record, s: Sizes) -> None:
    logits = 3 * torch.randn(s.rows, s.vocabulary, device=s.device)
    neutral = SamplingRows.make([0.0] * s.rows, [7] * s.rows, list(range(s.rows)), device=s.device)
    greedy = sample(logits, neutral)
    equal(record, "greedy sampling", greedy.tokens, logits.argmax(-1))
    record.check("sampling: states", bool((greedy.states == OK).all()))
    drawn = SamplingRows.make([1.0] * s.rows, [7] * s.rows, list(range(s.rows)), device=s.device)
    tokens = sample(logits, drawn).tokens.tolist()
    values = (logits - logits.amax(-1, keepdim=True)).cpu().numpy()
    expected = [rng.sample(row.copy(), 7, position, 0) for position, row in enumerate(values)]
    wrong = sum(a != b for a, b in zip(tokens, expected, strict=True))
    record.check("sampled tokens are the CPU path's", wrong <= s.rows // UNLIKE, f"{wrong} of {s.rows} differ")
    filtered = filter_logits(
        logits,
        SamplingRows.make([1.0] * s.rows, [7] * s.rows, list(range(s.rows)), top_k=[40] * s.rows, top_p=[0.9] * s.rows, device=s.device),
    )  # fmt: skip
    allowed = logits >= logits.topk(min(40, s.vocabulary), -1).values[:, -1:]
    top = torch.where(allowed, logits, -torch.inf).double().softmax(-1)
    order = top.sort(-1, descending=True)
    sets = order.values.cumsum(-1) - order.values < 0.9
    wanted = torch.zeros_like(allowed).scatter(-1, order.indices, sets) & allowed
    equal(record, "top-k and top-p sets", filtered > -torch.inf, wanted)


def verification(record: Record, s: Sizes) -> None:
    counts = [0, 1, 5, 40, 3][: 3 if s.device == "cpu" else 5]
    starts = list(itertools.accumulate(counts, initial=0))
    generator = torch.Generator().manual_seed(3)
    drafts = torch.randint(0, 3, (starts[-1],), generator=generator)
    sampled = torch.randint(0, 3, (starts[-1] + len(counts),), generator=generator)
    accepted, last = [], []
    for r, count in enumerate(counts):
        mine, its = drafts[starts[r] : starts[r + 1]], sampled[starts[r] + r : starts[r + 1] + r + 1]
        right = next((i for i in range(count) if mine[i] != its[i]), count)
        accepted.append(right)
        last.append(int(its[right]))
    found = verify(drafts.to(s.device), torch.tensor(starts, device=s.device), sampled.to(s.device))
    equal(record, "accepted drafts", found.accepted.cpu().long(), torch.tensor(accepted))
    equal(record, "tokens behind the drafts", found.last.cpu().long(), torch.tensor(last))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8").replace("float", "fp").replace("bfp", "bf")


def main() -> None:
    """One of several processes that share the checks: compiling takes most of the time."""
    parser = part_options(__doc__)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    options = parser.parse_args()
    record = make_record(options)
    torch.manual_seed(options.shard)
    run(record, TINY if options.interpret else DEVICE, options.shard, options.shards)
    finish(record)


if __name__ == "__main__":
    main()
