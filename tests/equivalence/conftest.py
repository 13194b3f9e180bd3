from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from equivalence_stand import Stand

from tokenbus.kernels.cpu import lib


@pytest.fixture(scope="session", params=["torch", "cpu"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """The kernel sets, each by itself: bits are equal within one, not between two."""
    if request.param == "cpu" and lib.load() is None:
        pytest.skip(f"no CPU kernels: {lib.unavailable_reason()}")
    return request.param


@pytest.fixture(scope="session")
def tiny_stand(tiny_path: str, kernels: Any) -> Stand:
    return Stand(tiny_path, kernels)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama whose attention is peaked: small, but every effect on a logit shows."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.LlamaForCausalLM(config)
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        path = tmp_path_factory.mktemp("tiny-llama")
        model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def demo_stand(kernels: Any) -> Stand:
    return Stand("demo", kernels)
