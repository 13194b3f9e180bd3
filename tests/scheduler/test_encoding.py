"""Pictures and sounds that are encoded piece by piece: who waits, who goes on, and what the worker is told."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenbus.core.config import from_mapping
from tokenbus.core.errors import WorkerError
from tokenbus.core.media import MediaItem
from tokenbus.core.plugin import Stash
from tokenbus.core.request import Request
from tokenbus.core.scheduling.encoding import SLICES_ALONE, Encoding

CHUNKS = {"on": ("chunked_prefill",), "settings": {"chunked_prefill": {"mode": "fixed", "chunk_size": 8}}}
SLICE = from_mapping({}, "test").scheduler.encoder_slice_ms / 1000


def item(start: int, length: int = 4, digest: str = "a", *, bidirectional: bool = False) -> MediaItem:
    return MediaItem(kind="image", digest=digest, start=start, length=length, bidirectional=bidirectional)


def steps(h: Any) -> list[tuple[dict[str, int], str | None]]:
    return [(plan.num_tokens, plan.encodes_for) for plan in h.plans]


def told(h: Any) -> list[tuple[str, bool]]:
    """Digests that the worker was to encode, and whether it was given the item."""
    return [(order.encode.digest, order.encode.item is not None) for order in h.inputs if order.encode]


def test_others_go_on_while_an_item_is_encoded(harness: Any) -> None:
    h = harness(pieces=3, **CHUNKS)
    h.add("t", 4, max_tokens=8)
    h.step()
    h.add("m", 10, max_tokens=2, media=(item(2),))
    h.add("u", 3, max_tokens=3)
    h.run()
    assert steps(h)[1:6] == [
        ({"t": 1, "m": 2, "u": 3}, "m"),  # up to the item; who came later joins
        ({"t": 1, "u": 1}, "m"),
        ({"t": 1, "u": 1}, "m"),
        ({"t": 1, "m": 8}, None),
        ({"t": 1, "m": 1}, None),
    ]
    assert told(h) == [("a", True), ("a", False), ("a", False)]
    assert h.worker.encoded == {"a"}
    assert {order.encode.seconds for order in h.inputs if order.encode} == {SLICE}


def test_a_request_that_begins_with_an_item_joins_without_a_token(harness: Any) -> None:
    h = harness(pieces=2, **CHUNKS)
    h.add("m", 8, max_tokens=1, media=(item(0),))
    assert h.step().num_tokens == {}
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (1, 0)
    assert h.inputs[0].new == [], "it is told of the request with its first token"
    h.add("t", 4, max_tokens=1)
    h.run()
    assert steps(h) == [({}, "m"), ({"t": 4}, "m"), ({"m": 8}, None)]
    assert [order.encode.seconds for order in h.inputs[:2]] == [SLICE * SLICES_ALONE, SLICE]


def test_who_waits_for_the_encoder_takes_no_ones_share_of_a_step(harness: Any) -> None:
    h = harness(pieces=3, **CHUNKS)
    h.add("m", 24, max_tokens=1, media=(item(0),))
    h.add("u", 20, max_tokens=1)
    h.run()
    assert [plan.num_tokens.get("u") for plan in h.plans[:3]] == [8, 8, 4]


def test_prompts_that_go_whole_wait_for_all_their_items(harness: Any) -> None:
    h = harness(pieces=2)
    h.add("t", 4, max_tokens=9)
    h.add("m", 12, max_tokens=1, media=(item(0, digest="a"), item(6, digest="b")))
    h.run()
    assert [plan.num_tokens.get("m", 0) for plan in h.plans[:5]] == [0, 0, 0, 0, 12]
    assert told(h) == [("a", True), ("a", False), ("b", True), ("b", False)]


def test_the_same_item_is_encoded_once_for_all_who_wait(harness: Any) -> None:
    h = harness(pieces=2, on=("chunked_prefill",), settings={"chunked_prefill": {"mode": "fixed", "chunk_size": 32}})
    h.add("t", 4, max_tokens=9)
    h.add("m", 8, max_tokens=1, media=(item(0),))
    h.add("n", 8, max_tokens=1, media=(item(0),))
    h.run()
    assert told(h) == [("a", True), ("a", False)]
    assert [{"m", "n"} <= plan.num_tokens.keys() for plan in h.plans[:3]] == [False, False, True]
    h.add("o", 8, max_tokens=1, media=(item(0),))
    h.run()
    assert told(h) == [("a", True), ("a", False)], "it is known"


def test_what_is_under_way_goes_first_whoever_else_wants_something() -> None:
    """Else two items could take the encoder from each other for ever."""
    encoding = Encoding(in_pieces=True)
    early, late = (cast("Request", SimpleNamespace(request_id=name, stash=Stash())) for name in ("n", "m"))
    found = []
    for step in range(5):
        encoding.begin_step(20.0)
        if step:
            assert encoding.holds_back(late, item(0, digest="late"))
        if step != 2:  # the step's tokens were used up before its turn came
            assert encoding.holds_back(early, item(0, digest="early")) == (step < 4)
        ordered = encoding.order(alone=False)
        assert ordered is not None
        found.append((ordered[0], ordered[1].digest, ordered[1].item is not None))
        if step == 3:
            encoding.update(["early"], [])
    assert found[:2] == [("n", "early", True), ("n", "early", False)]
    assert found[2] == ("m", "late", True), "nobody who runs now waits for the other"
    assert found[3:] == [("m", "late", False), ("m", "late", False)]


def test_a_span_in_both_directions_waits_and_then_goes_whole(harness: Any) -> None:
    h = harness(pieces=2, **CHUNKS)
    h.add("t", 4, max_tokens=9)
    h.add("m", 30, max_tokens=1, media=(item(2, 12, bidirectional=True),))
    h.run()
    assert [plan.num_tokens.get("m", 0) for plan in h.plans[:4]] == [2, 0, 12, 8]


def test_a_cancel_ends_the_encoding(harness: Any) -> None:
    h = harness(pieces=5, **CHUNKS)
    h.add("m", 8, media=(item(0, digest="a"),))
    h.step()
    h.scheduler.cancel("m", "cancelled", h.now)
    assert h.step() is None
    h.add("n", 8, media=(item(0, digest="b"),))
    h.run()
    assert told(h) == [("a", True), *[("b", index == 0) for index in range(5)]]
    assert (h.finished["m"].reason, h.finished["n"].reason) == ("cancelled", "length")


def test_a_request_that_waits_for_the_encoder_may_lose_its_blocks(harness: Any) -> None:
    h = harness(pieces=6, num_blocks=6, block_size=4, **CHUNKS)
    h.add("t", 4, max_tokens=16)
    h.add("m", 12, max_tokens=2, media=(item(6),))
    h.run()
    assert any("m" in plan.preempted for plan in h.plans)
    assert told(h)[0] == ("a", True)
    assert sum(given for _, given in told(h)) == 1
    assert {name: finish.reason for name, finish in h.finished.items()} == {"t": "length", "m": "length"}


def test_after_a_failed_step_the_item_goes_with_its_tokens(harness: Any) -> None:
    """Should encoding be to blame, the failure is its request's the next time."""
    h = harness(pieces=3, **CHUNKS)
    h.add("m", 8, max_tokens=1, media=(item(0),))
    assert h.plan()
    h.fail_step(WorkerError("broken").to_wire())
    assert h.step().num_tokens == {"m": 8}
    assert h.finished["m"].reason == "length"
    assert told(h) == [("a", True)]


