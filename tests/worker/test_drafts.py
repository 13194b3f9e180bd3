"""Drafts in the model runner: what is sampled is what would be without them, whatever they are."""

from __future__ import annotations

import random

import pytest
import worker_fakes
from test_runner import PROMPT, RICH, alone
from worker_fakes import ALL, BLOCK, VOCAB, Driver, Spec, loaded, reference_greedy

from tokenbus.core.plan import StepInput
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl


def guessing(truth: list[int], rate: float, seed: int = 0):
    """Drafts from the whole sequence that will come, each right with this rate."""
    draw = random.Random(seed)

    def draft(tokens: list[int]) -> list[int]:
        rest = truth[len(tokens) : len(tokens) + draw.randint(0, 7)]
        return [token if draw.random() < rate else (token + 1) % VOCAB for token in rest]

    return draft


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["greedy", "rich"])
def test_drafts_change_nothing(rate, kind):
    options = {} if kind == "greedy" else RICH
    plain = alone(new=40, **options)
    spec = Spec("a", PROMPT, 40, draft=guessing(plain.tokens, rate), **options)
    driver = Driver([spec])
    runner = loaded()
    driver.run(runner)
    assert spec.output[:40] == plain.output
    assert spec.logprobs[:40] == plain.logprobs
    assert (len(driver.results) < 40) == (rate > 0)
    assert not any(result.errors for result in driver.results)


def test_many_requests_with_and_without_drafts():
    plain = [alone(prompt=[*PROMPT, i], new=20, **(RICH if i % 3 else {})) for i in range(20)]
    specs = [
        Spec(f"r{i}", one.prompt, 20, preempt_at=7 if i % 5 == 0 else None, chunk=4,
             draft=guessing(one.tokens, 0.7, i) if i % 2 else lambda tokens: [], **(RICH if i % 3 else {}))
        for i, one in enumerate(plain)
    ]  # fmt: skip
    driver = Driver(specs)
    driver.run(loaded())
    for spec, one in zip(specs, plain, strict=True):
        assert (spec.output[:20], spec.logprobs[:20]) == (one.output, one.logprobs)
    assert max(map(len, (tokens for result in driver.results for tokens in result.sampled.values()))) > 3


def test_more_rows_than_are_sampled_together():
    truth = reference_greedy(PROMPT, 400)
    spec = Spec("a", PROMPT, 400, draft=lambda tokens: ([*PROMPT, *truth])[len(tokens) : len(tokens) + 150])
    driver = Driver([spec])
    driver.run(loaded())
    assert spec.output[:400] == truth
    assert len(driver.results) == 4


class Only(Plugin):
    """Masks all but one id, which follows from the tokens before; behind anything else it masks everything."""

    info = PluginInfo(name="test.only", summary="", scope="step", lossless=False)

    @hookimpl
    def adjust_logits(self, logits, rows) -> None:
        for values, row in zip(logits, rows, strict=True):
            new = row.tokens[row.request.num_prompt_tokens :]
            values[[i for i in range(VOCAB) if i != len(new) or new != list(range(len(new)))]] = -float("inf")


@pytest.mark.parametrize("wrong_from", [0, 1, 3])
def test_a_row_behind_a_wrong_draft_harms_nobody(wrong_from, monkeypatch):
    monkeypatch.setattr(worker_fakes, "PLUGINS", (*worker_fakes.PLUGINS, Only))

    def draft(tokens):
        new = tokens[len(PROMPT) :]
        return [len(new) + i if i < wrong_from else 50 for i in range(4)]

    runner = loaded((*ALL, "test.only"))
    spec = Spec("a", PROMPT, 12, draft=draft, features=(*ALL, "test.only"))
    Driver([spec]).run(runner)
    assert spec.error is None
    assert spec.output[:12] == list(range(12))


def test_what_cannot_be_run_is_the_requests_error():
    runner = loaded()
    spec, mate = Spec("a", PROMPT, 9, draft=lambda tokens: [VOCAB]), Spec("b", PROMPT, 9)
    driver = Driver([spec, mate])
    driver.run(runner)
    assert f"a draft {VOCAB} beyond the vocabulary" in spec.error.message
    assert mate.output == reference_greedy(PROMPT, 9)


def test_drafts_behind_part_of_a_prompt_are_refused():
    runner, driver = loaded(), Driver([spec := Spec("a", PROMPT, 9, chunk=4)])
    order = driver.plan()
    order = StepInput(step_id=0, num_tokens={"a": 5}, new=order.new, drafts={"a": [3]})
    assert "can't run 5 tokens" in runner.run(order).errors["a"].message
    assert spec.blocks
    assert len(spec.blocks) * BLOCK >= 4
