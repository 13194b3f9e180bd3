"""Requests with media through scheduler and worker: the same ids however they are run, and the encoder no more often than it must."""

from __future__ import annotations

from typing import Any

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.core.selftest.stand import Answer, Ask, Outcome, Stand, StandError

ENCODED = "multimodal.encoded_items"
PIECES = "multimodal.encoded_pieces"
FAMILIES = ["llava", "idefics3", "qwen2-vl", "qwen3-vl", "gemma3"]
OFF = ("prefix_cache",)
TOKENS = 6


class Media:
    """A tiny model behind an engine, and asks for it."""

    def __init__(self, tiny: Any, dtype: str = "float32", enable: tuple[str, ...] = ("multimodal",)) -> None:
        self.tiny = tiny
        config = from_mapping(
            {
                "model": {"model": str(tiny.path), "dtype": dtype},
                "cache": {"block_size": 4, "encoder_memory_mb": 1},
                "features": {"disable": [] if "multimodal" in enable else ["multimodal"]},
            },
            "test",
        )
        self.stand = Stand(config, enable=enable, disable=tuple(config.features.disable))

    def ask(self, sizes: list[int], picture: int, **more: Any) -> Ask:
        prompt = self.tiny.prompt(sizes, seed=picture)
        return Ask(prompt.tokens, **{"max_tokens": TOKENS, "fields": {"logprobs": 2}, **more}, media=prompt.media)

    def asks(self) -> list[Ask]:
        """Some pictures, some texts, at different times, with and without drawing."""
        return [
            self.ask([0], 1),
            self.ask([], 2, at_step=1),
            self.ask([0, 1, 2], 3, at_step=1, temperature=0.7, seed=5),
            self.ask([1], 4, at_step=2, fields={"logprobs": 1, "prompt_logprobs": 1}),
            self.ask([], 5, at_step=3, temperature=0.9, seed=6),
        ]

    def run(self, asks: list[Ask], **options: Any) -> Outcome:
        """With an empty encoder cache."""
        media = self.stand.runner.media
        assert media is not None
        media.encoders.clear()
        outcome = self.stand.run(asks, **options)
        media.encoders.check_integrity()
        return outcome


@pytest.fixture(scope="module")
def engines(tiny_media: Any) -> Any:
    made: dict[tuple[Any, ...], Media] = {}

    def get(name: str, *how: Any) -> Media:
        if (name, *how) not in made:
            made[name, *how] = Media(tiny_media(name), *how)
        return made[name, *how]

    yield get
    for one in made.values():
        one.stand.close()


@pytest.fixture(scope="module")
def alone(engines: Any) -> Any:
    """alone(name): each of `asks` by itself, whole prompts, no cache."""
    made: dict[str, list[Answer]] = {}

    def get(name: str) -> list[Answer]:
        if name not in made:
            media = engines(name)
            made[name] = [
                media.run([ask], off=("chunked_prefill", *OFF)).answers[0] for ask in (_now(ask) for ask in media.asks())
            ]
        return made[name]

    return get


def _now(ask: Ask) -> Ask:
    ask.at_step = 0
    return ask


def assert_same(found: list[Answer], wanted: list[Answer]) -> None:
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one.same(other), index


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_ids_are_transformers(name: str, engines: Any, alone: Any, tiny_media: Any) -> None:
    prompt = tiny_media(name).prompt([0], seed=1)
    truth = tiny_media(name).truth(prompt, alone(name)[0].tokens)
    assert truth[len(prompt.tokens) - 1 : -1].argmax(-1).tolist() == alone(name)[0].tokens


