"""The int8 K/V cache in the C++ attention kernel and the fused decoder, on every instruction set of this machine."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tokenbus.core.models.base import KVCache
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.worker.cpu_attention import CpuAttention
from tokenbus.core.worker.torch_attention import TorchAttention
from tokenbus.kernels.torch_ops.attention import quantize

from ..kernels.conftest import Case
from ..models.conftest import Paged, make_tiny, random_tokens
from .test_attention import BF16, F32, TOLERANCE


def make(lengths, **options):
    case = Case.make(lengths, stored="int8", **options)
    case.backend = CpuAttention()
    return case


def exact(case, r, v):
    """float64 attention over K as the cache stores it, and v."""
    k, n, p = case.stored(case.k[r]).double(), len(v), case.params
    k, v = (x.repeat_interleave(case.q[r].shape[1] // x.shape[1], dim=1) for x in (k, v.double()))
    scores = torch.einsum("qhd,khd->hqk", case.q[r].double(), k) * p.scale
    if p.softcap:
        scores = p.softcap * torch.tanh(scores / p.softcap)
    ago = torch.arange(n)[:, None] - torch.arange(n)
    hidden = (ago < 0) | (ago >= (p.window or n))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "window", "softcap"),
    [
        (9, 3, 64, 16, None, None),
        (4, 1, 256, 16, 40, 5.0),
        (2, 2, 4, 16, 200, None),
        (6, 2, 80, 8, None, 30.0),
        (3, 3, 44, 32, 130, None),
        (5, 1, 72, 12, 1, None),
        (1, 1, 128, 256, 17, None),
        (14, 2, 20, 4, 300, None),
    ],
)
def test_matches_the_reference(heads, kv_heads, dim, block_size, window, softcap, dtype, isa):
    shape = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "block_size": block_size}
    case = make([1, 7, 130, 700], **shape, dtype=dtype, window=window, softcap=softcap)
    for r, found in enumerate(case.run([{3: 129, 1: 1, 2: 130}, {1: 5, 3: 570}, {3: 1, 1: 1, 0: 1}])):
        assert found.dtype == dtype
        wanted = exact(case, r, case.stored(case.v[r]))
        rounding = exact(case, r, case.stored(case.v[r]).abs())  # of weights times V's scale, to bfloat16 at worst
        assert bool(((found - wanted).abs() <= TOLERANCE[dtype] * (1 + wanted.abs() + rounding)).all())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rows_are_stored_as_the_torch_kernel_does(dtype, isa):
    """Zeros, the tiniest and the largest numbers, halves between integers, NaN and infinities among them."""
    case = make([9, 40], dim=44, dtype=dtype)
    rows = case.k[0]
    rows[0] = 0
    rows[1], rows[2] = 1e-42, 3e38
    rows[3, :, 0], rows[4, :, 43], rows[5, :, 7] = float("nan"), float("inf"), -float("inf")
    rows[6] = torch.arange(44) + 0.5
    rows[6, :, 0] = -127
    table = dict(enumerate(case.tables([0, 1])[0]))
    caches, others = case.caches(20, float("nan")), case.caches(20, float("nan"))
    batch = case.batch({0: slice(0, 9), 1: slice(0, 40)}, table)
    tensors = [torch.cat(of) for of in (case.q, case.k, case.v)]
    case.backend.attend(*tensors, *caches, batch, case.params)
    batch.prepared = None
    TorchAttention().attend(*tensors, *others, batch, case.params)
    slots = batch.slots
    for cache, other, x in zip(caches, others, tensors[1:], strict=True):
        stored = cache.flatten(0, 1)[slots]
        assert torch.equal(stored, other.flatten(0, 1)[slots])
        assert torch.equal(stored, quantize(x))
    values, scales = stored[..., :44], stored[..., 44:].contiguous().view(F32)
    assert torch.equal(scales, tensors[2].float().abs().amax(-1, keepdim=True) / 127)
    assert bool(((values * scales - tensors[2].float()).abs() <= scales * 0.50001).all())
    integers = caches[0].flatten(0, 1)[slots[:9]]
    assert integers[6, 0, 1:44].tolist() == [round(i + 0.5) for i in range(1, 44)]
    assert integers[6, 0, 0] == -127
    assert integers[3:6, :, :44].count_nonzero() == 0
    scales = integers[..., 44:].contiguous().view(F32)
    assert bool(scales[3:6].isnan().all())
    assert bool((scales[:2] == 0).all())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": BF16},
        {"window": 100, "dtype": BF16},
        {"dim": 40, "heads": 2, "kv_heads": 2, "softcap": 10.0},
        {"dim": 24, "heads": 14, "kv_heads": 2, "block_size": 4, "dtype": BF16, "window": 300},
    ],
    ids=str,
)
def test_same_bits_however_a_prompt_is_divided(options, isa, threads):
    n = 590
    case = make([n], **options)
    threads(1)
    whole = case.run([{0: n}])[0]
    for count in (1, 2, 3):
        threads(count)
        for sizes in [[n - 1, 1], [256, 256, 78], [127, 2, 461], [9] * 65 + [5], [200, *[3] * 130]]:
            assert torch.equal(case.run([{0: size} for size in sizes], fill=float("nan"))[0], whole), (count, sizes[:3])
    assert torch.equal(case.run([{0: 1}] * n)[0], whole)


def test_same_bits_alone_and_in_a_batch(isa, threads):
    lengths = [1 + (37 * r) % 400 for r in range(24)]
    case = make(lengths, dtype=BF16)
    threads(1)
    alone = [case.run([{r: lengths[r]}])[r] for r in range(24)]
    threads(2)
    whole = case.run([{r: lengths[r] for r in reversed(range(24))}], fill=float("nan"))
    assert all(torch.equal(*pair) for pair in zip(whole, alone, strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_nan_reaches_those_who_see_it_and_nobody_else(dtype, isa):
    case = make([150, 30], dtype=dtype, window=20)
    steps = [{0: 100, 1: 20}, {0: 50, 1: 10}]
    good = case.run(steps)
    case.k[0][70, 1, 3], case.v[0][110, 2, 0] = float("nan"), float("inf")
    bad = case.run(steps)
    assert torch.equal(bad[1], good[1])
    for head in range(9):
        hit = {1: range(70, 90), 2: range(110, 130)}.get(head // 3, range(0))
        rows = torch.tensor([t in hit for t in range(150)])
        assert bool(bad[0][rows, head].isnan().all())
        assert torch.equal(bad[0][~rows, head], good[0][~rows, head])


def test_error_beside_an_unquantised_cache(isa):
    """Rounding moves an element by half a step, max |x| / 254: random in sign, so a score by that times |q| / sqrt(3), and V likewise."""
    case, exact = make([400], dim=64), Case.make([400], dim=64)
    found, wanted = case.run([{0: 400}])[0], exact.run([{0: 400}])[0]
    step = 3.5 / 127  # the largest of 64 normal numbers is hardly ever larger
    noise = step / math.sqrt(12)
    spread = 1.7 * noise  # of a score: scale * |q| * noise = 1.7 / 8 * 8 * noise
    bound = noise + spread * float(case.v[0].abs().mean()) * 2
    assert 0 < float((found - wanted).square().mean().sqrt()) < bound


# ---- the fused decoder ----------------------------------------------------------------------------------------------------------------


class Int8Paged(Paged):
    def __init__(self, model, backend):
        super().__init__(model, backend=backend)
        layout = dataclasses.replace(model.kv_layout(self.size), stored="int8")
        self.kv = KVCache(*([torch.zeros(s, dtype=torch.int8) for s in layout.shapes(256)] for _ in range(2)))


class Apart(CpuAttention):
    """Not recognised as the C++ backend by the decoder, which then runs layer by layer."""

    @property
    def inner(self):
        return TorchAttention()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8")
    return {family: str(make_tiny(family, folder).path) for family in ("llama", "gemma2", "qwen3", "gemma3")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gemma3"])
def test_fused_and_layer_by_layer(family, dtype, paths, isa, threads):
    model = load(resolve(paths[family]), dtype, kernels="cpu")
    assert isinstance(model, CpuDecoder)
    prompt = random_tokens(61, seed=3)
    threads(1)
    plain = Paged(model, backend=CpuAttention()).prefill("a", prompt, 61)
    before = model._fused.steps
    whole = Int8Paged(model, CpuAttention()).prefill("a", prompt, 61)
    threads(2)
    assert torch.equal(Int8Paged(model, CpuAttention()).prefill("a", prompt, 7), whole)
    assert model._fused.steps - before == 1 + 9
    apart = Int8Paged(model, Apart()).prefill("a", prompt, 61)
    with_torch = Int8Paged(model, TorchAttention()).prefill("a", prompt, 61)
    assert model._fused.steps - before == 1 + 9
    quantised = float((whole - plain).square().mean().sqrt())
    for other in (apart, with_torch):  # what is stored differs in its last bits, and now and then in an integer, by one
        assert float((other - whole).square().mean().sqrt()) <= (0.2 if dtype == "float32" else 2.5) * quantised
    assert 0 < quantised < 0.05 * float(plain.square().mean().sqrt())
    assert torch.equal(Paged(model, backend=CpuAttention()).prefill("a", prompt, 61), plain)  # and back again
