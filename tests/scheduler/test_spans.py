"""Pictures and sounds among a prompt's tokens: spans that go whole, the encoder's budget, cache hits that end in a span."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.media import MediaItem


def item(start: int, length: int, *, bidirectional: bool = True, digest: str = "a") -> MediaItem:
    return MediaItem(kind="image", digest=digest, start=start, length=length, bidirectional=bidirectional)


def fixed(chunk: int) -> dict[str, dict[str, object]]:
    return {"chunked_prefill": {"mode": "fixed", "chunk_size": chunk}}


def chunks(h: Any, request_id: str, prompt: int) -> list[tuple[int, int]]:
    """[first, end) of each step that ran the request's prompt."""
    found, done = [], 0
    for plan in h.plans:
        if (count := plan.num_tokens.get(request_id)) and done < prompt:
            found.append((done, done + count))
            done += count
    return found


def test_a_span_goes_whole_and_chunks_end_at_its_start(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(6))
    h.add("a", 40, media=(item(4, 10), item(20, 3)))
    h.run()
    assert chunks(h, "a", 40) == [(0, 4), (4, 14), (14, 20), (20, 26), (26, 32), (32, 38), (38, 40)]
    assert [plan.num_media_tokens for plan in h.plans[:4]] == [0, 10, 0, 3]


def test_a_causal_span_may_be_cut(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(6))
    h.add("a", 20, media=(item(4, 10, bidirectional=False),))
    h.run()
    assert chunks(h, "a", 20) == [(0, 6), (6, 12), (12, 18), (18, 20)]
    assert [plan.num_media_tokens for plan in h.plans[:4]] == [10, 0, 0, 0], "it is encoded where it begins"


def test_a_span_waits_for_a_step_with_room_and_passes_the_budget_if_nothing_else_runs(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(64), token_budget=16, num_blocks=200)
    h.add("a", 12, max_tokens=2)
    h.add("b", 30, max_tokens=2, media=(item(0, 14),))
    h.step()
    assert h.plans[0].num_tokens == {"a": 12}, "4 tokens of room are not enough for the span of 14"
    h.step()
    assert h.plans[1].num_tokens["b"] == 15, "the span, and what else fits"
    h.run()
    h.add("c", 20, max_tokens=3)
    h.step()
    h.step()
    h.add("d", 20, max_tokens=2, media=(item(0, 16),))
    h.step()
    assert h.plans[-1].num_tokens == {"c": 1, "d": 16}, "no prompt before it: it may pass what the decodes have left"
    h.run()


def test_a_span_larger_than_a_step_is_refused(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(8), token_budget=16)
    h.add("a", 30, media=(item(2, 17),))
    h.add("b", 30, media=(item(2, 17, bidirectional=False),))
    h.run()
    error = h.finished["a"].error
    assert error is not None
    assert error.kind == "ContextLengthError"
    assert "17 tokens" in error.message
    assert "scheduler.token_budget" in error.message
    assert h.finished["b"].reason == "length"


def test_a_span_runs_although_the_limit_was_lowered_meanwhile(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(8), token_budget=32)
    h.add("a", 30, media=(item(2, 17),))
    h.step()
    h.scheduler.configure(from_mapping({"scheduler": {"token_budget": 8}}, "test").scheduler)
    h.run()
    assert (2, 19) in chunks(h, "a", 30)


def test_the_encoders_budget_ends_a_chunk_before_the_next_item(harness: Any) -> None:
    h = harness(on=("chunked_prefill",), settings=fixed(64), token_budget=64, num_blocks=200)
    h.scheduler.configure(from_mapping({"scheduler": {"token_budget": 64, "encoder_budget": 12}}, "test").scheduler)
    spans = (item(2, 8, bidirectional=False), item(12, 4, bidirectional=False), item(20, 8, bidirectional=False))
    h.add("a", 40, max_tokens=2, media=spans)
    h.add("b", 40, max_tokens=2, media=(item(0, 30, bidirectional=False),))
    h.run()
    assert chunks(h, "a", 40) == [(0, 20), (20, 40)]
    assert chunks(h, "b", 40) == [(0, 40)], "an item larger than the budget runs, alone"
    assert [plan.num_media_tokens for plan in h.plans if plan.num_media_tokens] == [12, 8, 30]


