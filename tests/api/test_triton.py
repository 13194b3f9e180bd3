"""A real server whose model runs on Triton kernels (in the interpreter), and its attention backend switched live: the same answers."""

from __future__ import annotations

import pytest

from tokenbus.core.selftest.tiny import END, make_tiny

BODIES = {
    "greedy": {"prompt": [60, 61, 40, 9], "max_tokens": 3},
    "drawn": {"prompt": [33, 50], "max_tokens": 2, "temperature": 1.0, "seed": 5, "top_k": 30, "logprobs": 2},
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def server(serve_demo, tiny_model):
    flags = (
        "--model",
        tiny_model,
        "--kernels",
        "triton",
        "--max-model-len",
        "64",
        "--num-blocks",
        "32",
        "--batch-invariant",
        "on",
    )
    with serve_demo(*flags, "--device", "cpu", "--enable", "attention.triton") as made:
        yield made


def test_the_same_answers_whatever_computes_attention(server, tiny_model):
    def answers():
        found = {}
        for name, body in BODIES.items():
            choice = server.complete(**body)
            found[name] = choice["text"], (choice["logprobs"] or {}).get("tokens")
        return found

    def switch(**changes):
        status, state = server.call(
            "/v1/tokenbus/features", {"features": {f"attention.{name}": on for name, on in changes.items()}}
        )
        assert status == 200, state
        assert state["kernels"] == {"lossless": True}
        return state["slots"]["attention"]

    first = answers()
    assert switch(torch=True) == "attention.torch"
    assert answers() == first
    assert switch(torch=False) == "core (torch)"
    assert switch(triton=True) == "attention.triton"
    assert answers() == first
    assert first["greedy"][0] == greedy_text(tiny_model, BODIES["greedy"]["prompt"], 3)
    assert any('"kernels": "triton"' in line for line in server.output)


def greedy_text(path, prompt, count):
    """transformers' own."""
    import tokenizers
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    ids = list(prompt)
    with torch.no_grad():
        while len(ids) < len(prompt) + count and (len(ids) == len(prompt) or ids[-1] != END):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json").decode(ids[len(prompt) :])