@pytest.mark.parametrize("chunk", [1, 3, 7, 11])
@pytest.mark.parametrize("name", FAMILIES)
def test_chunks_and_company_change_nothing(name: str, chunk: int, engines: Any, alone: Any) -> None:
    media = engines(name)
    outcome = media.run(media.asks(), chunk=chunk, off=OFF)
    assert outcome.largest_batch > 1
    assert_same(outcome.answers, alone(name))
    assert outcome.counters[ENCODED] == 5, "each once, however many chunks it has"


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_prefixes_change_nothing(name: str, engines: Any, alone: Any) -> None:
    media = engines(name)
    asks = media.asks() + [_later(ask) for ask in media.asks()]
    outcome = media.run(asks, chunk=7)
    assert_same(outcome.answers, alone(name) * 2)
    hits = [answer.cached for answer in outcome.answers[len(asks) // 2 :]]
    assert min(hits[0], hits[2]) > 0
    assert hits[3] == 0, "prompt logprobs need every position"
    assert outcome.counters[ENCODED] == 5


def _later(ask: Ask) -> Ask:
    ask.afterwards = True
    return ask


@pytest.mark.parametrize("name", FAMILIES)
def test_preemption_changes_nothing_and_encodes_nothing_twice(name: str, engines: Any) -> None:
    media = engines(name)
    asks = [media.ask([0], 1, max_tokens=40), media.ask([1], 2, max_tokens=40), media.ask([], 3, max_tokens=40)]
    wanted = [media.run([ask], off=OFF).answers[0] for ask in asks]
    longest = max(len(ask.prompt) for ask in asks) + 40
    outcome = media.run(asks, chunk=11, blocks=-(-longest // 4) + 4, off=OFF)
    assert any(answer.preemptions for answer in outcome.answers[:2])
    assert_same(outcome.answers, wanted)
    assert outcome.counters[ENCODED] == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_that_dies_changes_nothing(name: str, engines: Any, alone: Any) -> None:
    media = engines(name)
    asks = media.asks()
    asks[0].fatal_at = 2
    outcome = media.run(asks, chunk=7)
    assert outcome.deaths == 1
    assert_same(outcome.answers, alone(name))


@pytest.mark.parametrize("chunk", [3, 11])
@pytest.mark.parametrize("name", FAMILIES)
def test_steps_planned_ahead_change_nothing(name: str, chunk: int, engines: Any, alone: Any) -> None:
    media = engines(name)
    outcome = media.run(media.asks(), chunk=chunk, off=OFF, ahead=True)
    assert outcome.ahead > len(media.asks()), "steps were planned before the one before them had run"
    assert_same(outcome.answers, alone(name))
    assert outcome.counters[ENCODED] == 5


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_encoding_in_pieces_changes_nothing(name: str, ahead: bool, engines: Any, alone: Any) -> None:
    """One piece for each module of the tower."""
    media = engines(name)
    outcome = media.run(media.asks(), chunk=7, off=OFF, ahead=ahead, encoder_slice_ms=1e-6)
    assert outcome.counters[PIECES] > 5 * 10
    assert_same(outcome.answers, alone(name))
    assert outcome.counters[ENCODED] == 5, "each once, however many pieces it has"


def test_encoding_in_pieces_with_little_room_whole_prompts_and_deaths(engines: Any, alone: Any) -> None:
    media = engines("qwen2-vl")
    asks = media.asks()
    asks[2].fatal_at = 2
    outcome = media.run(asks, off=("chunked_prefill",), blocks=24, encoder_slice_ms=1e-6)
    assert outcome.deaths == 1
    assert outcome.counters[PIECES] > 5 * 10
    assert_same(outcome.answers, alone("qwen2-vl"))


def test_encoding_in_pieces_in_a_worker_process(engines: Any, alone: Any) -> None:
    media = engines("qwen2-vl")
    outcome = media.run(media.asks(), chunk=7, off=OFF, process=True, encoder_slice_ms=0.05)
    assert outcome.counters[PIECES] > outcome.counters[ENCODED]
    assert_same(outcome.answers, alone("qwen2-vl"))


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_steps_planned_ahead_with_little_room_and_cached_prefixes(name: str, engines: Any) -> None:
    media = engines(name)
    asks = [media.ask([0], 1, max_tokens=40), media.ask([1], 2, max_tokens=40), media.ask([], 3, max_tokens=40)]
    asks.append(_later(media.ask([0], 1, max_tokens=40)))
    wanted = [media.run([_at_once(ask)], off=OFF).answers[0] for ask in asks]
    longest = max(len(ask.prompt) for ask in asks) + 40
    asks[3].afterwards = True
    outcome = media.run(asks, chunk=11, blocks=-(-longest // 4) + 4, ahead=True)
    assert outcome.ahead
    assert any(answer.preemptions for answer in outcome.answers[:2])
    assert_same(outcome.answers, wanted)
    assert outcome.counters[ENCODED] == 2


def _at_once(ask: Ask) -> Ask:
    ask.afterwards = False
    return ask


def test_a_worker_process_is_given_the_media_too(engines: Any, alone: Any) -> None:
    media = engines("qwen2-vl")
    assert_same(media.run(media.asks(), chunk=7, process=True).answers, alone("qwen2-vl"))


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_the_same_picture_twice_is_encoded_once(name: str, engines: Any) -> None:
    media = engines(name)
    ask = media.ask([0], 1)
    outcome = media.run([ask, _later(media.ask([0], 1))], off=OFF)
    assert outcome.counters[ENCODED] == 1
    assert outcome.answers[0].same(outcome.answers[1])


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2-vl"])
def test_another_picture_under_the_same_text_is_no_hit(name: str, engines: Any) -> None:
    media = engines(name)
    one, other = media.ask([0], 1), media.ask([0], 1)
    other.media = tuple(media.tiny.items_like(other.media, seed=99))
    fresh = media.run([other], off=OFF).answers[0]
    outcome = media.run([one, _later(other)])
    assert outcome.answers[1].same(fresh)
    assert outcome.answers[0].tokens != fresh.tokens
    assert outcome.answers[1].cached <= one.media[0].start
    assert outcome.counters[ENCODED] == 2


def test_an_encoder_cache_without_room_changes_nothing(engines: Any, alone: Any) -> None:
    media = engines("llava")
    encoders = media.stand.runner.media.encoders
    before, encoders.max_bytes = encoders.max_bytes, 0
    try:
        outcome = media.run(media.asks(), chunk=7, off=OFF)
    finally:
        encoders.max_bytes = before
    assert_same(outcome.answers, alone("llava"))
    assert outcome.counters[ENCODED] == 5, "rows are held while their item runs"


OTHERS = ["llava-next", "smolvlm", "qwen2.5-vl", "qwen2-audio"]


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_families_too(name: str, engines: Any, alone: Any) -> None:
    media = engines(name)
    asks = media.asks() + [_later(ask) for ask in media.asks()]
    outcome = media.run(asks, chunk=7)
    assert_same(outcome.answers, alone(name) * 2)
    assert outcome.counters[ENCODED] == 5


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_bfloat16_too(name: str, engines: Any) -> None:
    media = engines(name, "bfloat16")
    alone = [media.run([_now(ask)], off=("chunked_prefill", *OFF)).answers[0] for ask in media.asks()]
    assert_same(media.run(media.asks(), chunk=7).answers, alone)


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_an_int8_cache_too(name: str, engines: Any) -> None:
    media = engines(name, "float32", ("multimodal", "quantization.kv_int8"))
    alone = [media.run([_now(ask)], off=("chunked_prefill", *OFF)).answers[0] for ask in media.asks()]
    assert_same(media.run(media.asks(), chunk=7).answers, alone)


@pytest.mark.parametrize("name", ["qwen2-vl", "gemma3"])
def test_drafts_change_nothing(name: str, engines: Any) -> None:
    media = engines(name)
    asks = [media.ask([0], 1, max_tokens=40), media.ask([1, 0], 2, max_tokens=40), media.ask([], 3, max_tokens=40)]
    wanted = [media.run([ask], off=OFF).answers[0] for ask in asks]
    drafts = media.run(asks, on=("speculative.test",), plugins=(Repeat,), chunk=11)
    assert_same(drafts.answers, wanted)
    assert all(answer.rejected for answer in drafts.answers)


class Repeat(Plugin):
    """Proposes the last tokens once more."""

    info = PluginInfo(name="speculative.test", summary="repeats", scope="request", lossless=True)

    @hookimpl
    def propose_drafts(self, request: Any, most: int) -> list[int]:
        return request.tokens[-min(3, most) :]


@pytest.mark.parametrize("name", FAMILIES + OTHERS)
def test_without_the_plugin_it_is_a_text_model(name: str, engines: Any, tiny_media: Any) -> None:
    media = engines(name, "float32", ())
    ask = media.ask([], 2)
    tokens = media.stand.run([ask], off=OFF).answers[0].tokens
    truth = tiny_media(name).truth(tiny_media(name).prompt([], seed=2), tokens)
    assert truth[len(ask.prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_a_text_model_says_that_it_is_one(engines: Any) -> None:
    media = engines("llava", "float32", ())
    assert media.stand.info.weights_bytes == media.stand.runner._model.spec.weights_bytes, "no tower was read"
    with pytest.raises(StandError, match="reads text only"):
        media.stand.run([media.ask([0], 1)])


def test_a_model_that_reads_media_has_a_tower(engines: Any) -> None:
    info = engines("llava").stand.info
    assert info.architecture == "LlavaForConditionalGeneration"
    assert info.weights_bytes > engines("llava").stand.runner._model.spec.weights_bytes
