"""Configurations and names of tensors as checkpoints on the hub have them: written by several generations of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from tokenbus.core.errors import ModelError
from tokenbus.core.models.families import decoder_config
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import model_size, tower_bytes
from tokenbus.plugins.multimodal.towers import tower_encoder

QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    "eos_token_id": 151645,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "in_chans": 3, "spatial_patch_size": 14},
    "vocab_size": 151936,
}
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "num_attention_heads": 16, "image_size": 336},
}
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "patch_size": 14},
}


def test_a_text_part_whose_keys_are_beside_the_towers() -> None:
    config = decoder_config(QWEN2_VL, "a-model")
    assert config is not None
    assert (config.architecture, config.tied, config.qkv_bias) == ("Qwen2VLForConditionalGeneration", True, True)
    rope = config.layers[0].rope
    assert rope is not None
    assert (rope.theta, rope.sections, rope.interleaved) == (1e6, (16, 24, 24), False)
    assert {layer.window for layer in config.layers} == {None}
    assert config.eos_token_ids == (151645,)


def test_a_text_part_that_leaves_its_sizes_to_the_class() -> None:
    config = decoder_config(LLAVA, "a-model")
    assert config is not None
    assert (config.hidden_size, len(config.layers), config.vocab_size, config.norm_eps) == (4096, 32, 32064, 1e-5)
    assert not config.tied


def test_a_text_part_with_sliding_layers_and_the_whole_models_end_tokens() -> None:
    config = decoder_config(GEMMA3, "a-model")
    assert config is not None
    assert config.tied
    assert config.eos_token_ids == (1, 106)
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [None]
    assert config.layers[5].rope is not None
    assert config.layers[5].rope.factor == 8.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no_such_type"}, "does not know the multimodal model type"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "does not share out"),
        (LLAVA | {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 1000}}, "malformed"),
    ],
)
def test_what_can_not_be_run_is_refused_by_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        decoder_config(QWEN2_VL | change, "a-model")
    assert reason in caught.value.message


@pytest.mark.parametrize(
    ("kind", "class_name", "reason"),
    [
        ("gemma3n", "Gemma3nForConditionalGeneration", "gemma3n takes more than text"),
        ("ultravox", "UltravoxModel", "transformers does not know the multimodal model type 'ultravox'"),
    ],
)
def test_families_that_nobody_has_written_are_refused_by_name(kind: str, class_name: str, reason: str, tmp_path: Path) -> None:
    known = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {"model_type": kind, "audio_config": {"layers": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**known, "architectures": [class_name]}, default=str), encoding="utf-8")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(resolve(str(tmp_path)), "float32")
    assert reason in caught.value.message


RENAMES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "llava, first form": ("llava", [("vision_tower.", "vision_tower.vision_model.")]),
    "llava, newest form": (
        "llava",
        [
            ("language_model.lm_head.", "lm_head."),
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
    ),
    "gemma3, first form": ("gemma3", [("vision_tower.", "vision_tower.vision_model.")]),
    "qwen2.5-vl, newest form": ("qwen2.5-vl", [("model.", "model.language_model."), ("visual.", "model.visual.")]),
    "qwen2-vl, newest form": ("qwen2-vl", [("model.", "model.language_model."), ("visual.", "model.visual.")]),
}


def renamed(source: Path, target: Path, rules: list[tuple[str, str]]) -> Path:
    def name_of(name: str) -> str:
        for old, new in rules:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    shutil.copytree(source, target)
    tensors = {name_of(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def text_and_rows(path: Path, item: Any) -> tuple[torch.Tensor, torch.Tensor]:
    model: Any = load(resolve(str(path)), kernels="torch")
    encoder = tower_encoder(model.beside)
    assert encoder is not None
    return model.embedding.weight, encoder.encode(item).rows


@pytest.mark.parametrize("case", RENAMES)
def test_names_of_every_generation_are_read(case: str, tiny_media: Any, tmp_path: Path) -> None:
    name, rules = RENAMES[case]
    item = tiny_media(name).prompt([0]).media[0]
    wanted = text_and_rows(tiny_media(name).path, item)
    found = text_and_rows(renamed(tiny_media(name).path, tmp_path / "renamed", rules), item)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def experts_apart(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """From [experts, outputs, inputs] each matrix by itself, gate and up too."""
    apart = {}
    for name, tensor in stacked.items():
        for e, matrix in enumerate(tensor):
            parts = matrix.chunk(2) if name.endswith("gate_up_proj") else (matrix,)
            for part, end in zip(parts, ("gate", "up") if len(parts) == 2 else ("down",), strict=True):
                apart[f"{name.rpartition('.')[0]}.{e}.{end}_proj.weight"] = part.contiguous()
    return apart


def test_experts_of_a_layer_are_read_in_every_form(tiny_media: Any, tmp_path: Path) -> None:
    """Stacked with outputs first, or inputs first as Qwen's own checkpoints have them, or each by itself, as quantised ones do."""
    source = tiny_media("qwen3-vl-moe").path
    tensors = load_file(source / "model.safetensors")
    stacked = {name: t for name, t in tensors.items() if ".experts." in name}
    gate_up = {name: t for name, t in stacked.items() if name.endswith("gate_up_proj")}
    assert len(gate_up) == 2
    assert len(stacked) == 4
    others = {name: t for name, t in tensors.items() if name not in stacked}
    if next(iter(gate_up.values())).shape[1:] != (96, 64):
        stacked = {name: t.transpose(1, 2).contiguous() for name, t in stacked.items()}
    forms = [stacked, {name: t.transpose(1, 2).contiguous() for name, t in stacked.items()}, experts_apart(stacked)]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    results = []
    for index, form in enumerate(forms):
        shutil.copytree(source, tmp_path / str(index))
        save_file(others | form, tmp_path / str(index) / "model.safetensors", metadata={"format": "pt"})
        model: Any = load(resolve(str(tmp_path / str(index))), kernels="torch")
        results.append(torch.stack([model.layers[i].mlp(x) for i in (0, 2)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    wrong = {name: t[:, :5].contiguous() for name, t in stacked.items()}
    save_file(others | wrong, tmp_path / "0" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"gate_up_proj \[6, 5, 64\].*its config says \[6, 96, 64\] and \[6, 64, 48\]"):
        load(resolve(str(tmp_path / "0")), kernels="torch")


def test_a_tower_with_a_tensor_too_few_or_too_many_is_refused(tiny_media: Any, tmp_path: Path) -> None:
    source, target = tiny_media("llava").path, tmp_path / "broken"
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    lost = tensors.pop("multi_modal_projector.linear_1.bias")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    beside = load(resolve(str(target)), kernels="torch").beside
    assert beside is not None
    with pytest.raises(ModelError, match=r"has no tensor model\.multi_modal_projector\.linear_1\.bias"):
        tower_encoder(beside)
    tensors |= {"multi_modal_projector.linear_1.bias": lost, "resampler.weight": lost.clone()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds resampler\.weight"):
        tower_encoder(beside)


def test_sizes_are_those_that_are_loaded(tiny_media: Any) -> None:
    for name in ("llava", "qwen3-vl", "qwen3-vl-moe", "gemma3", "qwen2-audio"):
        resolved = resolve(str(tiny_media(name).path))
        model = load(resolved, kernels="torch")
        assert model.beside is not None
        encoder = tower_encoder(model.beside)
        assert encoder is not None
        assert tower_bytes(resolved, "float32") == encoder.weights_bytes, name
        total = sum(t.numel() for t in load_file(resolved.path / "model.safetensors").values())
        assert model_size(resolved, "float32").weights_bytes + encoder.weights_bytes == 4 * total


def test_a_text_models_configuration_is_left_alone(tiny_media: Any) -> None:
    config = json.loads((tiny_media("llava").path / "config.json").read_text())["text_config"]
    assert decoder_config(config | {"architectures": ["LlamaForCausalLM"]}, "a-model") is not None
