"""Each hook of the manual is really called, by the actor that the manual names, through public means only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hook_recorder

from tokenbus import LLM, SamplingParams
from tokenbus.core import hooks
from tokenbus.core.errors import FeatureOffError
from tokenbus.core.host import HOOK_NAMES

PLUGINS = ("note_taker", "note_taker.policy", "note_taker.attention", "note_taker.products", "note_taker.side")
ONLY_ON_A_GPU = {"fused_filters"}
"""tests/worker/test_device_steps.py calls it."""
ONLY_OVER_HTTP = {"http_routes", "prepare_media", "reasoning_parser", "tool_parser"}
"""Covered by tests/api, with a server."""
ONLY_WITH_MEDIA = {"media_encoder"}
"""Covered by tests/multimodal, with models that read media."""


@pytest.fixture(scope="module")
def noted(tmp_path_factory):
    path = tmp_path_factory.mktemp("hooks") / "noted.txt"
    path.touch()
    settings = {name: {"path": str(path)} for name in PLUGINS}
    load = (
        "hook_recorder:Recorder",
        "hook_recorder:RecorderPolicy",
        "hook_recorder:RecorderAttention",
        "hook_recorder:RecorderProducts",
        "hook_recorder:RecorderSide",
    )
    with LLM("demo", dtype="float32", max_model_len=256, num_blocks=8, load=load, enable=PLUGINS, plugins=settings) as llm:
        plain = llm.generate("One two three four", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        before = path.read_text(encoding="utf-8").splitlines()
        for index, value in enumerate(("prompt", "yes", "yes")):
            params = SamplingParams(temperature=0.5, seed=1, max_tokens=40, extra={"note": value})
            llm.generate(f"Story {index} begins " * 12, params, use_tqdm=False)
        llm.switch(note_taker=False)
        again = llm.generate("One two three four", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0]
        with pytest.raises(FeatureOffError, match="'note_taker', is off"):
            llm.generate("x", SamplingParams(max_tokens=1, extra={"note": "yes"}), use_tqdm=False)
        assert plain.outputs[0].token_ids == again.outputs[0].token_ids
        assert "note_taker" in plain.features
        assert "note_taker" not in again.features
    return before, path.read_text(encoding="utf-8").splitlines()


def test_every_hook_was_called_by_its_actor(noted):
    seen = {tuple(line.split()) for line in noted[1]}
    elsewhere = ONLY_OVER_HTTP | ONLY_WITH_MEDIA | ONLY_ON_A_GPU
    expected = {(role, hook) for role, names in hook_recorder.ACTOR.items() for hook in names - elsewhere}
    assert expected - seen == set()
    assert {hook for _, hook in seen} <= set(HOOK_NAMES)
    assert {(role, hook) for role, hook in seen} <= expected | {("front", "http_routes")}


def test_a_request_that_claims_nothing_sees_only_the_hooks_for_all_requests(noted):
    called = {line.split()[1] for line in noted[0]}
    assert {"request_added", "match_prefix", "limit_chunk", "step_finished"} <= called
    assert not called & {
        "implied_fields",
        "check_fields",
        "prepare_fields",
        "text_filter",
        "adjust_logits",
        "filter_logits",
        "token_logprobs",
        "worker_request_added",
    }


@pytest.mark.parametrize("role", ["front", "engine", "worker"])
def test_the_manual_names_the_actor(role):
    for name in hook_recorder.ACTOR[role]:
        assert (getattr(hooks, name).__doc__ or "").startswith(role.capitalize()), name
