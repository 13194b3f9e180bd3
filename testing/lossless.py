"""Does a plugin that says it is lossless leave every answer as it is?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .engine import Answer, Request, TinyEngine

PROMPTS = ("a", "abc abc", "the same beginning, one", "the same beginning, two", "a much longer prompt " * 4)
NEW = 20


def usual_requests(fields: Mapping[str, Any] | None = None) -> list[Request]:
    """Prompts of several lengths, some with a common beginning; greedy and sampled."""
    return [
        Request(prompt, NEW, temperature, seed, dict(fields or {}), at_step=index % 3)
        for index, prompt in enumerate(PROMPTS)
        for temperature, seed in ((0.0, 0), (0.9, 7 + index))
    ]


def assert_lossless(
    engine: TinyEngine, name: str, requests: Sequence[Request] | None = None, *, others: Sequence[str] = ()
) -> None:
    """AssertionError unless token ids and logprobs stay the same with `name` on, for each request.

    name: on in the engine, and declared lossless; for a plugin of scope "engine", which can't be switched in a run, compare two engines
    instead. requests: `usual_requests()` by default; they must not use fields that the plugin claims. others: plugins to switch off for
    the plain run too.
    """
    info = engine.plugin(name, "front").info
    assert info.lossless, f"{name!r} does not declare itself lossless"
    assert info.scope != "engine", f"{name!r} is chosen at start: compare the answers of two engines"
    requests = usual_requests() if requests is None else list(requests)
    off = tuple(other for other in ("chunked_prefill", "prefix_cache") if other in engine.switches.on)
    plain_off = tuple(dict.fromkeys((*off, *others, name)))
    before = len(engine.called(plugin=name))
    plain = [engine.run([request], off=plain_off, blocks=400)[0] for request in requests]
    longest = max(len(request.tokens) + request.max_tokens for request in requests)
    tight = -(-longest // engine.block_size) + 2
    ways: dict[str, dict[str, Any]] = {
        "alone": {"blocks": 400},
        "in a batch": {"blocks": 400, "token_budget": 2048},
        "in chunks": {"blocks": 400, "token_budget": 24},
        "out of blocks": {"blocks": tight, "max_running": 6},
        "switched live": {"blocks": 400, "changes": {2: {name: False}, 5: {name: True}, 9: {name: False}}},
    }
    for way, options in ways.items():
        rounds = [[request] for request in requests] if way == "alone" else [requests]
        answers = [answer for some in rounds for answer in engine.run(some, **options)]
        for request, expected, answer in zip(requests, plain, answers, strict=True):
            difference = differs(expected, answer)
            assert difference is None, f"with {name!r} on, {way}, {request.prompt!r:.40}: {difference}"
    assert len(engine.called(plugin=name)) > before, f"no hook of {name!r} was called: this shows nothing"


def differs(plain: Answer, answer: Answer) -> str | None:
    """The first difference that a client could see; None when there is none."""
    for what in ("tokens", "finish_reason", "logprobs", "prompt_logprobs"):
        if (mine := getattr(answer, what)) != (its := getattr(plain, what)):
            return f"{what} are {mine!r:.120}, and {its!r:.120} without it"
    return None
