"""`quantization.checkpoint` on tiny checkpoints of each format, against the same model with the weights that they stand for."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_formats import KINDS, Kind, awq, fine_grained, float8, gptq, int8_channel, packed, quantise

from tokenbus.core.config import Config
from tokenbus.core.errors import ModelError
from tokenbus.core.host import make_host
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.decoder import Decoder
from tokenbus.core.models.loader import describe, load
from tokenbus.core.models.resolve import ResolvedModel, read_json
from tokenbus.core.models.sizing import model_size
from tokenbus.core.models.slot import choose_linears
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.core.worker.cpu_attention import CpuAttention
from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear
from tokenbus.kernels.cpu.quantized import QuantLinear
from tokenbus.plugins.quantization.checkpoint.device import BLOCKS, DEQUANTISED, W4, W8, W8A8, multiplies_e4m3
from tokenbus.plugins.quantization.triton_products import (
    BlockProduct,
    Int4Product,
    Int8Product,
    Joined,
    PlainProduct,
    QuantizedProduct,
)
from tokenbus.testing import Request, TinyEngine

PLUGIN = "quantization.checkpoint"
WAYS = {
    "awq": W4, "awq, a scale per output": W4, "gptq": W4, "gptq, asymmetric": W4, "gptq, sorted": W4, "gptq v2, sorted": W4,
    "packed int4": W4, "packed int4, asymmetric": W4, "packed int4, sorted": W4, "packed int4, a scale per output": W4,
    "gptq, 8 bits": W8, "packed int8": W8, "int8, weights alone": W8,
    "int8": W8A8, "int8, a scale for all": W8A8, "float8": W8A8, "float8, static": W8A8, "fp8, a scale for all": W8A8,
    "fp8, static": W8A8, "fp8, vLLM's names": W8A8,
    "gptq, 8 bits in groups": DEQUANTISED, "packed int8 in groups": DEQUANTISED, "fp8": DEQUANTISED,
    "fp8, small blocks": BLOCKS, "fp8, odd blocks": BLOCKS, "float8, blocks": BLOCKS,
}  # fmt: skip
STAYS = ("int8", "int8, a scale for all")
PRODUCTS = {W4: Int4Product, W8: Int8Product, W8A8: QuantizedProduct, BLOCKS: BlockProduct, DEQUANTISED: PlainProduct}


def resolved(path: Path) -> ResolvedModel:
    return ResolvedModel(path, "its-name", read_json(path / "config.json"))


def chooser(*enable: str, disable: tuple[str, ...] = (), triton: bool = False, **changes: Any) -> Callable[[Any], Any]:
    """What the worker asks; triton: as if the model were to run on a GPU, but on CPU tensors, in Triton's interpreter."""
    host = make_host("worker", Config())
    on = host.start_switches(enable, disable).on
    host.load(on)
    return lambda model: choose_linears(host, on, dataclasses.replace(model, triton=triton, **changes))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: Any, remake: Any) -> Any:
    """made(kind, family): the folders of a quantised checkpoint and of the dense one that it stands for."""
    done: dict[tuple[str, str], tuple[Path, Path]] = {}

    def get(kind: str, family: str = "llama") -> tuple[Path, Path]:
        if (kind, family) not in done:
            done[kind, family] = quantise(tiny(family).path, tmp_path_factory.mktemp("made"), KINDS[kind]())
        return done[kind, family]

    return get


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square, relative to the truth's spread."""
    return float((found - truth).square().mean().sqrt() / truth.std())


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_cpu_it_is_the_dense_model_bit_by_bit(kind: str, kernels: Any, made: Any, paged: Any, tokens: Any) -> None:
    quantised, dense = made(kind)
    prompt = tokens(24, seed=8)
    model = load(resolved(quantised), "float32", kernels=kernels, choose=chooser())
    if kernels == "auto" and lib.load() is not None:
        assert isinstance(model, CpuDecoder)
        if kind in STAYS:
            return
    truth = paged(load(resolved(dense), "float32", kernels=kernels)).prefill("a", prompt, 24)
    assert torch.equal(paged(model).prefill("a", prompt, 24), truth)
    size = model_size(resolved(quantised), "float32", chooser()(describe(resolved(quantised), "float32", kernels=kernels)))
    assert model.spec.weights_bytes == size.weights_bytes == model_size(resolved(dense), "float32").weights_bytes


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3"])
@pytest.mark.parametrize("kind", STAYS)
def test_int8_with_int8_activations_stays_as_it_is_in_the_kernels_for_cpus(
    kind: str, architecture: str, made: Any, paged: Any, tokens: Any
) -> None:
    if lib.load() is None:
        pytest.skip(f"there are no C++ kernels: {lib.unavailable_reason()}")
    quantised, dense = made(kind, architecture)
    prompt = tokens(24, seed=8)
    model = load(resolved(quantised), "float32", choose=chooser())
    assert isinstance(model, CpuDecoder)
    runs = [paged(model, backend=CpuAttention()).prefill("a", prompt, chunk) for chunk in (24, 7, 1)]
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    truth = paged(load(resolved(dense), "float32"), backend=CpuAttention()).prefill("a", prompt, 24)
    assert 1e-4 < error(runs[0], truth) < 0.25  # activations in 8 bits, of a tiny random model
    mlp: Any = model.layers[0].mlp
    assert {type(p) for p in (model.layers[0].attention.qkv, mlp.gate_up.gate, mlp.gate_up.up, mlp.down)} == {QuantLinear}
    assert type(model.head) is CpuLinear
    size = model_size(resolved(quantised), "float32", chooser()(describe(resolved(quantised), "float32")))
    assert size.weights_bytes == model.spec.weights_bytes < 0.8 * model_size(resolved(dense), "float32").weights_bytes


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen3-moe"])
def test_every_family(architecture: str, made: Any, paged: Any, tokens: Any) -> None:
    """Biases of some, norms that stay, gate and up in one tensor, tied heads, experts."""
    quantised, dense = made("packed int4, asymmetric", architecture)
    prompt = tokens(24, seed=3)
    found = paged(load(resolved(quantised), choose=chooser())).prefill("a", prompt, 24)
    assert torch.equal(found, paged(load(resolved(dense))).prefill("a", prompt, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_on_triton_kernels_it_is_close_to_the_dense_model(kind: str, made: Any, paged: Any, tokens: Any) -> None:
    """In Triton's interpreter. Weight-only products differ by the order of float32 sums; W8A8 by activations in 8 bits, of which tiny
    random models make the most: attention is peaked, weights are wide."""
    quantised, dense = made(kind)
    prompt = tokens(9, seed=8)
    model = load(resolved(quantised), "float32", choose=chooser(triton=True))
    assert type(model) is Decoder
    truth = paged(load(resolved(dense), "float32", kernels="torch")).prefill("a", prompt, 9)
    run = paged(model)
    found = run.prefill("a", prompt, 9)
    way = WAYS[kind]
    products = [layer.attention.out for layer in model.layers] + [layer.mlp.down for layer in model.layers]  # pyright: ignore[reportAttributeAccessIssue]
    assert {type(product) for product in products} == {PRODUCTS[way]}
    assert isinstance(model.head, PlainProduct)
    if way in {W8A8, BLOCKS}:
        assert 1e-4 < error(found, truth) < 0.25
    else:
        assert error(found, truth) < 2e-5
        assert torch.equal(found.argmax(-1), truth.argmax(-1))
    assert torch.equal(run.prefill("b", prompt, 4), found), "a row depends on its batch"


@pytest.mark.parametrize("kind", ["awq", "gptq, sorted", "int8", "float8", "fp8", "fp8, small blocks", "fp8, odd blocks"])
def test_what_it_holds_on_a_device_is_what_it_says(kind: str, made: Any) -> None:
    model = load(resolved(made(kind)[0]), "bfloat16", choose=chooser(triton=True))
    assert type(model) is Decoder
    products: list[Any] = [model.head]
    for layer in model.layers:
        mlp: Any = layer.mlp
        products += [layer.attention.qkv, layer.attention.out, mlp.gate_up, mlp.down]
    assert not any(isinstance(product, Joined) for product in products), "Q, K and V, gate and up are multiplied together"
    norms = (2 * len(model.layers) + 1) * model.spec.hidden_size * 2
    orders = sum(p.weight.order.nbytes for p in products if isinstance(p, Int4Product) and p.weight.order is not None)
    assert sum(product.nbytes for product in products) - orders + norms == model.spec.step_bytes
    assert model.spec.weights_bytes == model.spec.step_bytes + 256 * 64 * 2


class TestQuantisedProducts:
    """One layer's product against the formula, with what enters it in 8 bits."""

    @pytest.mark.parametrize("kind", ["fp8, small blocks", "fp8, odd blocks", "float8, blocks"])
    def test_activations_are_quantised_in_groups(self, kind: str, made: Any) -> None:
        quantised, dense = made(kind)
        model = load(resolved(quantised), "float32", choose=chooser(triton=True))
        assert type(model) is Decoder
        weights, stored = load_file(dense / "model.safetensors"), load_file(quantised / "model.safetensors")
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
        x[:, :32] *= 30
        names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
        end = "weight_scale" if kind == "float8, blocks" else "weight_scale_inv"
        groups = x.view(5, stored[f"{names[0]}.{end}"].shape[1], -1)
        scale = groups.abs().amax(2, keepdim=True) / 448
        seen = ((groups / scale).to(torch.float8_e4m3fn).double() * scale).flatten(1)
        wanted = [seen @ weights[f"{n}.weight"].double().T + weights[f"{n}.bias"].double() for n in names]
        torch.testing.assert_close(model.layers[1].attention.qkv(x).double(), torch.cat(wanted, 1), rtol=1e-4, atol=1e-3)

    @pytest.mark.parametrize("kind", ["int8", "int8, a scale for all", "float8", "float8, static", "fp8, vLLM's names"])
    def test_activations_are_quantised_as_the_checkpoint_says(self, kind: str, made: Any) -> None:
        quantised, dense = made(kind)
        model = load(resolved(quantised), "float32", choose=chooser(triton=True))
        assert type(model) is Decoder
        weights = load_file(dense / "model.safetensors")
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1, 1, 1, 30, 0.1])[:, None]
        names = [f"model.layers.1.self_attn.{part}_proj" for part in "qkv"]
        stored = load_file(quantised / "model.safetensors")
        found = model.layers[1].attention.qkv(x)
        wanted = []
        for name in names:
            static = stored.get(f"{name}.input_scale")
            limit, to = (127, torch.int8) if kind.startswith("int8") else (448, torch.float8_e4m3fn)
            scale = x.abs().amax(1, keepdim=True) / limit if static is None else static
            seen = (x / scale).clamp(-limit, limit)
            seen = (seen.round() if to == torch.int8 else seen).to(to).double() * scale
            wanted.append(seen @ weights[f"{name}.weight"].double().T + weights[f"{name}.bias"].double())
        torch.testing.assert_close(found.double(), torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)


