"""Every hook that answers something: nonsense is a PluginError that names plugin and hook, sense goes through untouched."""

from __future__ import annotations

import datetime as dt
from types import SimpleNamespace
from typing import Any

import pytest

from tokenbus import hookimpl
from tokenbus.core import hook_answers, hooks
from tokenbus.core.contexts import Implied, PrefixMatch, Route
from tokenbus.core.errors import PluginError, PluginLoadError, WorkerError
from tokenbus.core.host import HOOK_NAMES, Impl, PluginHost
from tokenbus.core.kv.pool import BlockPool
from tokenbus.core.plan import TokenLogprobs
from tokenbus.core.plugin import Plugin, PluginInfo
from tokenbus.core.policy import FcfsPolicy
from tokenbus.core.request import StopRule
from tokenbus.core.worker.torch_attention import TorchAttention

INFO = PluginInfo(name="odd", summary="", scope="step", lossless=True, claims={"x"})
POOL = BlockPool(8, 4)
USED, RETAINED, FREE = POOL.allocate(3) or []
POOL.retain(RETAINED)
POOL.release([RETAINED, FREE])
OBJECT = object()


async def handler(request: Any) -> Any:
    return request


class Full(FcfsPolicy):
    def __len__(self) -> int:
        return 3


class Unsure(TorchAttention):
    def __init__(self) -> None:
        super().__init__()
        self.invariant: Any = "yes"


class Hostile:
    def __len__(self) -> int:
        raise ValueError("don't count me")

    __instancecheck__ = __len__


ARGUMENTS: dict[str, dict[str, Any]] = {
    "match_prefix": {"pool": POOL, "request": SimpleNamespace(tokens=list(range(9)))},
    "check_fields": {"fields": {"x": OBJECT}},
    "token_logprobs": {"rows": [1, 2]},
}
ENTRY = TokenLogprobs(3, -1.0, 1, [3], [-1.0])
SENSE: list[tuple[str, Any]] = [
    ("limit_chunk", 0),
    ("limit_chunk", 10**9),
    ("stop_rule", StopRule(frozenset({1, 2}), 3)),
    ("wants_prompt_logits", False),
    ("match_prefix", PrefixMatch([USED, RETAINED], 8)),
    ("match_prefix", PrefixMatch((), 0)),
    ("check_fields", {}),
    ("check_fields", {"x": [None, True, 2**64 - 1, -(2**63), 1.5, "é", b"\x00", (1,), {"k": {7: []}}]}),
    ("check_fields", {"x": OBJECT}),  # the client's own: admission finds what is wrong with it
    ("text_filter", SimpleNamespace(feed=lambda text, final: (text, None))),
    ("tool_parser", SimpleNamespace(feed=lambda text, final: [], special_tokens=frozenset({"<x>"}))),
    ("implied_fields", Implied(by="x", fields={"y": [1, {"z": None}]}, plugin="p")),
    ("http_routes", [Route("GET", "/x", handler)]),
    ("http_routes", ()),
    ("scheduling_policy", FcfsPolicy()),
    ("attention_backend", TorchAttention()),
    ("token_logprobs", [ENTRY, None]),
]
NONSENSE: list[tuple[str, Any]] = [
    *[("limit_chunk", answer) for answer in (2.5, "3", True, -1, [1], {})],
    *[("stop_rule", answer) for answer in ({1}, 5, StopRule([1]), StopRule(frozenset({"a"})), StopRule(frozenset(), 1.5))],  # type: ignore[arg-type]
    ("stop_rule", StopRule(frozenset(), -1)),
    *[("wants_prompt_logits", answer) for answer in (1, "yes", [], Hostile())],
    *[("match_prefix", answer) for answer in ([USED], Hostile(), PrefixMatch([FREE], 4), PrefixMatch([USED], 3))],
    *[("match_prefix", PrefixMatch(blocks, 4 * len(blocks))) for blocks in ([8], [-1], ["0"], [True], [USED, USED], [USED] * 3)],
    *[("match_prefix", answer) for answer in (PrefixMatch({USED}, 4), PrefixMatch([USED], 4.0), PrefixMatch(None, 0))],  # type: ignore[arg-type]
    *[("check_fields", answer) for answer in ([], "x", {"other": 1}, {1: 1})],
    *[("check_fields", {"x": value}) for value in (object(), {1, 2}, 2**64, -(2**63) - 1, "\ud800", {(1, 2): 3}, {None: 1})],
    *[("check_fields", {"x": [value]}) for value in (dt.datetime.now(dt.UTC), ENTRY, {"a": set()}, 1 + 2j, lambda: 1)],
    *[("text_filter", answer) for answer in ("text", object(), SimpleNamespace(feed=3))],
    *[("reasoning_parser", answer) for answer in ("text", SimpleNamespace(feed=print), SimpleNamespace(special_tokens=frozenset()))],
    ("tool_parser", SimpleNamespace(feed=print, special_tokens=["<x>"])),
    *[("implied_fields", answer) for answer in ({"y": 1}, Implied("x", [], "p"), Implied("x", {"y": object()}, "p"))],  # type: ignore[arg-type]
    *[("implied_fields", Implied(by, fields, "p")) for by, fields in ((1, {}), ("x", {1: 2}))],  # type: ignore[arg-type]
    *[("http_routes", answer) for answer in (5, "GET /", ["GET /"], [Route("get", "/x", handler)], [Route("GET", "x", handler)])],
    *[("http_routes", [route]) for route in (Route("GET", "/x", None), Route(1, "/x", handler), Route("GET", 2, handler))],  # type: ignore[arg-type]
    *[("scheduling_policy", answer) for answer in (FcfsPolicy, object(), [], Full())],
    *[("attention_backend", answer) for answer in (TorchAttention, object(), Unsure())],
    *[("token_logprobs", answer) for answer in ([ENTRY], [ENTRY] * 3, 7, "ab", [ENTRY, 1], [{"token_id": 1}, None])],
    *[("token_logprobs", [TokenLogprobs(*values), None]) for values in ((1.5, -1.0, 1), (1, "x", 1), (1, -1.0, 1, [1.5], [0.0]))],  # type: ignore[arg-type]
]  # fmt: skip


