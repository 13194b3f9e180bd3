"""The fused decoder on quantised layers against the same layers called one by one from Python: bit for bit."""

from __future__ import annotations

import pytest
import torch

from tokenbus.kernels.cpu.attention import FlatBatch, attend
from tokenbus.kernels.cpu.decoder import FusedDecoder, FusedLayer, FusedShape
from tokenbus.kernels.cpu.elementwise import gated, rms_norm, rms_norm_add, rope
from tokenbus.kernels.cpu.linear import CpuLinear
from tokenbus.kernels.cpu.quantized import QuantLinear

from .gguf_blocks import matrix

HIDDEN, INTER, HEADS, KV_HEADS, DIM, VOCABULARY, LAYERS, EPS = 256, 512, 4, 2, 64, 300, 3, 1e-5
QKV = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
BF16 = torch.bfloat16
KINDS = {
    "bf16": (("bf16",) * 3, "bf16", "bf16", "bf16"),
    "int8": (("int8",) * 3, "int8", "int8", "int8"),
    "Q8_0": (("Q8_0",) * 3, "Q8_0", "Q8_0", "Q8_0"),
    "Q4_1": (("Q4_1",) * 3, "Q4_1", "Q4_1", "Q8_0"),
    "Q4_K_M": (("Q4_K", "Q4_K", "Q6_K"), "Q4_K", "Q6_K", "Q6_K"),
    "some": (("bf16",) * 3, "Q5_K", "int8", "bf16"),
}
"""Types of Q, K, V; of output, gate and up; of down; of the head."""


def linear(kinds, rows, k, dtype, seed):
    if kinds[0] in ("bf16", "int8"):
        g = torch.Generator().manual_seed(seed)
        weights = [(torch.randn(n, k, generator=g) * k**-0.5).to(dtype) for n in rows]
        return CpuLinear.fuse(weights) if kinds[0] == "bf16" else QuantLinear.int8(weights)
    made = [matrix(kind, n, k, seed + i) for i, (kind, n) in enumerate(zip(kinds, rows, strict=True))]
    return QuantLinear.gguf([m.packed for m in made], dtype=dtype)


class Model:
    def __init__(self, kind, dtype, *, sandwich=False, scale=None, up=None):
        qkv, middle, down, head = KINDS[kind]
        g = torch.Generator().manual_seed(7)
        norms = lambda: torch.rand(HIDDEN, generator=g) + 0.5  # noqa: E731
        self.dtype, self.scale = dtype, scale
        self.layers = [
            FusedLayer(
                qkv=linear(qkv, QKV, HIDDEN, dtype, 10 * i),
                out=linear((middle,), (HIDDEN,), HEADS * DIM, dtype, 10 * i + 3),
                gate=linear((middle,), (INTER,), HIDDEN, dtype, 10 * i + 4),
                up=linear((up or middle,), (INTER,), HIDDEN, dtype, 10 * i + 5),
                down=linear((down,), (HIDDEN,), INTER, dtype, 10 * i + 6),
                before_attention=norms(),
                before_mlp=norms(),
                after_attention=norms() if sandwich else None,
                after_mlp=norms() if sandwich else None,
                window=40 if i == 1 else None,
                rope=0,
            )
            for i in range(LAYERS)
        ]
        self.norm, self.head = norms(), linear((head,), (VOCABULARY,), HIDDEN, dtype, 99)
        shape = FusedShape(dtype, HIDDEN, INTER, HEADS, KV_HEADS, DIM, "silu", EPS, DIM**-0.5, embed_scale=scale)
        self.fused = FusedDecoder(shape, self.layers, None, self.norm, self.head)
        turns = torch.arange(512)[:, None] * 10000.0 ** -(torch.arange(0, DIM, 2) / DIM)
        self.angles = torch.stack([turns.cos(), turns.sin()]).contiguous()
        self.caches = [[torch.zeros(40, 16, KV_HEADS, DIM, dtype=dtype) for _ in range(LAYERS)] for _ in range(2)]

    def batch(self, counts, done):
        """Requests in tables of 8 blocks each; returns the batch and positions."""
        starts, positions, slots = [0], [], []
        for r, (n, before) in enumerate(zip(counts, done, strict=True)):
            starts.append(starts[-1] + n)
            positions += range(before, before + n)
            slots += range(r * 128 + before, r * 128 + before + n)
        tables = [list(range(8 * r, 8 * r + 8)) for r in range(len(counts))]
        ends = [n + before for n, before in zip(counts, done, strict=True)]
        return FlatBatch(starts, ends, tables, torch.tensor(slots)), torch.tensor(positions)

    def step(self, ids, counts, done):
        batch, positions = self.batch(counts, done)
        k, v = self.caches
        return self.fused.step(ids, positions, batch, k, v, [self.angles])

    def by_layer(self, ids, counts, done):
        batch, positions = self.batch(counts, done)
        x = self.head.rows(ids)
        x = x if self.scale is None else (x.float() * self.scale).to(self.dtype)
        cos, sin = self.angles[:, positions]
        for i, layer in enumerate(self.layers):
            normal = rms_norm(x, layer.before_attention, EPS)
            q, k, v = (t.unflatten(1, (-1, DIM)) for t in layer.qkv(normal).split(QKV, 1))
            caches = self.caches[0][i], self.caches[1][i]
            rows = attend(rope(q, cos, sin), rope(k, cos, sin), v, *caches, batch, DIM**-0.5, layer.window)
            x = self.join(layer.out, rows.flatten(1), x, layer.after_attention)
            normal = rms_norm(x, layer.before_mlp, EPS)
            both = gated("silu", layer.gate(normal, torch.float32), layer.up(normal, torch.float32), self.dtype)
            x = self.join(layer.down, both, x, layer.after_mlp)
        return rms_norm(x, self.norm, EPS)

    def join(self, layer, rows, x, norm):
        if norm is not None:
            return rms_norm_add(layer(rows), norm, EPS, x)
        return (x.float() + layer(rows, torch.float32)).to(self.dtype)