def test_matrices_that_are_not_quantised_stay(tmp_path: Path, tiny: Any, paged: Any, tokens: Any) -> None:
    keep = ["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.down_proj"]
    kind = awq()
    kind = dataclasses.replace(
        kind,
        skip=("layers.1.self_attn.k_proj", "layers.0.mlp.down_proj"),
        config={**kind.config, "modules_to_not_convert": keep},
    )
    quantised, dense = quantise(tiny("llama").path, tmp_path, kind)
    prompt = tokens(12, seed=3)
    truth = paged(load(resolved(dense))).prefill("a", prompt, 12)
    assert torch.equal(paged(load(resolved(quantised), choose=chooser())).prefill("a", prompt, 12), truth)
    model = load(resolved(quantised), choose=chooser(triton=True))
    assert type(model) is Decoder
    qkv = model.layers[1].attention.qkv
    assert isinstance(qkv, Joined)
    assert [type(part) for part in qkv.parts] == [Int4Product, PlainProduct, Int4Product]
    assert error(paged(model).prefill("a", prompt, 12), truth) < 2e-5
    clash = dataclasses.replace(kind, config={**kind.config, "modules_to_not_convert": [*keep, "layers.2.self_attn.o_proj"]})
    with pytest.raises(ModelError, match=r"says that model\.layers\.2\.self_attn\.o_proj is not quantised, but its files"):
        load(resolved(quantise(tiny("llama").path, tmp_path / "clash", clash)[0]), choose=chooser())


