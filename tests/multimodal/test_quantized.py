"""Multimodal checkpoints whose text part is quantised: as the model of the weights that they stand for, by transformers' own class."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "models")]

from checkpoint_formats import KINDS, Kind, awq, e4m3, fine_grained, packed, quantise
from test_checkpoints import experts_apart
from test_models import MORE, Engine, cuts_of, limit

from tokenbus.core.cli import main
from tokenbus.core.config import Config, from_mapping
from tokenbus.core.errors import ModelError
from tokenbus.core.host import make_host
from tokenbus.core.models.cpu_decoder import CpuDecoder
from tokenbus.core.models.loader import describe, load
from tokenbus.core.models.media_config import spellings
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import model_size, tower_bytes
from tokenbus.core.models.slot import choose_linears
from tokenbus.core.selftest.stand import Answer, Ask, Stand
from tokenbus.kernels.cpu import lib
from tokenbus.plugins.multimodal.towers import tower_encoder
from tokenbus.plugins.quantization.checkpoint.formats import Listed
from tokenbus.plugins.quantization.triton_products import Int4Product

TEXT = r"(model|language_model\.model)\."
"""How names of the text part begin in what this transformers writes; the towers' of these families do not."""
SKIPPED = ["re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:vision_tower.*", "re:multi_modal_projector.*"]
"""What recipes of llm-compressor leave out, in both spellings."""


@dataclass
class Made:
    """Two of conftest's TinyMedia."""

    quantised: Any
    dense: Any


def choose(model: Any) -> Any:
    """What the worker asks."""
    host = make_host("worker", Config())
    on = host.start_switches((), ()).on
    host.load(on)
    return choose_linears(host, on, model)


