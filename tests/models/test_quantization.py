"""The holders of the slot "quantization" on tiny models: packed GGUF weights against the same file dequantised, int8 against float32."""

from __future__ import annotations

import dataclasses
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))

from test_gguf import write_gguf

from tokenbus.core.config import Config
from tokenbus.core.errors import ConfigError, ModelError, PluginLoadError
from tokenbus.core.host import make_host
from tokenbus.core.models import gguf_file, gguf_packed
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.decoder import TorchLinears
from tokenbus.core.models.linears import Linears, Refusal
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import ResolvedModel, read_json
from tokenbus.core.models.sizing import model_size
from tokenbus.core.models.slot import choose_layout, choose_linears
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.worker.attention import KVLayout
from tokenbus.core.worker.cpu_attention import CpuAttention
from tokenbus.core.worker.plugins import WorkerPlugins
from tokenbus.kernels.cpu import lib
from tokenbus.kernels.cpu.linear import CpuLinear
from tokenbus.kernels.cpu.quantized import QuantLinear


@pytest.fixture(scope="module", autouse=True)
def _kernels():  # not asked for when tests are collected: that must not build the library
    if lib.load() is None:
        pytest.skip(f"the plugins refuse every model: {lib.unavailable_reason()}")


GGUF, INT8, KV = "quantization.gguf", "quantization.int8", "quantization.kv_int8"
FP8 = "quantization.kv_fp8"
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 320}
QUANTISABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where a block's fp16 scales are, for types that the gguf package reads, but does not write."""
ARCHITECTURES = {"llama": "llama-linear", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "phi3": "phi3"}