def test_none_is_encoded_beforehand_when_told_so(harness: Any) -> None:
    for pieces, slice_ms in ((0, 20), (3, 0)):
        h = harness(pieces=pieces, **CHUNKS)
        h.scheduler.configure(from_mapping({"scheduler": {"token_budget": 64, "encoder_slice_ms": slice_ms}}, "test").scheduler)
        h.add("m", 8, max_tokens=1, media=(item(0),))
        assert h.step().num_tokens == {"m": 8}
        assert told(h) == []


def test_items_that_push_each_other_out_keep_nobody_waiting_for_ever(harness: Any) -> None:
    """Three are needed at once, and the worker keeps two."""
    h = harness(pieces=2)
    h.worker.room = 2
    h.add("m", 30, max_tokens=1, media=tuple(item(10 * i, digest=d) for i, d in enumerate("abc")))
    h.run()
    assert [digest for digest, _ in told(h)] == ["a", "a", "b", "b", "c", "c"]
    assert h.finished["m"].reason == "length"
    h.add("n", 8, max_tokens=1, media=(item(0, digest="a"),))
    h.run()
    assert told(h)[6:] == [("a", True), ("a", False)], "another request has it encoded in pieces again"


def test_nobody_is_displaced_for_a_request_that_waits_for_the_encoder(harness: Any) -> None:
    h = harness(pieces=4, max_running=1, on=("chunked_prefill", "scheduling.priority"), settings=CHUNKS["settings"])
    h.add("t", 4, max_tokens=9)
    h.step()
    h.add("m", 8, max_tokens=1, media=(item(0),), fields={"priority": -5})
    h.run()
    first = next(index for index, plan in enumerate(h.plans) if "t" in plan.preempted)
    assert first == 5, "when its picture is encoded"
    assert [plan.num_tokens for plan in h.plans[1:6]] == [{"t": 1}] * 4 + [{"m": 8}]
    assert all(plan.encodes_for == "m" for plan in h.plans[1:5])