def test_config_groups_are_for_the_modules_that_they_name(tmp_path: Path, tiny: Any, paged: Any, tokens: Any) -> None:
    """int8 down projections, 4 bits for all others."""
    four, eight = packed(4, 32), int8_channel(inputs=None)
    stored, means = {}, {}
    for folder, kind in ((tmp_path / "4", four), (tmp_path / "8", eight)):
        quantised, dense = quantise(tiny("llama").path, folder, kind)
        stored[kind.config["format"]] = load_file(quantised / "model.safetensors")
        means[kind.config["format"]] = load_file(dense / "model.safetensors")
    in_four = {k: v for k, v in stored["pack-quantized"].items() if ".down_proj." not in k}
    in_eight = {k: v for k, v in stored["int-quantized"].items() if ".down_proj." in k}
    save_file(in_four | in_eight, tmp_path / "4" / "quantised" / "model.safetensors")
    both = {k: means["int-quantized" if ".down_proj." in k else "pack-quantized"][k] for k in means["int-quantized"]}
    save_file(both, tmp_path / "4" / "dense" / "model.safetensors")
    down = {**eight.config["config_groups"]["group_0"], "targets": ["re:.*down_proj$"], "format": "int-quantized"}
    config = {**four.config, "config_groups": {**four.config["config_groups"], "group_1": down}}
    path = tmp_path / "4" / "quantised"
    write_config(path, config)
    prompt = tokens(12, seed=3)
    truth = paged(load(resolved(tmp_path / "4" / "dense"))).prefill("a", prompt, 12)
    assert torch.equal(paged(load(resolved(path), choose=chooser())).prefill("a", prompt, 12), truth)


