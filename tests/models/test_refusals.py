"""What can't be run is refused at load with a ModelError that names the model and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenbus.core.errors import ModelError
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import model_size

SMALL: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "t5": ({"d_model": 32, "num_layers": 1}, "encoder-decoder"),
    "mamba": ({"hidden_size": 32}, "keep other state"),
    "rwkv": ({"hidden_size": 32}, "keeps recurrent state"),
    "lfm2": ({**SMALL, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}, "'conv' layers"),
    "qwen3_next": ({**SMALL}, "linear_attention"),
    "llama4_text": ({**SMALL}, "chunked_attention"),
    "bloom": ({**SMALL}, "attention interface"),
    "mpt": ({"d_model": 32}, "attention interface"),
    "falcon": ({**SMALL, "alibi": True}, "ALiBi"),
    "bert": ({**SMALL, "intermediate_size": 64}, "not causal"),
    "distilbert": ({}, "not a causal language model"),
    "gpt_neox": ({**SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
    "gemma3": ({}, "images or sound"),
    "no_such_type": ({}, "does not know it"),
}
LLAMA: dict[str, Any] = {
    **SMALL,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
DECODER_CASES: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn'"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE type 'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "malformed"),
    ({"hidden_act": "relu"}, "unknown activation 'relu'"),
    ({"hidden_size": None}, "no 'hidden_size'"),
    ({"num_key_value_heads": 3, "num_attention_heads": 4}, "can't share"),
]


def folder(tmp_path: Path, config: dict[str, Any], name: str = "a-model") -> str:
    path = tmp_path / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("model_type", CASES)
def test_models_outside_the_fallback_are_refused_by_reason(model_type: str, tmp_path: Path) -> None:
    config, reason = CASES[model_type]
    model = folder(tmp_path, {"model_type": model_type, **config}, "its-name")
    with pytest.raises(ModelError) as caught:
        saved(model) if model_type == "bert" else load(resolve(model))
    assert "its-name" in caught.value.message
    assert reason in caught.value.message


def saved(model: str) -> None:
    """Some things show only when the model runs: give it weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    load(resolve(model))


@pytest.mark.parametrize(("change", "reason"), DECODER_CASES)
def test_what_a_known_family_can_not_do_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    resolved = resolve(folder(tmp_path, {**LLAMA, **change}, "its-name"))
    for check in (load, lambda r: model_size(r, "auto")):
        with pytest.raises(ModelError) as caught:
            check(resolved)
        assert "its-name" in caught.value.message
        assert reason in caught.value.message


def test_quantised_weights_are_refused_where_nobody_reads_them(tmp_path: Path) -> None:
    resolved = resolve(folder(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "its-name"))
    with pytest.raises(ModelError, match=r"its-name can't be run here: its weights are quantised \(gptq\)"):
        load(resolved)


def test_attention_sinks_are_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.GptOssConfig(
        **SMALL,
        num_key_value_heads=1,
        intermediate_size=32,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention"] * 2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attention sinks"):
        load(resolve(str(tmp_path)))


def test_attention_that_differs_from_its_interface_is_found_by_running_it(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gpt_neox import modeling_gpt_neox

    plain = modeling_gpt_neox.eager_attention_forward

    def biased(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **rest: Any) -> Any:
        return plain(module, query, key, value, mask, scaling * 0.8, **rest)

    monkeypatch.setattr(modeling_gpt_neox, "eager_attention_forward", biased)
    with pytest.raises(ModelError, match="does something in attention that its interface does not tell us"):
        load(resolve(str(tiny("gpt-neox").path)))


def test_modules_nobody_knows_make_the_model_lossy_and_say_so(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenbus.core.models import replace

    monkeypatch.setattr(replace, "ACTIVATIONS", set())
    spec = load(resolve(str(tiny("gpt-neox").path))).spec
    assert not spec.lossless
    assert "GELUActivation" in spec.lossless_reason


def test_a_checkpoint_with_missing_or_unknown_tensors_is_refused(tmp_path: Path, remake: Any) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = remake("qwen3", tmp_path)
    file = checkpoint.path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.extra.weight": torch.ones(2)}, file)
    with pytest.raises(ModelError, match=r"holds model\.layers\.0\.self_attn\.extra\.weight"):
        load(resolve(str(checkpoint.path)))
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.self_attn\.q_norm\.weight"):
        load(resolve(str(checkpoint.path)))
    file.unlink()
    with pytest.raises(ModelError, match="only safetensors checkpoints are read"):
        load(resolve(str(checkpoint.path)))
    file.write_bytes(b"not a safetensors file at all")
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(resolve(str(checkpoint.path)))


def test_code_from_a_repository_is_never_run(tmp_path: Path) -> None:
    config = {"model_type": "their_own", "auto_map": {"AutoModelForCausalLM": "modeling_their_own.Model"}}
    with pytest.raises(ModelError, match="code from its own repository"):
        load(resolve(folder(tmp_path, config)))
