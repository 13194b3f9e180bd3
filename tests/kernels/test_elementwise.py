from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tokenbus.kernels.torch_ops import elementwise as ops

F32, BF16 = torch.float32, torch.bfloat16
ROWS = 150


def randn(*shape, dtype=F32, seed=0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def functions(width, dtype):
    weight, bias = randn(width, dtype=dtype, seed=1), randn(width, dtype=dtype, seed=2)
    return {
        "rms_norm": lambda x: ops.rms_norm(x, weight, 1e-5),
        "rms_norm_offset": lambda x: ops.rms_norm(x, weight, 1e-5, unit_offset=True),
        "rms_norm_residual": lambda x: ops.rms_norm(x, None, 1e-5, residual=x * 2),
        "layer_norm": lambda x: ops.layer_norm(x, weight, bias, 1e-5),
        "silu_mul": lambda x: ops.silu_mul(x, x),
        "silu_mul_halves": lambda x: ops.silu_mul(*torch.cat([x, x], dim=1).chunk(2, dim=1)),
        "gelu_tanh_mul": lambda x: ops.gelu_tanh_mul(x, x),
        "gelu": ops.gelu,
        "softcap": lambda x: ops.softcap(x, 20.0),
    }


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [1536, 576, 100, 33, 35000])
@pytest.mark.parametrize("name", list(functions(1, F32)))
def test_every_number_of_rows_gives_the_same_bits(name, width, dtype, threads):
    rows = 9 if width > 30000 else ROWS
    f = functions(width, dtype)[name]
    x = randn(rows, width, dtype=dtype)
    threads(1)
    alone = torch.cat([f(x[i : i + 1]) for i in range(rows)])
    for count in (1, 2, 3, 4):
        threads(count)
        for n in (1, 2, 3, 17, 32, 33, 43, 64, 86, 97, 130, ROWS):
            assert torch.equal(f(x[-n:]), alone[-n:]), (count, n)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rope_is_exact_per_row(dtype, threads):
    x, cos, sin = randn(ROWS, 3, 64, dtype=dtype), randn(ROWS, 24, seed=1), randn(ROWS, 24, seed=2)
    threads(1)
    alone = torch.cat([ops.rope(x[i : i + 1], cos[i : i + 1], sin[i : i + 1]) for i in range(ROWS)])
    for count in (1, 2, 4):
        threads(count)
        for n in (2, 31, 64, ROWS):
            assert torch.equal(ops.rope(x[:n], cos[:n], sin[:n]), alone[:n])
    assert torch.equal(alone[..., 48:], x[..., 48:])


def close(found, wanted, ulps):
    """Within so many float32 units of the larger of value and 1."""
    torch.testing.assert_close(found, wanted, rtol=ulps * 2**-23, atol=ulps * 2**-23)


def test_norms_are_those_of_transformers():
    x, weight = randn(7, 576), randn(576, seed=1)
    for dtype in (F32, BF16):
        llama = LlamaRMSNorm(576, 1e-5).to(dtype)
        gemma = Gemma3RMSNorm(576, 1e-5).to(dtype)
        llama.weight.data, gemma.weight.data = weight.to(dtype), weight.to(dtype)
        given = x.to(dtype)
        for ours, theirs in (
            (ops.rms_norm(given, weight.to(dtype), 1e-5), llama(given)),
            (ops.rms_norm(given, weight.to(dtype), 1e-5, unit_offset=True), gemma(given)),
        ):
            assert ours.dtype == dtype
            if dtype == F32:
                close(ours, theirs.detach(), 4)
            else:
                assert torch.equal(ours, theirs.detach())
    assert torch.equal(ops.rms_norm(x, weight, 1e-5, residual=x), ops.rms_norm(x + x, weight, 1e-5))


def test_activations_are_those_of_transformers():
    gate, up = randn(7, 1536), randn(7, 1536, seed=1)
    close(ops.silu_mul(gate, up), ACT2FN["silu"](gate) * up, 4)
    close(ops.gelu_tanh_mul(gate, up), ACT2FN["gelu_pytorch_tanh"](gate) * up, 4)
    close(ops.gelu(gate), ACT2FN["gelu"](gate), 4)
    close(ops.softcap(gate, 5.0), torch.tanh(gate / 5.0) * 5.0, 4)
    close(ops.silu(gate[:, :35]), F.silu(gate[:, :35]), 4)


def test_rope_is_that_of_transformers():
    x, angles = randn(9, 4, 64), randn(9, 32, seed=1)
    cos, sin = angles.cos(), angles.sin()
    full = [torch.cat([part, part], dim=-1)[None] for part in (cos, sin)]
    theirs, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *full)
    close(ops.rope(x, cos, sin), theirs[0].transpose(0, 1), 4)


def test_any_strides_and_leading_dimensions():
    x = randn(6, 5, 128)
    assert torch.equal(ops.silu(x.transpose(0, 1)), ops.silu(x).transpose(0, 1))
    assert torch.equal(ops.rms_norm(x, None, 1e-5)[2], ops.rms_norm(x[2], None, 1e-5))
    turned = randn(128, 6).T
    assert not turned.is_contiguous()
    assert torch.equal(ops.gelu_tanh(turned), ops.gelu_tanh(turned.contiguous()))