def write_config(path: Path, config: Any) -> None:
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**text, "quantization_config": config}))


def test_static_scales_that_differ_are_multiplied_apart(made: Any) -> None:
    model = load(resolved(made("float8, static")[0]), choose=chooser(triton=True))
    assert type(model) is Decoder
    assert isinstance(model.layers[0].attention.qkv, Joined)
    same = load(resolved(made("fp8, static")[0]), choose=chooser(triton=True))
    assert type(same) is Decoder
    assert isinstance(same.layers[0].attention.qkv, QuantizedProduct)


def test_without_the_switch_products_may_depend_on_the_batch_and_it_says_so(made: Any) -> None:
    model = load(resolved(made("awq")[0]), choose=chooser(triton=True, invariant=False))
    assert not model.spec.lossless
    assert model.spec.lossless_reason == "matrix products of FreeCheckpointLinears are not batch invariant"
    assert load(resolved(made("awq")[0]), choose=chooser(triton=True)).spec.lossless


def test_a_cpu_multiplies_every_scheme_in_the_interpreter() -> None:
    assert multiplies_e4m3(torch.device("cpu"))


def test_the_log_says_how_it_runs(made: Any) -> None:
    with capture_logs() as lines:
        load(resolved(made("awq")[0]), choose=chooser())
    line = next(line for line in lines if line["event"] == "quantized_checkpoint")
    assert line["schemes"] == ["int4, groups of 32, zero points"]
    assert line["runs"] == "dequantised as it is loaded: memory and speed are those of the model in float32"
    with capture_logs() as lines:
        load(resolved(made("float8, blocks")[0]), choose=chooser(triton=True))
    line = next(line for line in lines if line["event"] == "quantized_checkpoint")
    assert (line["schemes"], line["runs"]) == (["e4m3, blocks of 32 x 32, activations too"], {BLOCKS: 21})


