"""Memory planned from heads and configuration equals what a loaded model takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenbus.core.models.families import decoder_config
from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve
from tokenbus.core.models.sizing import count_parameters, header_parameters, model_size, resolve_dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_sizes_equal_the_loaded_model(family: str, dtype: str, tiny: Any) -> None:
    resolved = resolve(str(tiny(family).path))
    size = model_size(resolved, dtype)
    model = load(resolved, dtype)
    assert size.weights_bytes == model.spec.weights_bytes
    assert size.kv_bytes_per_token == model.kv_layout(16).bytes_per_token
    assert size.max_model_len == model.spec.max_model_len
    assert size.dtype == dtype


def test_parameters_counted_from_the_configuration_are_those_of_the_file(decoder_family: str, tiny: Any) -> None:
    resolved = resolve(str(tiny(decoder_family).path))
    config = decoder_config(resolved.config, resolved.name)
    assert config is not None
    assert count_parameters(config).total == header_parameters(resolved.path)


def test_linear_parameters_are_what_a_token_meets(tiny: Any) -> None:
    spec = load(resolve(str(tiny("mixtral").path))).spec
    hidden, inner, kv = 64, 96, 2 * 2 * 16
    layer = hidden * (hidden + kv) + hidden * hidden + 2 * 3 * hidden * inner + 5 * hidden
    assert spec.linear_params == 3 * layer
    assert spec.head_params == 256 * hidden
    neox = load(resolve(str(tiny("gpt-neox").path))).spec
    assert neox.linear_params == 3 * (4 * hidden * hidden + 2 * hidden * inner)
    assert neox.head_params == 256 * hidden


@pytest.mark.parametrize(("own", "wanted"), [("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_auto_is_the_checkpoints_own_dtype(own: str, wanted: str, tiny: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny("qwen3").path
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source / file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"dtype": own}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    save_file({k: v.to(getattr(torch, own)) for k, v in tensors.items()}, tmp_path / "model.safetensors")
    resolved = resolve(str(tmp_path))
    assert resolve_dtype(resolved, "auto") == wanted
    assert load(resolved).kv_layout(16).dtype == getattr(torch, wanted)
    assert load(resolved, "bfloat16").kv_layout(16).dtype == torch.bfloat16


def test_a_sharded_checkpoint_is_the_same_model(tiny: Any, paged: Any, tokens: Any, tmp_path: Path) -> None:
    whole = tiny("qwen2")
    whole.reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    prompt = tokens(20)
    one, many = (paged(load(resolve(str(p)))).prefill("a", prompt, 20) for p in (whole.path, tmp_path))
    assert torch.equal(one, many)
    assert model_size(resolve(str(tmp_path)), "auto") == model_size(resolve(str(whole.path)), "auto")