def write(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def make(tiny: Any, folder: Path, kind: Kind, only: str = TEXT) -> Made:
    """transformers' own model is that of the dense one."""
    quantised, dense = quantise(tiny.path, folder, kind, only=only)
    reference = getattr(transformers, tiny.family.model_class).from_pretrained(dense, dtype=torch.float32).eval()
    reference.set_attn_implementation("eager")
    return Made(*(type(tiny)(tiny.name, path, reference) for path in (quantised, dense)))


def kind_of(kind: str, **config: Any) -> Kind:
    made = KINDS[kind]()
    return Kind({**made.config, **config}, made.pack)


CASES: dict[str, tuple[str, Callable[[], Kind]]] = {
    "qwen2.5-vl, awq": ("qwen2.5-vl", lambda: kind_of("awq", modules_to_not_convert=["visual"])),
    "qwen2.5-vl, gptq": ("qwen2.5-vl", lambda: kind_of("gptq, sorted")),
    "qwen2.5-vl, packed": ("qwen2.5-vl", lambda: kind_of("packed int4, asymmetric", ignore=SKIPPED)),
    "qwen2.5-vl, float8": (
        "qwen2.5-vl",
        lambda: kind_of("float8", ignore=["lm_head", *(f"model.visual.blocks.{i}.attn.qkv" for i in range(2))]),
    ),
    "qwen2.5-vl, fp8": (
        "qwen2.5-vl",
        lambda: kind_of("fp8, small blocks", modules_to_not_convert=["lm_head", "model.visual.merger.mlp.0"]),
    ),
    "llava, awq": ("llava", lambda: kind_of("awq", modules_to_not_convert=["vision_tower", "multi_modal_projector"])),
    "llava, packed": ("llava", lambda: kind_of("packed int4", ignore=SKIPPED)),
    "llava, fp8": ("llava", lambda: kind_of("fp8", modules_to_not_convert=["language_model.lm_head", "vision_tower"])),
    "gemma3, packed": ("gemma3", lambda: kind_of("packed int4, sorted", ignore=SKIPPED)),
}


@pytest.fixture(scope="module")
def made(tiny_media: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done: dict[str, Made] = {}

    def get(case: str) -> Made:
        if case not in done:
            family, kind = CASES[case]
            done[case] = make(tiny_media(family), tmp_path_factory.mktemp("quantised"), kind())
        return done[case]

    return get


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_weights_that_it_stands_for(case: str, made: Any) -> None:
    found = made(case)
    prompt = found.quantised.prompt([0, 1], seed=4)
    truth = found.dense.truth(prompt, MORE)
    engine = Engine(found.quantised, choose=choose)
    logits = engine.logits(prompt, MORE, [])
    assert float((logits - truth).abs().max()) <= limit(truth)
    assert torch.equal(logits, Engine(found.dense).logits(prompt, MORE, [])), "the same weights, bit by bit"
    assert torch.equal(engine.logits(prompt, MORE, cuts_of(prompt)), logits), "chunks change nothing"


class TestExperts:
    """Of Qwen3-VL-MoE."""

    @pytest.fixture
    def tiny(self, tiny_media: Any) -> Any:
        return tiny_media("qwen3-vl-moe")

    def test_each_by_itself(self, tiny: Any, tmp_path: Path) -> None:
        """As llm-compressor takes them apart."""
        source = tmp_path / "source"
        shutil.copytree(tiny.path, source)
        tensors = load_file(source / "model.safetensors")
        turned = {name: outputs_first(t) for name, t in tensors.items() if ".experts." in name}
        plain = {name: t for name, t in tensors.items() if name not in turned}
        save_file(plain | experts_apart(turned), source / "model.safetensors", metadata={"format": "pt"})
        quantised, dense = quantise(source, tmp_path, packed(4, 16), only=r"model\.language_model\.|model\.layers\.")
        prompt = tiny.prompt([0], seed=4)
        found, wanted = (
            Engine(type(tiny)(tiny.name, path, None), choose=choose).logits(prompt, MORE, []) for path in (quantised, dense)
        )
        assert torch.equal(found, wanted)
        assert float((found - Engine(tiny).logits(prompt, MORE, [])).abs().max()) > limit(found)

    @pytest.mark.parametrize("inputs_first", [True, False])
    def test_stacked_in_float8(self, inputs_first: bool, tiny: Any, tmp_path: Path) -> None:
        """As Qwen's own checkpoints have them, and as transformers now writes them."""
        found = make(tiny, tmp_path, fine_grained((32, 32)), r"model\.language_model\.|model\.layers\.")
        stored, dense = (load_file(one.path / "model.safetensors") for one in (found.quantised, found.dense))
        for name in [name for name in stored if ".experts." in name]:
            given = outputs_first(stored[name])
            packs = [e4m3((t.T if inputs_first else t).double().numpy(), (32, 32)) for t in given]
            stored[name] = torch.stack([values for values, _, _ in packs])
            stored[f"{name}_scale_inv"] = torch.stack([torch.from_numpy(scales) for _, scales, _ in packs])
            means = torch.stack([torch.from_numpy(weight).float() for _, _, weight in packs])
            dense[name] = (means if means.shape == dense[name].shape else means.transpose(1, 2)).contiguous()
        for one, tensors in ((found.quantised, stored), (found.dense, dense)):
            save_file(tensors, one.path / "model.safetensors", metadata={"format": "pt"})
        reference = getattr(transformers, tiny.family.model_class).from_pretrained(found.dense.path, dtype=torch.float32).eval()
        reference.set_attn_implementation("eager")
        found.dense.reference = reference
        prompt = found.dense.prompt([0, 1], seed=4)
        truth = found.dense.truth(prompt, MORE)
        logits = Engine(found.quantised, choose=choose).logits(prompt, MORE, [])
        assert float((logits - truth).abs().max()) <= limit(truth)
        assert torch.equal(logits, Engine(found.dense).logits(prompt, MORE, []))
        resolved = resolve(str(found.quantised.path))
        model = load(resolved, "float32", choose=choose)
        size = model_size(resolved, "float32", choose(describe(resolved, "float32")))
        assert size.weights_bytes == model.spec.weights_bytes

    @pytest.mark.parametrize(
        ("end", "change", "config", "reason"),
        [
            (
                "gate_up_proj_scale_inv",
                lambda t: t[:, :1].contiguous(),
                {},
                r"gate_up_proj_scale_inv must be \[6, \d, \d\], not",
            ),
            ("gate_up_proj_scale_inv", None, {}, "gate_up_proj is torch.float8_e4m3fn, and nothing says what it stands for"),
            ("down_proj", lambda t: t.float(), {}, "down_proj is F32 .*, not F8_E4M3 of 3 dimensions"),
            ("", None, {"modules_to_not_convert": ["model.language_model.layers.0.mlp"]}, "is not quantised, but its files"),
            ("", None, {"weight_block_size": [16, 32]}, r"blocks are \[16, 32\], not square"),
        ],
    )
    def test_refusals(self, end: str, change: Any, config: dict[str, Any], reason: str, tiny: Any, tmp_path: Path) -> None:
        path, _ = quantise(tiny.path, tmp_path, fine_grained((32, 32)), only=r"model\.language_model\.|model\.layers\.")
        tensors = load_file(path / "model.safetensors")
        for name in [name for name in tensors if ".experts." in name]:
            packs = [e4m3(t.double().numpy(), (32, 32)) for t in tensors[name]]
            tensors[name] = torch.stack([values for values, _, _ in packs])
            tensors[f"{name}_scale_inv"] = torch.stack([torch.from_numpy(scales) for _, scales, _ in packs])
        for name in [name for name in tensors if end and name.endswith(f".experts.{end}")]:
            value = tensors.pop(name)
            if change is not None:
                tensors[name] = change(value)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        said = json.loads((path / "config.json").read_text())["quantization_config"]
        write(path, quantization_config={**said, **config})
        with pytest.raises(ModelError, match=reason):
            load(resolve(str(path)), choose=choose)


def outputs_first(experts: torch.Tensor) -> torch.Tensor:
    """Of the tiny model, whose experts have 48 hidden units: gate and up [6, 96, 64], down [6, 64, 48]."""
    return experts if experts.shape[1:] in {(96, 64), (64, 48)} else experts.transpose(1, 2).contiguous()


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_that_are_loaded(case: str, made: Any) -> None:
    resolved = resolve(str(made(case).quantised.path))
    model = load(resolved, "float32", choose=choose)
    size = model_size(resolved, "float32", choose(describe(resolved, "float32")))
    assert size.weights_bytes == model.spec.weights_bytes
    assert model.beside is not None
    encoder = tower_encoder(model.beside)
    assert encoder is not None
    assert tower_bytes(resolved, "float32") == encoder.weights_bytes


def test_int8_stays_as_it_is_beside_a_tower(tiny_media: Any, tmp_path: Path) -> None:
    if lib.load() is None:
        pytest.skip(f"there are no C++ kernels: {lib.unavailable_reason()}")
    found = make(tiny_media("llava"), tmp_path, kind_of("int8", ignore=SKIPPED))
    prompt = found.quantised.prompt([0], seed=4)
    engine = Engine(found.quantised, "auto", choose)
    assert isinstance(engine.model, CpuDecoder)
    logits, truth = engine.logits(prompt, MORE, []), found.dense.truth(prompt, MORE)
    assert 1e-4 < float((logits - truth).square().mean().sqrt() / truth.std()) < 0.25  # activations in 8 bits
    assert torch.equal(engine.logits(prompt, MORE, cuts_of(prompt)), logits)
    assert engine.model.spec.weights_bytes < 0.8 * model_size(resolve(str(found.dense.path)), "float32").weights_bytes


def test_products_of_a_gpu_take_it_too(made: Any) -> None:
    """In Triton's interpreter."""
    found = made("qwen2.5-vl, awq")
    prompt = found.quantised.prompt([0], seed=4)
    engine = Engine(found.quantised, choose=lambda model: choose(dataclasses.replace(model, triton=True)))
    assert isinstance(engine.model.layers[0].attention.out, Int4Product)
    truth = found.dense.truth(prompt)
    assert float((engine.logits(prompt, [], []) - truth).abs().max()) <= limit(truth)


def test_names_of_the_newest_form(tiny_media: Any, tmp_path: Path) -> None:
    """Files and config in the same spelling, or in two."""
    found = make(tiny_media("qwen2.5-vl"), tmp_path, packed(4, 32))
    path, wanted = found.quantised.path, Engine(found.dense).logits(prompt := found.dense.prompt([0]), MORE, [])
    tensors = load_file(path / "model.safetensors")
    newest = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else name.replace("visual.", "model.visual."): t
        for name, t in tensors.items()
    }
    save_file(newest, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    for target in ("re:model.language_model.layers.*_proj", r"re:model\.layers\.\d+\.", r"re:^(?!.*visual).*_proj$"):
        groups = {"group_0": {**group, "targets": [target]}}
        write(path, quantization_config={**config, "config_groups": groups, "ignore": ["re:^(?!.*language_model).*", *SKIPPED]})
        assert torch.equal(Engine(found.quantised, choose=choose).logits(prompt, MORE, []), wanted), target


def test_what_is_said_in_the_text_part_of_the_config(tiny_media: Any, tmp_path: Path) -> None:
    found = make(tiny_media("llava"), tmp_path, awq())
    path, prompt = found.quantised.path, found.dense.prompt([0])
    config = json.loads((path / "config.json").read_text())
    said = config.pop("quantization_config")
    text = {**config["text_config"], "quantization_config": said}
    (path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    assert torch.equal(
        Engine(found.quantised, choose=choose).logits(prompt, MORE, []), Engine(found.dense).logits(prompt, MORE, [])
    )
    write(path, quantization_config={**said, "group_size": 64})
    with pytest.raises(ModelError, match="one quantization_config for all of it, and another one in its text_config"):
        load(resolve(str(path)), choose=choose)


def answers(tiny: Any, *, multimodal: bool) -> list[Answer]:
    """Of an engine with the plugin, or started without it; texts, and a picture if it can have one."""
    off = [] if multimodal else ["multimodal"]
    model, cache = {"model": str(tiny.path), "dtype": "float32"}, {"block_size": 4, "encoder_memory_mb": 1}
    config = from_mapping({"model": model, "cache": cache, "features": {"disable": off}}, "test")
    stand = Stand(config, enable=("multimodal",) if multimodal else (), disable=tuple(off))
    prompts = [tiny.prompt(sizes, seed=k) for k, sizes in enumerate([[], [], [0]][: 3 if multimodal else 2])]
    try:
        asks = [Ask(p.tokens, max_tokens=6, fields={"logprobs": 2}, media=p.media) for p in prompts]
        return stand.run(asks, chunk=7).answers
    finally:
        stand.close()


@pytest.mark.parametrize("multimodal", [True, False])
@pytest.mark.parametrize("case", ["qwen2.5-vl, awq", "llava, packed"])
def test_an_engine_answers_as_with_the_dense_one(case: str, multimodal: bool, made: Any) -> None:
    found = made(case)
    pairs = zip(*(answers(tiny, multimodal=multimodal) for tiny in (found.quantised, found.dense)), strict=True)
    assert all(one.tokens and one.same(other) for one, other in pairs)


@pytest.mark.parametrize("multimodal", [True, False])
def test_plan_memory_counts_it(multimodal: bool, made: Any, capsys: Any) -> None:
    found = made("qwen2.5-vl, awq").quantised
    options = ["--model", str(found.path), "--dtype", "bfloat16", "--kv-memory-mb", "1"]
    switch = ["--enable" if multimodal else "--disable", "multimodal"]
    assert main(["plan-memory", "--json", *options, *switch]) == 0
    shown = json.loads(capsys.readouterr().out)
    resolved = resolve(str(found.path))
    text = load(resolved, "bfloat16", choose=choose).spec.weights_bytes
    assert shown["weights_bytes"] == text + (tower_bytes(resolved, "bfloat16") if multimodal else 0)


class TestRefusals:
    def test_a_tower_that_is_quantised_too(self, tiny_media: Any, tmp_path: Path) -> None:
        """The text part alone can be run."""
        tiny = tiny_media("llava")
        quantised, dense = quantise(tiny.path, tmp_path, awq(), only=rf"{TEXT}|vision_tower\..*\.q_proj")
        resolved = resolve(str(quantised))
        model = load(resolved, choose=choose)
        assert model.beside is not None
        reason = r"tower is quantised \(vision_tower\..*q_proj\.qweight is I32\).*switch multimodal off"
        with pytest.raises(ModelError, match=reason):
            tower_encoder(model.beside)
        with pytest.raises(ModelError, match=reason):
            tower_bytes(resolved, "float32")
        both = [type(tiny)(tiny.name, path, None) for path in (quantised, dense)]
        with pytest.raises(ModelError, match=reason):
            answers(both[0], multimodal=True)
        found, wanted = (answers(one, multimodal=False) for one in both)
        assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]

    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("model.layers.1.mlp.down_proj", awq),
            ("model.language_model.layers.1.mlp.down_proj", awq),
            ("model.language_model.layers.1.mlp.down_proj", lambda: fine_grained((32, 32))),
        ],
    )
    def test_a_module_that_the_config_says_is_not_quantised(
        self, name: str, kind: Callable[[], Kind], tiny_media: Any, tmp_path: Path
    ) -> None:
        """In whichever spelling."""
        made = kind()
        listed = Kind({**made.config, "modules_to_not_convert": ["visual", name]}, made.pack)
        quantised, _ = quantise(tiny_media("qwen2.5-vl").path, tmp_path, listed, only=TEXT)
        with pytest.raises(ModelError, match=r"says that model\.layers\.1\.mlp\.down_proj is not quantised, but its files"):
            load(resolve(str(quantised)), choose=choose)

    def test_a_group_for_the_tower_alone(self, tiny_media: Any, tmp_path: Path) -> None:
        kind = packed(4, 32)
        group = {**kind.config["config_groups"]["group_0"], "targets": ["re:.*visual.*"]}
        of_tower = Kind({**kind.config, "config_groups": {"group_0": group}}, kind.pack)
        quantised, _ = quantise(tiny_media("qwen2.5-vl").path, tmp_path, of_tower, only=TEXT)
        with pytest.raises(ModelError, match=r"none of its config_groups is for model\.layers\.0"):
            load(resolve(str(quantised)), choose=choose)

    def test_a_text_part_that_the_decoder_does_not_know(self, tmp_path: Path) -> None:
        known = transformers.CONFIG_MAPPING["gemma3n"]().to_dict()
        known |= {"architectures": ["Gemma3nForConditionalGeneration"], "quantization_config": awq().config}
        (tmp_path / "config.json").write_text(json.dumps(known, default=str), encoding="utf-8")
        save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=r"quantised \(awq\), and its text part is none that core's decoder knows"):
            load(resolve(str(tmp_path)), choose=choose)


