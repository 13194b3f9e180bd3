"""The hook `media_encoder`: what plugins may answer, and what becomes of a request whose picture can't be encoded."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from tokenbus.core.config import from_mapping
from tokenbus.core.errors import ModelError, PluginLoadError
from tokenbus.core.models.linears import Refusal
from tokenbus.core.models.media import Encoded, MediaEncoder
from tokenbus.core.plan import StepInput, WorkerRequest
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.recording.hashing import KeyedHash
from tokenbus.core.selftest.stand import Ask, Stand, StandError


class Ones(MediaEncoder):
    weights_bytes = 0

    def __init__(self, width: int) -> None:
        self.width = width

    def encode(self, item: Any) -> Encoded:
        if item.digest == "broken":
            raise ZeroDivisionError("a patch of no size")
        return Encoded(torch.ones(item.rows, self.width))


class Answers(Plugin):
    """Answers what the test puts here."""

    info = PluginInfo(name="answers", summary="", scope="step", lossless=False, resident=True)
    answer: ClassVar[Any] = None

    @hookimpl
    def media_encoder(self, checkpoint: Any) -> Any:
        assert checkpoint.config["model_type"] == "llava"
        assert "multi_modal_projector.linear_1.weight" in checkpoint.tensors()
        return Ones(checkpoint.hidden_size) if Answers.answer is Ones else Answers.answer


class Visitor(Answers):
    info = PluginInfo(name="visitor", summary="", scope="step", lossless=False)


def stand(tiny: Any, plugin: type[Plugin] = Answers, answer: Any = None) -> Stand:
    Answers.answer = answer
    off = {"disable": ["multimodal"]}
    config = from_mapping({"model": {"model": str(tiny.path)}, "cache": {"block_size": 4}, "features": off}, "test")
    return Stand(config, enable=(plugin.info.name,), disable=("multimodal",), plugins=(plugin,))


def test_an_encoder_of_another_plugin_is_used(tiny_media: Any) -> None:
    tiny = tiny_media("llava")
    prompt = tiny.prompt([0], seed=1)
    with stand(tiny, answer=Ones) as running:
        outcome = running.run([Ask(prompt.tokens, media=prompt.media)])
        assert outcome.counters["multimodal.encoded_items"] == 1
        assert running.info.weights_bytes > 0


def test_none_leaves_a_text_model_and_a_refusal_stops_the_start(tiny_media: Any) -> None:
    tiny = tiny_media("llava")
    with stand(tiny) as running:
        assert running.run([Ask(tiny.prompt([], seed=1).tokens)]).answers[0].tokens
    with pytest.raises(ModelError, match="can't be run with answers: not today"):
        stand(tiny, answer=Refusal("not today"))


def test_answers_are_checked(tiny_media: Any) -> None:
    with pytest.raises(PluginLoadError, match="neither a MediaEncoder nor a Refusal"):
        stand(tiny_media("llava"), answer=7)


def test_only_residents_are_asked(tiny_media: Any) -> None:
    tiny = tiny_media("llava")
    prompt = tiny.prompt([0], seed=1)
    with stand(tiny, Visitor, Ones) as running, pytest.raises(StandError, match="reads text only"):
        running.run([Ask(prompt.tokens, media=prompt.media)])


def order(name: str, prompt: Any, media: Any, blocks: list[int]) -> WorkerRequest:
    return WorkerRequest(
        request_id=name,
        tokens=prompt,
        num_prompt_tokens=len(prompt),
        num_computed=0,
        blocks=blocks,
        temperature=0.0,
        seed=0,
        choice=0,
        features=(),
        fields={},
        media=media,
    )


def test_a_picture_that_can_not_be_encoded_ends_its_request_alone(tiny_media: Any) -> None:
    tiny = tiny_media("llava")
    prompt, text = tiny.prompt([0], seed=1), tiny.prompt([], seed=2)
    broken = tiny.items_like(prompt.media, seed=3)
    broken[0] = type(broken[0])(**{f: getattr(broken[0], f) for f in broken[0].__struct_fields__} | {"digest": "broken"})
    with stand(tiny, answer=Ones) as running:
        runner = running.runner
        runner.allocate(40)
        n = len(prompt.tokens)
        new = [
            order("a", prompt.tokens, tuple(broken), list(range(10))),
            order("b", text.tokens, (), list(range(10, 20))),
            order("c", prompt.tokens, prompt.media, list(range(20, 30))),
        ]
        result = runner.run(StepInput(step_id=1, num_tokens={"a": n, "b": len(text.tokens), "c": n}, new=new))
    assert result.errors.keys() == {"a"}
    assert "the image at token 6 could not be encoded: ZeroDivisionError" in result.errors["a"].message
    assert result.sampled.keys() == {"b", "c"}
    assert result.phases["encode"] > 0
    assert result.counters == {"multimodal.encoded_items": 2}


def test_hashes_of_recordings_tell_pictures_apart(tiny_media: Any) -> None:
    prompt, keyed = tiny_media("llava").prompt([0], seed=1), KeyedHash(b"key")
    hashes = keyed.blocks(prompt.tokens, 4, media=prompt.media)
    other = keyed.blocks(prompt.tokens, 4, media=tiny_media("llava").items_like(prompt.media, seed=9))
    assert hashes != keyed.blocks(prompt.tokens, 4)
    assert hashes != other
    size = len(hashes) // (len(prompt.tokens) // 4)
    assert hashes[:size] == other[:size], "the block before it is the same"
    assert keyed.blocks(prompt.tokens, 4, hashes[: 3 * size], prompt.media) == hashes