def test_without_chunks_a_prompt_runs_whole(harness: Any) -> None:
    h = harness(token_budget=16)
    h.add("a", 40, media=(item(4, 10), item(20, 12)))
    h.run()
    assert chunks(h, "a", 40) == [(0, 40)]


def test_a_hit_that_ends_in_a_span_is_cut_back_to_before_it(harness: Any) -> None:
    h = harness(on=("prefix_cache",), block_size=4)
    prompt = [5] * 40
    h.add("a", prompt, media=(item(6, 20),))
    h.run()
    h.add("b", prompt[:28] + [9] * 12, media=(item(6, 20),))
    h.run()
    assert h.finished["b"].cached_tokens == 28, "the span is all there"
    h.add("c", prompt[:14] + [9] * 26, media=(item(6, 20),))
    h.run()
    assert h.finished["c"].cached_tokens == 4, "12 tokens match, from 6 on of a span that must be run whole"
    h.add("d", prompt[:14] + [9] * 26, media=(item(6, 20, bidirectional=False),))
    h.run()
    assert h.finished["d"].cached_tokens == 4, "it is another span"


def test_a_hit_that_ends_in_a_causal_span_has_it_encoded(harness: Any) -> None:
    h = harness(on=("prefix_cache", "chunked_prefill"), settings=fixed(6), block_size=4)
    prompt = [5] * 40
    h.add("a", prompt, media=(item(6, 20, bidirectional=False),))
    h.run()
    before = len(h.plans)
    h.add("b", prompt[:14] + [9] * 26, media=(item(6, 20, bidirectional=False),))
    h.run()
    assert h.finished["b"].cached_tokens == 12
    assert [plan.num_media_tokens for plan in h.plans[before : before + 3]] == [20, 0, 0]


def test_another_item_under_the_same_tokens_is_no_hit(harness: Any) -> None:
    h = harness(on=("prefix_cache",), block_size=4)
    prompt = [5] * 40
    first = item(6, 20, bidirectional=False)
    h.add("a", prompt, media=(first,))
    h.run()
    for name, media, cached in (
        ("b", (first,), 36),
        ("c", (item(6, 20, bidirectional=False, digest="b"),), 4),
        ("d", (item(7, 20, bidirectional=False),), 4),
        ("e", (item(6, 19, bidirectional=False),), 4),
        ("f", (), 4),
    ):
        h.add(name, prompt, media=media)
        h.run()
        assert h.finished[name].cached_tokens == cached, name


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_cuts_a_span(harness: Any, seed: int) -> None:
    rng = random.Random(seed)
    h = harness(
        on=("chunked_prefill", "prefix_cache"),
        settings=fixed(rng.choice([1, 3, 8, 20])),
        num_blocks=rng.choice([24, 60]),
        token_budget=24,
        max_running=4,
    )
    media: dict[str, tuple[MediaItem, ...]] = {}
    for serial in range(12):
        name, at, spans = f"r{serial}", 0, []
        for _ in range(rng.randrange(3)):
            start = at + rng.randrange(6)
            spans.append(item(start, rng.randrange(1, 24), bidirectional=rng.random() < 0.7, digest=rng.choice("ab")))
            at = spans[-1].end
        media[name] = tuple(spans)
        h.add(name, [5] * (at + rng.randrange(1, 8)), max_tokens=rng.randrange(1, 12), media=media[name])
        for _ in range(rng.randrange(4)):
            h.step()
    h.run()
    done: dict[str, int] = {}
    for order in h.inputs:
        for new in order.new:
            assert new.media == media[new.request_id]
            done[new.request_id] = new.num_computed
        for name, count in order.num_tokens.items():
            first, end = done[name], done[name] + count
            for span in media[name]:
                assert not (span.bidirectional and (span.start < first < span.end or span.start < end < span.end))
            done[name] = end
    assert all(finish.reason == "length" for finish in h.finished.values())