def pack_as(kind: str, seed: int = 0) -> Any:
    """For write_gguf: matrices in this type; of the K types random blocks of about the same size of weights."""
    random = np.random.default_rng(seed)

    def pack(name: str, value: np.ndarray) -> tuple[np.ndarray, Any]:
        number = gguf.GGMLQuantizationType[kind]
        if kind in {"F32", "F16"}:
            return value.astype(np.float16 if kind == "F16" else np.float32), None
        if kind not in HALVES:
            return gguf.quantize(value, number), number
        block, size = gguf.GGML_QUANT_SIZES[number]
        data = random.integers(0, 256, (value.shape[0], value.shape[1] // block, size), dtype=np.uint8)
        for at in HALVES[kind]:
            scales = random.uniform(0.5, 1, (*data.shape[:2], 1)) * (5e-5 if kind == "Q6_K" else 2e-4)
            data[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
        return data.reshape(value.shape[0], -1), number

    return pack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, remake: Any) -> Any:
    """made(arch, pack): a tiny model of it as a resolved GGUF file."""
    checkpoints: dict[str, Any] = {}

    def get(arch: str, pack: Any, name: str = "model") -> ResolvedModel:
        if arch not in checkpoints:
            changes = {"qwen2": {"use_sliding_window": False}, "gemma2": {"query_pre_attn_scalar": 24}}.get(arch, {})
            wide = {**WIDE, **({"head_dim": 32} if arch not in {"qwen2", "phi3"} else {}), **changes}
            checkpoints[arch] = remake(ARCHITECTURES[arch], tmp_path_factory.mktemp(arch), std=0.06, **wide)
        source = checkpoints[arch]
        file = tmp_path_factory.mktemp("gguf") / f"{name}.gguf"
        write_gguf(file, arch, read_json(source.path / "config.json"), load_file(source.path / "model.safetensors"), pack)
        return ResolvedModel(file.parent, name, gguf_file.read_config(gguf_file._open(file), name), file)

    return get


def dequantised(resolved: ResolvedModel, dtype: str = "float32") -> Any:
    """The same file as a folder of dense weights, loaded without plugins."""
    assert resolved.gguf is not None
    folder = resolved.path / "dense"
    folder.mkdir(exist_ok=True)
    save_file(dict(gguf_file.read_tensors(gguf_file._open(resolved.gguf), resolved.name)), folder / "model.safetensors")
    return load(ResolvedModel(folder, resolved.name, resolved.config), dtype)


def choose(*names: str, extra: type[Plugin] | None = None, **settings: Any) -> Any:
    host = make_host("worker", Config(plugins=settings))
    if extra is not None:
        host.add(extra)
    switches = host.start_switches(names)
    host.load(switches.on)
    return lambda model: choose_linears(host, switches.on, model)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Root mean square, relative to the truth's spread."""
    return float((found - truth).square().mean().sqrt() / truth.std())


@pytest.mark.parametrize("kind", [*QUANTISABLE, *HALVES, "F16"])
def test_packed_weights_give_the_dequantised_models_logits(kind: str, made: Any, paged: Any, tokens: Any) -> None:
    resolved, prompt = made("llama", pack_as(kind)), tokens(40, seed=8)
    model = load(resolved, "float32", choose=choose(GGUF))
    assert isinstance(model, CpuDecoder)
    truth = paged(dequantised(resolved)).prefill("a", prompt, 40)
    backend = CpuAttention()
    runs = [paged(model, backend=backend).prefill("a", prompt, chunk) for chunk in (40, 7, 1)]
    assert error(runs[0], truth) < (1e-5 if kind == "F16" else 0.03)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert model._fused.steps > 40
    expected = CpuLinear if kind == "F16" else QuantLinear
    assert {type(layer.attention.qkv) for layer in model.layers} == {type(model.head)} == {expected}


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_every_architecture_runs_packed(arch: str, made: Any, paged: Any, tokens: Any) -> None:
    """Permuted rows, biases, norms with an offset, gate and up in one tensor, tied and untied heads."""
    resolved, prompt = made(arch, pack_as("Q8_0")), tokens(24, seed=3)
    model = load(resolved, "float32", choose=choose(GGUF))
    found = paged(model, backend=CpuAttention()).prefill("a", prompt, 24)
    assert error(found, paged(dequantised(resolved)).prefill("a", prompt, 24)) < 0.03
    slow = paged(model).prefill("a", prompt, 24)  # layer by layer, with torch's attention
    assert error(found, slow) < 0.03


def test_types_may_differ_within_a_layer(made: Any, paged: Any, tokens: Any) -> None:
    def mixed(name: str, value: np.ndarray) -> Any:
        return pack_as("Q8_0" if "attn_v" in name else "F16" if "ffn_down" in name else "Q4_0" if "ffn_up" in name else "Q5_1")(
            name, value
        )

    resolved, prompt = made("llama", mixed), tokens(24, seed=3)
    model = load(resolved, "float32", choose=choose(GGUF))
    assert isinstance(model, CpuDecoder)
    truth = paged(dequantised(resolved)).prefill("a", prompt, 24)
    assert error(paged(model, backend=CpuAttention()).prefill("a", prompt, 24), truth) < 0.03


def test_a_packed_model_needs_no_dequantised_copy(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = made("llama", pack_as("Q4_1"))

    def never(*_: Any) -> None:
        raise AssertionError("the whole file was dequantised")

    monkeypatch.setattr(gguf_file, "weights", never)
    monkeypatch.setattr(gguf_file, "_open", never)
    model = load(resolved, "bfloat16", choose=choose(GGUF))
    size = model_size(resolved, "bfloat16", choose(GGUF)(_described(resolved)))
    assert size.weights_bytes == model.spec.weights_bytes
    assert isinstance(model, CpuDecoder)
    products: list[Any] = [model.head]
    for layer in model.layers:
        mlp: Any = layer.mlp
        products += [layer.attention.qkv, layer.attention.out, mlp.gate_up.gate, mlp.gate_up.up, mlp.down]
    norms = (2 * len(model.layers) + 1) * model.spec.hidden_size * 2
    assert sum(p.nbytes for p in products) + norms == pytest.approx(model.spec.weights_bytes, rel=0.1)
    assert model.spec.step_bytes == model.spec.weights_bytes
    assert model.spec.head_bytes == pytest.approx(products[0].nbytes, rel=0.1)


def _described(resolved: ResolvedModel) -> Any:
    from tokenbus.core.models.loader import describe

    return describe(resolved, "bfloat16")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3"])
def test_int8_is_close_to_the_model_for_every_family(kind: str, tiny: Any, paged: Any, tokens: Any) -> None:
    source, prompt = tiny(kind), tokens(40, seed=8)
    resolved = ResolvedModel(source.path, kind, read_json(source.path / "config.json"))
    model = load(resolved, "float32", choose=choose(INT8))
    assert isinstance(model, CpuDecoder)
    runs = [paged(model, backend=CpuAttention()).prefill("a", prompt, chunk) for chunk in (40, 7, 1)]
    assert error(runs[0], source.truth(prompt)) < 0.2  # tiny random models are harsh: peaked attention, wide weights
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])
    assert {type(layer.attention.qkv) for layer in model.layers} == {type(model.head)} == {QuantLinear}
    assert {type(layer.mlp.down) for layer in model.layers} == {CpuLinear}  # pyright: ignore[reportAttributeAccessIssue]
    assert model_size(resolved, "float32", choose(INT8)(_float32(resolved))).weights_bytes == model.spec.weights_bytes
    assert model.spec.head_bytes < 0.3 * model.spec.head_params * 4
    assert model.spec.step_bytes < model.spec.weights_bytes


def test_matrices_that_int8_keeps_are_named(tiny: Any) -> None:
    source = tiny("qwen3")
    resolved = ResolvedModel(source.path, "m", read_json(source.path / "config.json"))
    keep = {INT8: {"keep": ["layers.1.self_attn.o_proj", "embed_tokens"]}}
    model = load(resolved, choose=choose(INT8, **keep))
    assert [type(layer.attention.out) for layer in model.layers] == [QuantLinear, CpuLinear, QuantLinear]
    assert {type(layer.mlp.down) for layer in model.layers} == {QuantLinear}
    assert type(model.head) is CpuLinear
    with pytest.raises(ModelError, match="its setting `keep` names 'lm_head', and no matrix of the model ends so"):
        load(resolved, choose=choose(INT8, **{INT8: {"keep": ["lm_head"]}}))


def _float32(resolved: ResolvedModel) -> Any:
    from tokenbus.core.models.loader import describe

    return describe(resolved, "float32")


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma", "phi3"])
def test_the_rotation_leaves_the_model_as_it_is(kind: str, tiny: Any, paged: Any, tokens: Any) -> None:
    from tokenbus.plugins.quantization.rotation import RotatedWeights, Rotation

    class Turned(TorchLinears):
        def source(self, weights: Any) -> Any:
            self.turned = RotatedWeights(weights, self.config)
            return self.turned

        def embedding(self, weights: Any, name: str, head: Any) -> Any:
            table = self.turned.embedding()
            return lambda ids: table[ids]

    class Chooser(Plugin):
        info = PluginInfo(name="test.turned", summary="", scope="engine", lossless=False, slot="quantization")

        @hookimpl
        def quantization(self, model: Any) -> Linears:
            linears = Turned(torch.float32)
            linears.config = model.config
            return linears

    source, prompt = tiny(kind), tokens(40, seed=8)
    resolved = ResolvedModel(source.path, kind, read_json(source.path / "config.json"))
    model = load(resolved, "float32", choose=choose("test.turned", extra=Chooser))
    assert not isinstance(model, CpuDecoder)
    assert torch.allclose(paged(model).prefill("a", prompt, 40), source.truth(prompt), atol=5e-4)
    for n in (64, 96, 576, 63):
        turn = Rotation(n)(torch.eye(n))
        assert torch.allclose(turn @ turn.T, torch.eye(n), atol=1e-5)
        assert float(turn.abs().max()) < 0.9


class TestRefusals:
    def test_not_a_gguf_file(self, tiny: Any) -> None:
        source = tiny("llama")
        resolved = ResolvedModel(source.path, "m", read_json(source.path / "config.json"))
        with pytest.raises(ModelError, match=r"m can't be run with quantization\.gguf: it is not a GGUF file"):
            load(resolved, choose=choose(GGUF))

    def test_a_type_that_cannot_stay_packed(self, made: Any) -> None:
        def pack(name: str, value: np.ndarray) -> Any:
            if "ffn_down" not in name:
                return pack_as("Q4_0")(name, value)
            number = gguf.GGMLQuantizationType.TQ2_0
            return gguf.quantize(value, number), number

        with pytest.raises(
            ModelError, match=r"model\.layers\.0\.mlp\.down_proj\.weight is TQ2_0; what can stay packed is Q4_0, "
        ):
            load(made("llama", pack), choose=choose(GGUF))

    def test_one_product_of_packed_and_plain_tensors(self, made: Any) -> None:
        resolved = made("llama", lambda name, value: pack_as("F16" if "attn_k" in name else "Q8_0")(name, value))
        with pytest.raises(ModelError, match=r"q_proj\.weight and k_proj\.weight, v_proj\.weight are Q8_0, F16, Q8_0"):
            load(resolved, choose=choose(GGUF))

    @pytest.mark.parametrize("plugin", [GGUF, INT8])
    def test_without_the_kernels(self, plugin: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        resolved = made("llama", pack_as("Q8_0"))
        with pytest.raises(ModelError, match=rf"{plugin}: it needs the C\+\+ kernels, and model\.kernels is torch"):
            load(resolved, kernels="torch", choose=choose(plugin))
        monkeypatch.setattr(lib, "load", lambda: None)
        monkeypatch.setattr(lib, "unavailable_reason", lambda: "there is no compiler")
        with pytest.raises(ModelError, match=rf"{plugin}: it needs the C\+\+ kernels, and there is no compiler"):
            load(resolved, choose=choose(plugin))

    @pytest.mark.parametrize(
        ("kind", "why"), [("qwen3-moe", "it is a mixture of experts"), ("gpt2", "it runs through transformers")]
    )
    def test_models_that_the_kernels_do_not_run(self, kind: str, why: str, tiny: Any) -> None:
        source = tiny(kind)
        resolved = ResolvedModel(source.path, kind, read_json(source.path / "config.json"))
        with pytest.raises(ModelError, match=rf"quantization\.int8: it needs the C\+\+ kernels, and {why}"):
            load(resolved, choose=choose(INT8))

    def test_a_holder_that_says_nothing_or_nonsense(self, tiny: Any) -> None:
        class Silent(Plugin):
            info = PluginInfo(name="test.silent", summary="", scope="engine", lossless=False, slot="quantization")
            answer: Any = None

            @hookimpl
            def quantization(self) -> Any:
                return self.answer

        source = tiny("llama")
        resolved = ResolvedModel(source.path, "m", read_json(source.path / "config.json"))
        with pytest.raises(ModelError, match=r"m can't be run with test\.silent: it does not say why"):
            load(resolved, choose=choose("test.silent", extra=Silent))
        Silent.answer = "int8"
        with pytest.raises(PluginLoadError, match="answered a str, neither a Linears nor a Refusal"):
            load(resolved, choose=choose("test.silent", extra=Silent))

    def test_a_matrix_that_is_missing(self, made: Any) -> None:
        described = _described(made("llama", pack_as("Q8_0")))
        name = "model.layers.1.self_attn.k_proj.weight"
        stored = {key: value for key, value in described.stored.items() if key != name}
        with pytest.raises(ModelError, match=f"its file has no tensor {name}"):
            choose(GGUF)(dataclasses.replace(described, read_formats=lambda: stored))

    def test_damaged_files(self, made: Any) -> None:
        resolved = made("llama", pack_as("Q8_0"))
        whole, head = resolved.gguf.read_bytes(), b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
        for damaged, message in (
            (whole[:-64], "shorter than its table of tensors says"),
            (whole[:200], "not a readable GGUF file"),
            (b"GGML" + whole[4:], "not a GGUF file of version"),
            (head + struct.pack("<Q17sII", 17, b"general.alignment", 4, 0), "not a readable GGUF file: .* zero"),
            (head + struct.pack("<QQI", 1 << 63, 0, 4), "not a readable GGUF file: .* too large"),
        ):
            resolved.gguf.write_bytes(damaged)
            with pytest.raises(ModelError, match=message):
                gguf_packed.PackedFile(resolved)


class TestLayout:
    LAYOUT = KVLayout(2, (2, 2), (16, 16), 4, torch.bfloat16, torch.device("cpu"))

    def ask(self, layout: KVLayout, *names: str, extra: type[Plugin] | None = None) -> KVLayout:
        host = make_host("worker", Config())
        if extra is not None:
            host.add(extra)
        switches = host.start_switches(names)
        host.load(switches.on)
        return choose_layout(host, switches.on, "m", layout)

    def test_kv_int8_quantises(self) -> None:
        assert self.ask(self.LAYOUT) is self.LAYOUT
        found = self.ask(self.LAYOUT, KV)
        assert found == dataclasses.replace(self.LAYOUT, stored="int8")
        assert found.bytes_per_token == 2 * 2 * 2 * (16 + 4)

    def test_kv_fp8_quantises(self) -> None:
        found = self.ask(self.LAYOUT, FP8)
        assert found == dataclasses.replace(self.LAYOUT, stored="fp8")
        assert found.bytes_per_token == 2 * 2 * 2 * (16 + 4)
        assert CpuAttention.serves(dataclasses.replace(self.LAYOUT, stored="int8"))
        assert not CpuAttention.serves(found)

    def test_both_at_once_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"can't enable 'quantization.kv_fp8': it conflicts with 'quantization.kv_int8'"):
            self.ask(self.LAYOUT, KV, FP8)

    @pytest.mark.parametrize("name", [KV, FP8])
    def test_a_head_without_room_for_a_scale_is_refused(self, name: str) -> None:
        with pytest.raises(ModelError, match=rf"m can't be run with {name}: a head of 18 values"):
            self.ask(dataclasses.replace(self.LAYOUT, head_dim=(18, 18)), name)

    @pytest.mark.parametrize(
        ("answer", "scope", "problem"),
        [
            (dataclasses.replace(LAYOUT, block_size=8), "engine", "changed block_size of the K/V layout"),
            (dataclasses.replace(LAYOUT, stored="int8"), "step", "only a plugin of scope 'engine'"),
            ("int8", "engine", "answered a str"),
            (Refusal(3), "engine", "refused with a int"),  # pyright: ignore[reportArgumentType]
        ],
    )
    def test_nonsense_stops_the_start(self, answer: Any, scope: Any, problem: str) -> None:
        class Odd(Plugin):
            info = PluginInfo(name="test.odd", summary="", scope=scope, lossless=False)

            @hookimpl
            def kv_layout(self) -> Any:
                return answer

        with pytest.raises(PluginLoadError, match=problem):
            self.ask(self.LAYOUT, "test.odd", extra=Odd)

    def test_an_attention_backend_that_cannot_read_it_goes_off(self) -> None:
        class Foreign(CpuAttention):
            name = "foreign"
            quantized_kv = False

        class Attention(Plugin):
            info = PluginInfo(name="test.attention", summary="", scope="step", lossless=False, slot="attention")

            @hookimpl
            def attention_backend(self) -> Any:
                return Foreign()

        host = make_host("worker", Config())
        host.add(Attention)
        plugins = WorkerPlugins(host, host.start_switches(["test.attention", KV]).names())
        plugins.start()
        assert plugins.attention(self.LAYOUT).name == "foreign"
        plugins._backend = None
        backend = plugins.attention(plugins.kv_layout("m", self.LAYOUT))
        assert backend.name == "torch"
        assert plugins.slot_error is not None
        assert "'foreign' can't read the int8 K/V cache" in plugins.slot_error.message
        assert plugins.slot_error.plugin == "test.attention"


def test_the_head_of_a_gguf_file_is_the_gguf_packages(made: Any) -> None:
    resolved = made("qwen3", pack_as("Q5_0"))
    head = gguf_packed.Head(resolved.gguf.read_bytes(), "m")
    reader = gguf.GGUFReader(resolved.gguf)
    assert head.architecture == "qwen3"
    for tensor in reader.tensors:
        entry = head.tensors[tensor.name]
        assert entry.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert (entry.type, entry.nbytes, entry.offset) == (tensor.tensor_type.name, tensor.n_bytes, tensor.data_offset)
    assert len(head.tensors) == len(reader.tensors)


def test_what_decides_the_bits_names_every_lossy_plugin_of_the_engine() -> None:
    host = make_host("engine", Config())
    plain = host.start_switches([], ["attention.cpu"]).on
    assert host.kernels(plain) == ""
    assert host.kernels(host.start_switches([KV, INT8]).on) == "attention.cpu quantization.int8 quantization.kv_int8"