class TestRefusals:
    def test_with_the_plugin_off_core_says_which_is_needed(self, made: Any) -> None:
        needs = r"its weights are quantised \(awq\), and no plugin .*: quantization\.checkpoint \(--enable NAME\)"
        with pytest.raises(ModelError, match=needs):
            load(resolved(made("awq")[0]), choose=chooser(disable=(PLUGIN,)))

    @pytest.mark.parametrize("name", ["quantization.int8", "quantization.gguf"])
    def test_nothing_is_quantised_twice(self, name: str, made: Any) -> None:
        with pytest.raises(ModelError, match=rf"with {name}: its checkpoint is quantised already \(awq\).*leave {name} off"):
            load(resolved(made("awq")[0]), choose=chooser(name))

    def test_a_model_that_is_not_quantised_is_left_alone(self, made: Any) -> None:
        assert chooser()(describe(resolved(made("awq")[1]))) is None

    def test_a_model_of_transformers(self, tiny: Any, tmp_path: Path) -> None:
        quantised, _ = quantise(tiny("granite").path, tmp_path, awq())
        with pytest.raises(ModelError, match=r"quantised \(awq\), and it runs through transformers"):
            load(resolved(quantised), choose=chooser())

    @pytest.mark.parametrize(
        ("kind", "change", "reason"),
        [
            (awq, {"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'; what can be read is awq, gptq, "),
            (awq, {"bits": 3}, "bits = 3; what can be run is 4"),
            (awq, {"version": "gemv"}, "version = 'gemv'; what can be run is 'gemm'"),
            (awq, {"zero_point": False}, "zero_point = False"),
            (awq, {"group_size": "all"}, "group_size = 'all', neither a number of inputs nor -1"),
            (awq, {"group_size": 12}, "groups of 12 inputs are no multiple of 8"),
            (awq, {"group_size": 64}, "down_proj.qzeros must be [2, 8], not [3, 8]"),
            (awq, {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head', no list of names"),
            (awq, {"modules_to_not_convert": ["("]}, "is no regular expression"),
            (awq, {"rotation": "hadamard"}, "has rotation = 'hadamard', which is not known here"),
            (gptq, {"bits": 2}, "bits = 2; what can be run is 4 or 8"),
            (gptq, {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
            (gptq, {"dynamic": {"+:.*down.*": {"bits": 8}}}, "settings of their own for modules '+:"),
            (gptq, {"sym": "yes"}, "sym = 'yes'"),
            (int8_channel, {"format": "nvfp4-pack-quantized"}, "format = 'nvfp4-pack-quantized'"),
            (int8_channel, {"kv_cache_scheme": {"num_bits": 8}}, "K and V quantised by its own scales"),
            (int8_channel, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "its weights are sparse ('sparse-24-bitmask')"),
            (int8_channel, {"transform_config": {"config_groups": {"R1": 1}}}, "has transform_config = "),
            (int8_channel, {"config_groups": {}}, "no config_groups"),
            (int8_channel, {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
            (lambda: packed(4, 32), {"ignore": ["re:.*gate_proj"]}, "says that model.layers.0.mlp.gate_proj is not quantised"),
            (lambda: fine_grained((128, 128)), {"weight_block_size": [128]}, "weight_block_size = [128], no two numbers"),
            (lambda: fine_grained((128, 128)), {"activation_scheme": "static"}, "activations are static, and its weights in blocks"),
            (lambda: fine_grained((128, 128)), {"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
            (lambda: fine_grained((128, 128)), {"weight_block_size": [64, 64]}, "must be [1, 2], not F32 [1, 1]"),
        ],
    )  # fmt: skip
    def test_settings(self, kind: Callable[[], Kind], change: dict[str, Any], reason: str, tiny: Any, tmp_path: Path) -> None:
        found = kind()
        path, _ = quantise(tiny("llama").path, tmp_path, found)
        write_config(path, {**found.config, **change})
        self.refused(path, reason)

    @pytest.mark.parametrize(
        ("part", "change", "reason"),
        [
            ("weights", {"num_bits": 3}, "num_bits = 3; what can be run is 4 or 8"),
            ("weights", {"type": "fp4"}, "type = 'fp4'"),
            ("weights", {"strategy": "tensor_group"}, "strategy = 'tensor_group'"),
            ("weights", {"dynamic": True}, "quantises weights anew in each step"),
            ("weights", {"type": "float", "num_bits": 8}, "float weights in the format 'pack-quantized'"),
            ("weights", {"actorder": "sideways"}, "actorder = 'sideways'"),
            ("weights", {"symmetric": False}, "has no tensor model.layers.0.mlp.down_proj.weight_zero_point"),
            ("input_activations", {"num_bits": 8, "type": "int", "dynamic": True}, "8-bit int activations, which go with none"),
            ("output_activations", {"num_bits": 8}, "quantises the outputs of products"),
        ],
    )
    def test_groups(self, part: str, change: dict[str, Any], reason: str, tiny: Any, tmp_path: Path) -> None:
        kind = packed(4, 32)
        path, _ = quantise(tiny("llama").path, tmp_path, kind)
        group = kind.config["config_groups"]["group_0"]
        group = {**group, part: {**(group[part] or {}), **change}}
        write_config(path, {**kind.config, "config_groups": {"group_0": group}})
        self.refused(path, reason)

    @pytest.mark.parametrize("inputs", [{"symmetric": False}, {"dynamic": False, "strategy": "tensor"}])
    def test_activations_in_int8_that_no_product_takes(self, inputs: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
        kind = int8_channel()
        path, _ = quantise(tiny("llama").path, tmp_path, kind)
        group = kind.config["config_groups"]["group_0"]
        group = {**group, "input_activations": {**group["input_activations"], **inputs}}
        write_config(path, {**kind.config, "config_groups": {"group_0": group}})
        self.refused(path, "asymmetric activations" if "symmetric" in inputs else "static scales for int8 activations")

    @pytest.mark.parametrize(
        ("kind", "end", "change", "reason"),
        [
            (awq, "q_proj.scales", None, "files have no tensor model.layers.1.self_attn.q_proj.scales"),
            (awq, "q_proj.qzeros", lambda t: t[:1], "q_proj.qzeros must be [2, 8], not [1, 8]"),
            (awq, "q_proj.qweight", lambda t: t.float(), "q_proj.qweight is F32 [64, 8], not I32 of 2 dimensions"),
            (awq, "q_proj.qweight", None, "its files have no matrix model.layers.1.self_attn.q_proj, quantised or not"),
            (gptq, "o_proj.g_idx", lambda t: t[:3], "o_proj.g_idx must be [64], not [3]"),
            (gptq, "o_proj.g_idx", lambda t: t + 5, "o_proj: g_idx must name one of 2 groups for each input"),
            (gptq, "o_proj.qzeros", lambda t: t + 1, "o_proj: qzeros are not all 8, as `sym` says"),
            (int8_channel, "q_proj.weight_scale", None, "q_proj.weight is I8, and there are no scales for it"),
            (int8_channel, "q_proj.weight_scale", lambda t: t[:5], "must be [64, 1], not F32 [5, 1]"),
            (int8_channel, "q_proj.weight", lambda t: t[:, :8].contiguous(), "q_proj has 8 inputs, its config says 64"),
            (int8_channel, "q_proj.weight", lambda t: t.float(), "q_proj.weight is F32 [64, 64], not I8"),
            (lambda: packed(4, 32), "q_proj.weight_shape", lambda t: t - 1, "weight_shape is [63, 63]"),
            (lambda: packed(4, 32), "q_proj.weight_shape", None, "its files have no tensor"),
            (lambda: packed(4, 32), "q_proj.weight_scale", None, "weight_packed is I32, and there are no scales for it"),
            (lambda: float8("tensor", static=True), "q_proj.input_scale", None, "q_proj.input_scale with one number"),
            (lambda: fine_grained((128, 128)), "q_proj.weight_scale_inv", None, "q_proj.weight is F8_E4M3, and there are no"),
            (lambda: fine_grained(None, static=True), "q_proj.activation_scale", None, "q_proj.activation_scale with one number"),
        ],
    )  # fmt: skip
    def test_tensors(self, kind: Any, end: str, change: Any, reason: str, tiny: Any, tmp_path: Path) -> None:
        path, _ = quantise(tiny("llama").path, tmp_path, kind())
        file = path / "model.safetensors"
        tensors, name = load_file(file), f"model.layers.1.self_attn.{end}"
        value = tensors.pop(name)
        if change is not None:
            tensors[name] = change(value)
        save_file(tensors, file)
        self.refused(path, reason)

    def refused(self, path: Path, reason: str) -> None:
        with pytest.raises(ModelError) as caught:
            load(resolved(path), choose=chooser())
        assert "its-name" in caught.value.message
        assert reason in caught.value.message


@pytest.mark.parametrize("fused", [True, False])
def test_a_fused_step_runs_on_dequantised_weights(fused: bool, made: Any, paged: Any, tokens: Any) -> None:
    if lib.load() is None:
        pytest.skip(f"there are no C++ kernels: {lib.unavailable_reason()}")
    quantised, dense = made("gptq, sorted")
    prompt, backend = tokens(20, seed=3), CpuAttention() if fused else None
    model = load(resolved(quantised), "bfloat16", choose=chooser())
    found = paged(model, backend=backend).prefill("a", prompt, 20)
    assert torch.equal(found, paged(load(resolved(dense), "bfloat16"), backend=backend).prefill("a", prompt, 20))


@pytest.mark.parametrize("kind", ["awq", "packed int8", "fp8"])
def test_an_engine_runs_it_without_being_told_and_answers_as_with_the_dense_one(kind: str, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "source")
    quantised, dense = quantise(source, tmp_path, KINDS[kind]())
    requests = [Request([20 + k, *range(30, 30 + 9 * k)], 6) for k in range(1, 4)]
    expected = TinyEngine(model=str(dense)).run(requests, chunk=7)
    found = TinyEngine(model=str(quantised)).run(requests, chunk=7)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
