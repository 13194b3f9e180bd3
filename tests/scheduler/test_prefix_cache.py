"""Prefix cache: hits, salts, tenants, eviction, off and on."""

from __future__ import annotations

import pytest

from tokenbus.core.errors import FieldError
from tokenbus.plugins.prefix_cache import PrefixCache, root_hash

PROMPT = [3 + (i * i) % 40 for i in range(20)]


def cached(h, name: str) -> int:
    h.run()
    return h.finished[name].cached_tokens


def test_second_request_hits_full_blocks_but_never_the_last_token(harness) -> None:
    h = harness(on=("prefix_cache",), block_size=4)
    h.add("a", PROMPT, max_tokens=3)
    assert cached(h, "a") == 0
    h.add("b", PROMPT, max_tokens=3)
    assert cached(h, "b") == 16, "20 tokens are five blocks; the last is left to compute"
    assert h.tokens["a"] == h.tokens["b"] == h.solo(PROMPT, 3)
    h.add("c", [*PROMPT, 5], max_tokens=3)
    assert cached(h, "c") == 20
    counters = h.outputs[-3].report.counters
    assert counters == {"prefix_cache.query_tokens": 21, "prefix_cache.hit_tokens": 20}


def test_hits_cover_generated_tokens_and_blocks_still_in_use(harness) -> None:
    h = harness(on=("prefix_cache",), block_size=4)
    h.add("a", PROMPT, max_tokens=30)
    for _ in range(8):
        h.step()
    h.add("b", PROMPT + h.tokens["a"][:5], max_tokens=2)
    h.step()
    assert h.scheduler.requests["b"].cached_tokens == 24
    shared = set(h.scheduler.requests["a"].blocks) & set(h.scheduler.requests["b"].blocks)
    assert len(shared) == 6
    assert {h.pool.refs(block) for block in shared} == {2}
    h.run()


def test_off_means_no_hits_and_the_same_tokens(harness) -> None:
    h = harness(on=())
    for name in "ab":
        h.add(name, PROMPT, max_tokens=3)
        assert cached(h, name) == 0
    assert h.tokens["a"] == h.tokens["b"] == h.solo(PROMPT, 3)
    assert h.pool.num_retained == 0


def test_one_request_can_do_without(harness) -> None:
    h = harness(on=("prefix_cache",))
    h.add("a", PROMPT)
    h.run()
    h.add("b", PROMPT, features=(), pinned={"prefix_cache": False})
    assert cached(h, "b") == 0
    assert h.finished["b"].features == ()
    h.add("c", PROMPT)
    assert cached(h, "c") == 16


def test_c25_salts_isolate(harness) -> None:
    h = harness(on=("prefix_cache",), num_blocks=256, block_size=16, token_budget=512)
    prompt = [3 + (i * i) % 40 for i in range(200)]
    hits = {}
    for name, salt in (("a1", "a"), ("a2", "a"), ("b", "b"), ("none", None), ("none2", None)):
        h.add(name, prompt, fields={} if salt is None else {"cache_salt": salt})
        hits[name] = cached(h, name)
    assert hits == {"a1": 0, "a2": 192, "b": 0, "none": 0, "none2": 192}
    assert len({tuple(h.tokens[name]) for name in hits}) == 1


def test_tenants_are_separate_unless_told_otherwise(harness) -> None:
    for separate, expected in ((True, 0), (False, 16)):
        h = harness(on=("prefix_cache",), settings={"prefix_cache": {"separate_tenants": separate}})
        h.add("a", PROMPT, tenant="alice")
        h.run()
        h.add("b", PROMPT, tenant="bob")
        assert cached(h, "b") == expected


