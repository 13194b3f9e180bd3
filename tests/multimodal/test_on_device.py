"""Media in a runner that works as on a GPU, on the CPU: staged inputs, tokens that stay on the device, steps launched ahead."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.plan import StepInput, WorkerRequest
from tokenbus.core.selftest.stand import Ask, Stand
from tokenbus.core.worker import runner
from tokenbus.core.worker.device import CpuDevice

NEW = 5


@pytest.fixture(params=["llava", "qwen2-vl", "qwen3-vl", "gemma3"])
def tiny(request: pytest.FixtureRequest, tiny_media: Any) -> Any:
    return tiny_media(request.param)


def make_stand(tiny: Any) -> Stand:
    sizes = {"block_size": 4, "encoder_memory_mb": 1}
    return Stand(from_mapping({"model": {"model": str(tiny.path), "dtype": "float32"}, "cache": sizes}, "test"))


def asks(tiny: Any) -> list[Ask]:
    """Greedy and drawn on the device; with logprobs, and so on the host; without media."""
    several: list[tuple[list[int], dict[str, Any]]] = [
        ([0], {}),
        ([0, 1, 2], {"temperature": 0.8, "seed": 3}),
        ([], {}),
        ([1], {"fields": {"logprobs": 2}}),
    ]
    prompts = [(tiny.prompt(sizes, seed=seed), more) for seed, (sizes, more) in enumerate(several)]
    return [Ask(p.tokens, max_tokens=NEW, media=p.media, **more) for p, more in prompts]


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "make_device", lambda _: CpuDevice(asynchronous=True))


def test_answers_are_the_hosts(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_stand(tiny) as stand:
        wanted = stand.run(asks(tiny), chunk=7).answers
    on_a_device(monkeypatch)
    with make_stand(tiny) as stand:
        found = stand.run(asks(tiny), chunk=7)
        assert stand.runner.ahead
    assert [answer.tokens for answer in found.answers] == [answer.tokens for answer in wanted]
    assert found.counters["multimodal.encoded_items"] == 5


def test_a_step_is_launched_before_the_picture_was_collected(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny.prompt([0], seed=1)
    on_a_device(monkeypatch)
    with make_stand(tiny) as stand:
        wanted = stand.run([Ask(prompt.tokens, max_tokens=3, media=prompt.media)]).answers[0].tokens
        stand.runner.allocate(64)
        new = WorkerRequest(
            request_id="a",
            tokens=prompt.tokens,
            num_prompt_tokens=len(prompt.tokens),
            num_computed=0,
            blocks=list(range(32)),
            temperature=0.0,
            seed=0,
            choice=0,
            features=(),
            fields={},
            media=prompt.media,
        )
        orders = [
            StepInput(step_id=900, num_tokens={"a": len(prompt.tokens)}, new=[new]),
            *(StepInput(step_id=901 + i, num_tokens={"a": 1}) for i in range(2)),
        ]
        pending = [stand.runner.launch(order) for order in orders]
        assert all(step.later is not None for step in pending)
        assert [stand.runner.collect(step).sampled["a"][0] for step in pending] == wanted
