"""Each family through a real server: OpenAI requests with pictures, against transformers' processor and `generate` on the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import media_kit as kit
import pytest
from demo_process import DemoServer
from served_kit import SERVED, VIEWS, ServedFolder, ask, check_answer, serving, talk

BY_DEFAULT = {"qwen2.5-vl"}
"""A server each takes its time; the others are for `-m long`."""
NAMES = [
    name if name in BY_DEFAULT else pytest.param(name, marks=pytest.mark.long)
    for name, served in SERVED.items()
    if served.images is not None
]
FIRST, LONG, TINY = kit.noise(40, 30), kit.noise(300, 30, seed=1), kit.noise(3, 5, seed=2)


@pytest.fixture(scope="module", params=NAMES)
def running(request: pytest.FixtureRequest, served: Any) -> Iterator[tuple[ServedFolder, DemoServer]]:
    """The family's folder, and a server of it."""
    folder: ServedFolder = served(request.param, **(VIEWS if request.param == "gemma3" else {}))
    folder.add_weights()
    with serving(folder) as server:
        yield folder, server


def test_answers_are_those_of_transformers(running: tuple[ServedFolder, DemoServer]) -> None:
    seen = [
        check_answer(*running, ["the end?"]),
        check_answer(*running, ["What is\n", FIRST, "\n\nthe?"]),
        check_answer(*running, [LONG]),
        check_answer(*running, [FIRST, "and\n", LONG, TINY], ["the same\n"], ["then?"]),
        check_answer(*running, ["first"], ["A text."], [TINY, FIRST, "?", FIRST]),
    ]
    assert len({tuple(answer.logprobs) for answer in seen}) == len(seen)


def test_large_pictures_too(running: tuple[ServedFolder, DemoServer]) -> None:
    check_answer(*running, [kit.noise(1200, 900), "?"])


def test_answers_do_not_depend_on_what_else_is_asked(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    asked = [talk(turn)[1] for turn in (["a text"], [FIRST, "a"], ["b", LONG, TINY], [TINY, "c", TINY, FIRST], [LONG, "?"])]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda messages: ask(server, messages), asked))
    for messages, answer in zip(asked, together, strict=True):
        alone = ask(server, messages, tokenbus={"features": {"prefix_cache": False}})
        assert (alone.tokens, alone.logprobs) == (answer.tokens, answer.logprobs)


def test_what_stands_for_a_picture_is_text_when_clients_write_it(running: tuple[ServedFolder, DemoServer]) -> None:
    folder, server = running
    placeholder = folder.served.tokens[-1]
    _, sent = talk([f"{placeholder}{placeholder} ", FIRST, "?"])
    _, plain = talk([FIRST, "?"])
    counts = [server.call("/tokenize", {"messages": messages})[1]["tokens"] for messages in (sent, plain)]
    place = len(folder.processor.tokenizer) - 1
    assert counts[0].count(place) == counts[1].count(place)


def test_more_than_fits_is_refused(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    _, sent = talk([*[FIRST, LONG] * 16, "?"])
    status, body = server.call("/v1/chat/completions", {"messages": sent})
    if status == 200:  # a family that takes few tokens for them
        assert body["usage"]["prompt_tokens"] < 1024
    else:
        assert (status, body["error"]["code"]) == (400, "ContextLengthError"), body
    _, sent = talk([TINY] * 33)
    status, body = server.call("/v1/chat/completions", {"messages": sent})
    assert status == 400
    assert "at most 32 are allowed" in body["error"]["message"]


def test_a_sound_is_refused(running: tuple[ServedFolder, DemoServer]) -> None:
    _, server = running
    parts = [kit.text_part("?"), kit.sound_part(b"RIFF")]
    status, body = server.call("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]})
    assert status == 400
    assert "reads no audio, only image" in body["error"]["message"]
    assert body["error"]["param"] == "messages[0].content[1].input_audio"
