"""The demo model, SmolLM2-135M-Instruct, against transformers on the same dequantised GGUF file."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import pytest
import torch

from tokenbus.core.models.loader import load
from tokenbus.core.models.resolve import resolve

pytestmark = pytest.mark.timeout(600)
NEW = 64
LENGTHS = [5, 7, 9, 11, 14, 18, 23, 27, 33, 40, 48, 57, 65, 90, 128, 161, 200, 256, 400, 2000]
"""Tokens of the 20 prompts."""
SHORT = 18
"""Those that are always tried; the rest is for `-m long`."""
TOPICS = [
    "the history of the printing press", "why the sky is blue", "how to bake bread", "a short story about a lighthouse",
    "the rules of chess", "photosynthesis in plants", "the city of Lisbon", "sorting a list in Python", "the moons of Jupiter",
    "writing a polite letter", "the water cycle", "learning to swim", "prime numbers", "the Roman aqueducts", "growing tomatoes",
    "the human heart", "railways in India", "a recipe for soup", "the French revolution", "how computers store numbers",
]  # fmt: skip


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' model with the tensors that its own GGUF reader dequantises, and those tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    resolved = resolve("demo")
    assert resolved.gguf is not None
    config = AutoConfig.from_pretrained(resolved.gguf.parent, gguf_file=resolved.gguf.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(resolved.gguf), return_tensors=True, model_to_load=model)["tensors"]
    model = type(model).from_pretrained(None, config=config, state_dict=dict(tensors), attn_implementation="eager")
    return model.eval(), tensors


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("demo").path)
    made = []
    for length, topic in zip(LENGTHS, TOPICS, strict=True):
        text = f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n<|im_start|>assistant\n"
        text += " ".join(f"Part {i} says more about {topic}, and then about {other}." for i, other in enumerate(TOPICS * 6))
        made.append(tokenizer(text)["input_ids"][:length])
    assert [len(p) for p in made] == LENGTHS
    return made


def test_cached_weights_are_transformers_weights(reference: Any) -> None:
    from safetensors.torch import load_file

    from tokenbus.core.models import gguf_file

    resolved = resolve("demo")
    assert resolved.gguf is not None
    _, tensors = reference
    for dtype in (torch.float32, torch.bfloat16):
        cached = load_file(gguf_file.weights(resolved.gguf, dtype))
        assert cached.keys() == tensors.keys()
        assert all(torch.equal(cached[name], value.to(dtype)) for name, value in tensors.items())


@pytest.fixture(scope="module")
def generated(prompts: list[list[int]], paged: Any) -> Any:
    """Gives, for a number of prompts: see `generate`."""
    return functools.cache(lambda count: generate(prompts[:count], paged))


def generate(prompts: list[list[int]], paged: Any) -> list[tuple[list[int], torch.Tensor]]:
    """Ours in float32, all prompts decoded together: 64 greedy ids, and the logits of their positions and the next, by prompt."""
    engine = paged(load(resolve("demo"), "float32"), num_blocks=360, block_size=16)
    with torch.inference_mode():
        rows = [[engine.model.logits(engine.prefill_hidden(i, p, 512)[-1:])] for i, p in enumerate(prompts)]
    found: list[list[int]] = [[] for _ in prompts]
    for _ in range(NEW):
        for ids, logits in zip(found, rows, strict=True):
            ids.append(int(logits[-1][-1].argmax()))
        for i, logits in engine.step({i: ids[-1:] for i, ids in enumerate(found)}).items():
            rows[i].append(logits)
    return [(ids, torch.cat(logits)) for ids, logits in zip(found, rows, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "index",
    [*range(SHORT), *(pytest.param(i, marks=pytest.mark.long) for i in range(SHORT, len(LENGTHS)))],
    ids=lambda i: str(LENGTHS[i]),
)
def test_greedy_ids_and_logits_equal_transformers(index: int, reference: Any, prompts: list[list[int]], generated: Any) -> None:
    """transformers runs prompt and our ids at once: if each next id is its own choice at every position, it would, by induction,
    have generated the same."""
    model, _ = reference
    ids, logits = generated(SHORT if index < SHORT else len(LENGTHS))[index]
    assert len(ids) == NEW
    with torch.inference_mode():
        sequence = torch.tensor([prompts[index] + ids])
        truth = model(input_ids=sequence, use_cache=False, logits_to_keep=NEW + 1).logits[0]
    assert truth[:-1].argmax(dim=-1).tolist() == ids
    assert float((logits - truth).abs().max()) <= 5e-4


def test_bfloat16_errs_no_more_than_transformers(reference: Any, prompts: list[list[int]], paged: Any) -> None:
    import copy

    model, _ = reference
    theirs = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(theirs).double()
    engine = paged(load(resolve("demo")), num_blocks=16, block_size=16)
    own_error = their_error = 0.0
    for i in (9, 12, 13):
        with torch.inference_mode():
            truth, other = (
                m(input_ids=torch.tensor([prompts[i]]), use_cache=False).logits[0].double() for m in (exact, theirs)
            )
        own_error += float((engine.prefill(str(i), prompts[i], 50).double() - truth).square().mean())
        their_error += float((other - truth).square().mean())
    assert own_error <= 1.2**2 * their_error


def test_the_demo_is_ready_for_a_chat(prompts: list[list[int]]) -> None:
    from transformers import AutoTokenizer

    resolved = resolve("demo")
    tokenizer = AutoTokenizer.from_pretrained(resolved.path)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert resolved.name == "SmolLM2-135M-Instruct"
    assert tokenizer.decode(resolved.config["eos_token_id"]) == "<|im_end|>"
    assert tokenizer.model_max_length == 8192


def test_resolving_the_cached_demo_needs_no_torch() -> None:
    resolve("demo")
    code = "import sys; from tokenbus.core.models.resolve import resolve; resolve('demo'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