@pytest.mark.parametrize(
    ("listed", "meant"),
    [
        (["model.language_model.layers.3"], True),
        (["language_model.model.layers.3.mlp"], True),
        (["model.layers.3.mlp.down_proj"], True),
        (["model.layers.33", "model.layers.3.mlp.down", "model.visual", "visual"], False),
        (["down_proj"], True),
        (["model\\.layers\\.\\d"], True),
        (["model\\.layers\\.\\d\\.self_attn"], False),
        (["(?!.*language_model)"], False),
        (["(?!.*visual).*_proj"], True),
    ],
)
def test_which_modules_a_list_means(listed: list[str], meant: bool) -> None:
    names = spellings("model.layers.3.mlp.down_proj")
    assert Listed.of_transformers(listed).means(names) is meant
    if listed != ["down_proj"]:  # ends of names mean nothing there
        written = [
            one if one.startswith(("model.", "visual", "language")) and "\\" not in one else f"re:{one}" for one in listed
        ]
        assert Listed.of_compressed_tensors(written).means(names) is meant


def test_spellings() -> None:
    wanted = {
        f"{start}layers.0.mlp" for start in ("model.", "model.language_model.", "language_model.model.", "model.text_model.")
    }
    assert set(spellings("model.layers.0.mlp")) == wanted
    assert set(spellings("lm_head")) == {"lm_head", "language_model.lm_head"}