def test_parts_of_the_root_cannot_be_taken_for_one_another() -> None:
    roots = [
        root_hash(16, "", None), root_hash(16, "x", None), root_hash(16, "", "x"), root_hash(16, "x", "x"), root_hash(4, "", None),
        root_hash(16, "", ""), root_hash(16, "xx", None), root_hash(16, "", "xx"), root_hash(16, "salt\x00x", None),
        root_hash(1, "6", None), root_hash(16, "", None, "x"), root_hash(16, "x", "x", "x"),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("salt", ["", 5, None, ["a"], "x" * 257])
def test_bad_salts_are_refused_by_name(salt) -> None:
    plugin = PrefixCache(PrefixCache.Settings(), "front")
    with pytest.raises(FieldError) as caught:
        plugin.check_fields(fields={"cache_salt": salt}, request=None)
    assert caught.value.param == "cache_salt"
    assert plugin.check_fields(fields={"cache_salt": "x" * 256}, request=None) is None


def test_least_recently_used_goes_first_and_the_end_before_the_beginning(harness) -> None:
    h = harness(on=("prefix_cache",), num_blocks=12, block_size=4)
    other = [4, *PROMPT[1:]]
    h.add("a", PROMPT, max_tokens=1)
    h.run()
    h.add("b", other, max_tokens=1)
    h.run()
    assert h.pool.num_retained == 10
    h.add("a2", PROMPT, max_tokens=1)
    assert cached(h, "a2") == 16
    h.add("c", [5, *PROMPT[1:]], max_tokens=1)
    h.run()
    h.add("b2", other, max_tokens=1)
    assert cached(h, "b2") == 12, "a's last block went for c, and two from the end of b"
    h.add("a3", PROMPT, max_tokens=1)
    assert cached(h, "a3") == 8, "two from the end of a went for b2"
    assert {h.solo(PROMPT, 1)[0]} == {h.tokens[name][0] for name in ("a", "a2", "a3")}


def test_duplicates_keep_the_first_copy(harness) -> None:
    h = harness(on=("prefix_cache",), token_budget=64)
    h.add("a", PROMPT, max_tokens=2)
    h.add("b", PROMPT, max_tokens=2)
    h.step()
    assert h.scheduler.requests["b"].cached_tokens == 0
    assert h.plugin("prefix_cache").num_blocks == 5
    assert not any(h.pool.is_retained(block) for block in h.scheduler.requests["b"].blocks)
    h.run()
    assert h.pool.num_retained == 5


def test_recomputation_after_preemption_is_found_in_the_cache(harness) -> None:
    h = harness(num_blocks=14, block_size=4, on=("prefix_cache",))
    h.add("a", 12, max_tokens=40)
    h.add("b", 12, max_tokens=30)
    h.run()
    assert h.finished["b"].preemptions >= 1
    assert h.finished["b"].cached_tokens == 0, "what counts is the first time"
    again = [new for order in h.inputs for new in order.new if new.request_id == "b"][1]
    assert again.num_computed > 0


def test_live_off_gives_back_what_was_kept_and_live_on_starts_afresh(harness) -> None:
    h = harness(on=("prefix_cache",))
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.step()
    assert h.switch(prefix_cache=False) == ["prefix_cache"]
    assert h.pool.num_retained == 0
    assert not any(h.pool.is_retained(block) for block in range(h.pool.num_blocks))
    h.step()
    h.switch(prefix_cache=True)
    for _ in range(4):
        h.step()
    assert h.plugin("prefix_cache").num_blocks == 6, "all full blocks of the running request, also those from before"
    h.add("b", PROMPT)
    assert cached(h, "b") == 16
    assert h.finished["a"].features == ("prefix_cache",)


def test_a_pinned_request_keeps_the_cache_alive_and_true(harness) -> None:
    h = harness(on=("prefix_cache",), num_blocks=16, block_size=4)
    h.add("a", PROMPT, max_tokens=30, pinned={"prefix_cache": True})
    h.step()
    h.add("w", PROMPT[::-1], max_tokens=8)
    assert h.switch(prefix_cache=False) == []
    assert "prefix_cache" in h.host.loaded
    h.run()
    assert h.finished["a"].features == ("prefix_cache",)
    assert h.finished["w"].features == ()
    assert "prefix_cache" not in h.host.loaded, "gone with its last user"
    assert h.pool.num_retained == 0


def test_its_time_is_counted(harness) -> None:
    h = harness(on=("prefix_cache",), num_blocks=300, block_size=16, token_budget=4096)
    h.add("a", 2000, max_tokens=4)
    h.run()
    assert 0.0 < h.plugin("prefix_cache").seconds < 0.05