def impl(hook: str, answer: Any) -> Impl:
    return Impl(hook, INFO, lambda **_: answer)


@pytest.mark.parametrize(("hook", "answer"), SENSE)
def test_sense_goes_through(hook: str, answer: Any):
    assert impl(hook, answer)(**ARGUMENTS.get(hook, {})) is answer


@pytest.mark.parametrize(("hook", "answer"), NONSENSE)
def test_nonsense_is_the_plugins_error(hook: str, answer: Any):
    with pytest.raises(PluginError, match=f"plugin 'odd' failed in {hook}: ") as raised:
        impl(hook, answer)(**ARGUMENTS.get(hook, {}))
    assert (raised.value.plugin, raised.value.hook) == ("odd", hook)


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_none_is_no_opinion_in_every_hook(hook: str):
    assert impl(hook, None)() is None


def test_every_hook_that_answers_has_a_check():
    answering = {name for name in HOOK_NAMES if getattr(hooks, name).__annotations__["return"] != "None"}
    assert answering == hook_answers.CHECKS.keys()


def test_too_deep_is_not_plain_data():
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert hook_answers.plain_data_problem(value) == "is nested too deeply"


@pytest.mark.parametrize("answer", ["text", ("text",), ("a", None, 1), (b"a", None), (None, None), ("a", 7), ["a", None], None])
def test_what_a_filter_gives(answer: Any):
    assert hook_answers.filtered_text_problem(answer) is not None
    assert hook_answers.filtered_text_problem(("a", "why")) is hook_answers.filtered_text_problem(("", None)) is None


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("error", [Unspeakable(), ValueError("\ud800"), KeyError(object())])
def test_whatever_is_raised_can_be_told(error: Exception):
    def raises(**_: Any) -> None:
        raise error

    with pytest.raises(PluginError) as raised:
        Impl("limit_chunk", INFO, raises)()
    raised.value.to_wire().message.encode()


def test_an_error_of_odd_parts_is_plain_data_on_the_wire():
    made = WorkerError({"no": "text"}, param=3, plugin=["x"], retry_after="soon").to_wire()  # type: ignore[arg-type]
    assert (made.message, made.param, made.plugin, made.retry_after) == ("{'no': 'text'}", "3", "['x']", None)
    assert WorkerError("cut \ud800 off").to_wire().message == "cut ? off"


def test_a_hook_must_be_a_plain_function():
    class Late(Plugin):
        info = PluginInfo(name="late", summary="", scope="step", lossless=True)

        @hookimpl
        async def limit_chunk(self):
            return 1

    host = PluginHost("engine")
    host.add(Late)
    with pytest.raises(PluginLoadError, match="limit_chunk must be a plain function"):
        host.load({"late"})