def test_steps_that_only_encode_say_nothing_of_memory(harness: Any) -> None:
    h = harness(pieces=200, token_budget=64, **CHUNKS)
    h.add("t", 8, max_tokens=1)
    assert h.plan()
    h.no_memory(WorkerError("no memory").to_wire())
    h.run()
    limit = h.scheduler._builder.relief.limit
    assert limit is not None
    h.add("m", 8, max_tokens=1, media=(item(0),))
    for _ in range(150):
        assert h.step().num_tokens == {}
    assert h.scheduler._builder.relief.limit == limit
    h.run()


def test_a_step_that_encodes_is_about_the_request_that_waits(harness: Any) -> None:
    """Should the engine die in it, the request is to blame as much as those that it runs."""
    h = harness(pieces=3, **CHUNKS)
    h.add("t", 4, max_tokens=9)
    h.step()
    h.add("m", 8, max_tokens=1, media=(item(0),))
    assert h.plan()
    plan, _ = h.flights[0]
    assert plan.concerns == {"t", "m"}
    assert h.scheduler.runs(plan.concerns) == {"t": (4, 5), "m": (0, 1)}
    h.run()


@pytest.mark.parametrize("policy", ["scheduling.two_phase", "scheduling.static", "scheduling.priority"])
def test_under_every_policy_all_come_to_their_end(harness: Any, policy: str) -> None:
    h = harness(pieces=3, on=("chunked_prefill", policy), settings=CHUNKS["settings"])
    for index in range(6):
        h.add(f"r{index}", 9, max_tokens=4, media=(item(index % 3, digest=str(index)),) if index % 2 else ())
        h.step()
    h.run()
    assert {finish.reason for finish in h.finished.values()} == {"length"}
    assert h.worker.encoded == {"1", "3", "5"}


@pytest.mark.parametrize("seed", range(30))
def test_no_token_of_an_item_runs_before_it_is_encoded(harness: Any, seed: int) -> None:
    rng = random.Random(seed)
    chunked, cache = rng.random() < 0.7, rng.random() < 0.6
    h = harness(
        pieces=rng.choice([1, 2, 5]),
        ahead=rng.random() < 0.5,
        on=("chunked_prefill",) * chunked + ("prefix_cache",) * cache,
        settings={"chunked_prefill": {"mode": "fixed", "chunk_size": rng.choice([1, 3, 8, 20])}},
        num_blocks=rng.choice([24, 60]),
        token_budget=24,
        max_running=4,
    )
    media: dict[str, tuple[MediaItem, ...]] = {}
    for serial in range(14):
        name, at, spans = f"r{serial}", 0, []
        for _ in range(rng.randrange(3)):
            spans.append(
                item(at + rng.randrange(6), rng.randrange(1, 20), rng.choice("abcdef"), bidirectional=rng.random() < 0.5)
            )
            at = spans[-1].end
        media[name] = tuple(spans)
        h.add(name, [5] * (at + rng.randrange(1, 8)), max_tokens=rng.randrange(1, 12), media=media[name])
        for _ in range(rng.randrange(5)):
            h.step()
        if rng.random() < 0.2 and h.scheduler.requests:
            h.scheduler.cancel(rng.choice(sorted(h.scheduler.requests)), "cancelled", h.now)
    h.run()
    assert {finish.reason for finish in h.finished.values()} <= {"length", "cancelled"}
    assert len(h.finished) == 14
    done: dict[str, int] = {}
    begun: set[str] = set()
    for order in h.inputs:
        for new in order.new:
            done[new.request_id] = new.num_computed
        for name, count in order.num_tokens.items():
            first, end = done[name], done[name] + count
            begun |= {span.digest for span in media[name] if span.start < end and span.end > first}
            done[name] = end
        assert begun <= {o.encode.digest for o in h.inputs[: h.inputs.index(order)] if o.encode}
    assert begun <= h.worker.encoded
