"""Others' code on the formats: what compressed-tensors stores we read as it does, and what transformers writes into a config we know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AwqConfig, FineGrainedFP8Config, GPTQConfig
from transformers.integrations import finegrained_fp8

from tokenbus.core.models.linears import Tensor
from tokenbus.kernels.triton.int4_weight import int4_from_awq, int4_from_gptq
from tokenbus.plugins.quantization.checkpoint.awq import Awq
from tokenbus.plugins.quantization.checkpoint.compressed import CompressedTensors
from tokenbus.plugins.quantization.checkpoint.formats import Format
from tokenbus.plugins.quantization.checkpoint.fp8 import Fp8
from tokenbus.plugins.quantization.checkpoint.gptq import Gptq

NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


class InMemory:
    """One module's tensors as a checkpoint's."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = {f"m.{name}": tensor for name, tensor in tensors.items()}
        self.heads = {name: Tensor(NAMES[t.dtype], tuple(t.shape)) for name, t in self.tensors.items()}
        self.raw = self.tensors.get

    def read(self, form: Format) -> torch.Tensor:
        survey = form.survey(self.heads)
        assert list(survey) == ["m"]
        return form.read(self, "m", survey["m"]).dequantized()  # pyright: ignore[reportArgumentType] - all that is read


def random_words(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), generator=generator, dtype=torch.int64).to(torch.int32)


WEIGHTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, True),
    "int8 for all": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, True),
    "int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, False),
    "int4, asymmetric": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}, False),
    "int4, a scale per output": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, False),
    "packed int8, asymmetric": ("pack-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, False),
    "float8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, True),
    "float8 in blocks": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}, True),
}  # fmt: skip


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_own_code_means_the_same(kind: str, dtype: torch.dtype) -> None:
    """Its compressors store a random weight, and multiply it out again, in the scales' dtype; ours is rounded to that."""
    pytest.importorskip("compressed_tensors", minversion="0.20")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    form, weights, activations = WEIGHTS[kind]
    args = QuantizationArgs.model_validate(weights)
    inputs = {"num_bits": 8, "type": weights.get("type", "int"), "strategy": "token", "dynamic": True} if activations else None
    scheme = QuantizationScheme.model_validate(
        {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    )
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows, columns = {"channel": (1, 64), "tensor": (48, 64), "group": (1, 32), "block": (16, 32)}[weights["strategy"]]
    blocks = weight.view(48 // rows, rows, 64 // columns, columns).transpose(1, 2).flatten(2)
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), args)
    if weights["strategy"] == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
    theirs: Any = compressor.decompress(stored, scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    ours = InMemory({name: tensor for name, tensor in stored.items() if tensor is not None}).read(CompressedTensors(config))
    assert float((ours - weight.float()).abs().max()) < 0.35, "it is that weight, coarsely"
    assert torch.equal(ours.to(theirs.dtype), theirs)


@pytest.mark.parametrize("block", [(16, 32), None])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_is_what_transformers_makes_of_it(block: Any, scale_dtype: torch.dtype) -> None:
    if block is None and scale_dtype != torch.float32:
        pytest.skip("one scale for all is a float32")
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(5)).to(torch.float8_e4m3fn)
    shape = (3, 2) if block else ()
    scales = (2.0 ** torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(6))).to(scale_dtype)
    multiply_out: Any = getattr(finegrained_fp8, "_dequantize_fp8_weight", None)
    if multiply_out is None:
        pytest.skip("this transformers has no such function")
    theirs = multiply_out(weight, scales, block and list(block), torch.float32)
    write: Any = FineGrainedFP8Config
    config = write(weight_block_size=block, modules_to_not_convert=["lm_head"]).to_dict()
    ours = InMemory({"weight": weight, "weight_scale_inv": scales}).read(Fp8({**config, "dequantize": False}))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq_is_what_the_kernels_repacking_makes_of_it(group: int) -> None:
    groups = 1 if group == -1 else 64 // group
    qweight, qzeros = random_words(64, 6, 1), random_words(groups, 6, 2)
    scales = torch.rand(groups, 48, generator=torch.Generator().manual_seed(3)).half()
    ours = InMemory({"qweight": qweight, "qzeros": qzeros, "scales": scales}).read(Awq(AwqConfig(group_size=group).to_dict()))
    assert torch.equal(ours, int4_from_awq(qweight, qzeros, scales, group).dequantized())


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_what_the_kernels_repacking_makes_of_it(form: str, act_order: bool) -> None:
    """Random words: zero points that borrow from their neighbours when they are stored less one among them."""
    qweight, qzeros = random_words(8, 48, 1), random_words(2, 6, 2)
    scales = torch.rand(2, 48, generator=torch.Generator().manual_seed(3)).half()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4)) if act_order else torch.arange(64)
    g_idx = (order // 32).int()
    config = GPTQConfig(bits=4, group_size=32, sym=False, desc_act=act_order, checkpoint_format=form).to_dict()
    ours = InMemory({"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}).read(Gptq(config))
    theirs = int4_from_gptq(qweight, qzeros, scales, 32, g_idx, zeros_less_one=form == "gptq")
    assert torch.equal(ours, theirs.dequantized())