STEPS = [((1,), (0,)), ((3, 60), (1, 0)), ((70, 1), (4, 60)), ((1, 1, 1, 1, 1), (74, 61, 0, 0, 0)), ((2, 1), (75, 62))]
"""(tokens, tokens before) of each request: as few as one worker finishes, more, and more than a tile of rows."""


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_its_layers_one_by_one(kind, dtype, isa, threads):
    threads(2)
    fused, plain = (Model(kind, dtype, sandwich=kind == "Q8_0", scale=8.0 if kind == "Q4_1" else None) for _ in range(2))
    for counts, done in STEPS:
        ids = torch.randint(0, VOCABULARY, (sum(counts),), generator=torch.Generator().manual_seed(sum(counts)))
        found = fused.step(ids, counts, done)
        assert torch.equal(found, plain.by_layer(ids, counts, done)), counts
        assert found.isfinite().all()
        assert torch.equal(fused.fused.logits(found), plain.head(found, torch.float32))
    assert fused.fused.steps == len(STEPS)


@pytest.mark.parametrize("kind", ["int8", "Q4_K_M"])
def test_a_row_does_not_depend_on_its_batch(kind, isa, threads):
    model = Model(kind, BF16)
    ids = torch.randint(0, VOCABULARY, (90,), generator=torch.Generator().manual_seed(1))
    threads(1)
    whole = model.step(ids, (90,), (0,))
    for count in (1, 2, 3, 4):
        threads(count)
        sizes = (1, 2, 3, 4, 5, 17, 58)
        ends = torch.tensor(sizes).cumsum(0).tolist()
        rows = [model.step(ids[e - n : e], (n,), (e - n,)) for n, e in zip(sizes, ends, strict=True)]
        assert torch.equal(torch.cat(rows), whole), count
    beside = model.step(torch.cat([ids[:7], ids[80:]]), (7, 10), (0, 0))
    assert torch.equal(beside[:7], whole[:7])


@pytest.mark.parametrize("up", ["Q8_0", "bf16", "int8"])
def test_gate_and_up_that_read_different_inputs(up, threads, library):
    threads(2)
    fused, plain = (Model("Q4_K_M", BF16, up=up) for _ in range(2))
    ids = torch.arange(33)
    assert torch.equal(fused.step(ids, (33,), (0,)), plain.by_layer(ids, (33,), (0,)))


def test_columns_that_do_not_stand_beside_each_other(library):
    model = Model("Q8_0", BF16)
    mixed = linear(("Q4_0", "Q4_1"), (40, INTER - 40), HIDDEN, BF16, 1)
    layer = FusedLayer(**{**vars(model.layers[0]), "up": mixed})
    shape = FusedShape(BF16, HIDDEN, INTER, HEADS, KV_HEADS, DIM, "silu", EPS, DIM**-0.5)
    with pytest.raises(ValueError, match="types of gate or up change"):
        FusedDecoder(shape, [layer], None, model.norm, model.head)
