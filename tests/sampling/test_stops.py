from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_kit import Kit, random_logits

from tokenbus.core.contexts import OutputContext
from tokenbus.core.errors import FieldError
from tokenbus.core.request import StopRule
from tokenbus.core.worker.state import SampleRow
from tokenbus.plugins.sampling.stops import StopStrings


def checked(**fields):
    return Kit().check("sampling.stops", fields)


def run(strings: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stops, shown = StopStrings(strings, include=include), ""
    for i, piece in enumerate(pieces):
        text, reason = stops.feed(piece, final=i == len(pieces) - 1)
        shown += text
        if reason is not None:
            return shown, reason
    return shown, None


def reference(strings: list[str], text: str, *, include: bool) -> tuple[str, str | None]:
    """Character by character: stop when the text so far ends with a stop string, the longest one."""
    for end in range(1, len(text) + 1):
        matches = [s for s in strings if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("strings", "text", "shown", "reason"),
    [
        (["two words"], "say two words now", "say ", "two words"),
        (["lo wo"], "hello world", "hel", "lo wo"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["ab", "abc"], "xabc", "x", "ab"),
        (["abc", "ab"], "xabc", "x", "ab"),
        (["bc", "abc"], "xabcd", "x", "abc"),
        (["abcd", "c"], "xabcd", "xab", "c"),
        (["nope"], "no nop", "no nop", None),
        (["aab"], "aaab", "a", "aab"),
        (["é\N{SLICE OF PIZZA}"], "caf\u00e9\N{SLICE OF PIZZA}!", "caf", "é\N{SLICE OF PIZZA}"),
    ],
)
def test_cases(strings, text, shown, reason):
    for size in (1, 2, 3, 100):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert run(strings, pieces) == (shown, reason)
    assert run(strings, [text], include=True)[0] == (shown + (reason or ""))


@given(
    st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("ab\nc", max_size=6), min_size=1, max_size=8),
    st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_independent_of_how_text_is_cut(strings, pieces, include):
    text = "".join(pieces)
    assert run(strings, pieces, include=include) == reference(strings, text, include=include)
    assert run(strings, [*text, ""], include=include) == reference(strings, text, include=include)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc", max_size=12))
@settings(max_examples=300, deadline=None)
def test_holds_back_exactly_what_could_match(strings, text):
    shown, reason = StopStrings(strings, include=False).feed(text, final=False)
    if reason is None:
        longest = max((k for s in strings for k in range(len(s)) if text.endswith(s[:k])), default=0)
        assert len(text) - len(shown) == longest


def test_many_long_stop_strings_are_quick():
    stops = StopStrings(["a" * 255 + chr(0x100 + i) for i in range(16)], include=False)
    shown = "".join(stops.feed("a" * 7, final=False)[0] for _ in range(300))
    assert len(shown) == 2100 - 255
    assert stops.feed("", final=True) == ("a" * 255, None)


def test_filter_hook_is_there_only_for_stop_strings():
    kit = Kit()
    (impl,) = kit.host.table(frozenset({"sampling.stops"})).text_filter
    assert impl(request=OutputContext("r", {"min_tokens": {}}, 0)) is None
    stops = impl(request=OutputContext("r", {"stop": ["x"], "include_stop_str_in_output": True}, 0))
    assert stops.feed("axb", final=True) == ("ax", "x")


def test_min_tokens_bans_ends_until_reached():
    kit, row = Kit(), random_logits(1)[0]
    fields = kit.check("sampling.stops", {"min_tokens": 3, "stop_token_ids": [9, 4, 4]})
    assert fields == {"stop_token_ids": [4, 9], "min_tokens": {"count": 3, "banned": [0, 1, 4, 9]}}
    request = kit.row([5, 6], 2, **fields).request
    for produced in range(5):
        got = kit.adjust(row, SampleRow(request, len(request.tokens)))
        expected = row.copy()
        if produced < 3:
            expected[[0, 1, 4, 9]] = -np.inf
        assert np.array_equal(got, expected)
        request.tokens.append(7)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields)) == fields


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"stop_token_ids": [9]}, StopRule(frozenset({0, 1, 9}))),
        ({"ignore_eos": True}, StopRule(frozenset())),
        ({"ignore_eos": True, "stop_token_ids": [9], "min_tokens": 2}, StopRule(frozenset({9}), 2)),
        ({"min_tokens": 4}, StopRule(frozenset({0, 1}), 4)),
    ],
)
def test_stop_rule(fields, rule):
    kit = Kit()
    request = kit.row([1], **kit.check("sampling.stops", fields)).request
    assert request.hooks.first("stop_rule", request=request, eos_token_ids=frozenset({0, 1})) == rule


def test_good_fields():
    assert checked(stop="x") == {"stop": ["x"]}
    assert checked(stop=["x", "y", "x"], ignore_eos=False, min_tokens=0) == {"stop": ["x", "y"]}
    assert checked(min_tokens=100)["min_tokens"]["count"] == 100


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", ""), ("stop", [""]), ("stop", ["", "x"]), ("stop", 5), ("stop", [5]), ("stop", ["x"] * 17), ("stop", "x" * 257),
     ("stop", {"a": 1}), ("stop_token_ids", [1000]), ("stop_token_ids", [-1]), ("stop_token_ids", [1.0]), ("stop_token_ids", [True]),
     ("stop_token_ids", [1] * 129), ("ignore_eos", 1), ("ignore_eos", "true"), ("min_tokens", -1), ("min_tokens", 101),
     ("min_tokens", True), ("min_tokens", 1.5), ("include_stop_str_in_output", None)],
)  # fmt: skip
def test_bad_fields(name, value):
    with pytest.raises(FieldError) as caught:
        checked(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "others", "param"),
    [
        ({"min_tokens": 1}, {"allowed_token_ids": [0, 1]}, "allowed_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": [7]}, {"allowed_token_ids": [0, 7]}, "allowed_token_ids"),
        ({"min_tokens": 1}, {"allowed_token_ids": [0, 9], "bad_words": [[9]]}, "allowed_token_ids"),
        ({"min_tokens": 1, "stop_token_ids": list(range(100))}, {"bad_words": [[i] for i in range(100, 1000)]}, "bad_words"),
    ],
)
def test_min_tokens_that_can_not_be_reached(fields, others, param):
    """Decidable at admission: other plugins' fields are there as they were handed on."""
    with pytest.raises(FieldError, match="every token is banned") as found:
        Kit().check("sampling.stops", fields, fields=fields | others)
    assert found.value.param == param
    one_left = {"min_tokens": 1, "ignore_eos": True}
    assert Kit().check("sampling.stops", one_left, fields={"allowed_token_ids": [0, 1]})["min_tokens"]["banned"] == []
