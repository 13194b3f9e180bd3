"""Reasoning told from content over HTTP, with an engine that writes what it is told to."""

from __future__ import annotations

import pytest
from tools_kit import ADD, CALL, THINK, both

pytestmark = pytest.mark.anyio


async def test_reasoning_and_content(serve):
    async with serve(template=THINK) as api:
        message, reason = await both(api, "<think>\nhm, well\n</think>\n\nYes.")
        assert message == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm, well"}
        assert reason == "stop"
        message, _ = await both(api, "no tags")
        assert message == {"role": "assistant", "content": "no tags"}
        message, reason = await both(api, "<think>too long", max_tokens=10)
        assert (message["content"], message["reasoning_content"], reason) == (None, "too ", "length")
        api.outputs("<think>raw</think>x")
        assert (await api.complete("x")).text == "<think>raw</think>x"


async def test_reasoning_that_the_prompt_has_begun(serve):
    async with serve(template=THINK) as api:
        message, _ = await both(api, "hm</think>Yes", chat_template_kwargs={"think": "<think>\n"})
        assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
        message, _ = await both(api, "hm</think>", chat_template_kwargs={"think": "<think>\n\n</think>\n\n"})
        assert message["content"] == "hm</think>"
        message, _ = await both(api, "hm</think>")
        assert message["content"] == "hm</think>"


async def test_reasoning_then_a_call(serve):
    async with serve(template=THINK) as api:
        message, reason = await both(api, f"<think>a {CALL}</think>\n\n{CALL}", tools=[ADD])
        assert message["reasoning_content"] == f"a {CALL}"
        assert (message["content"], len(message["tool_calls"]), reason) == (None, 1, "tool_calls")


async def test_reasoning_is_switched_off_for_one_request(serve):
    async with serve(template=THINK) as api:
        message, _ = await both(api, "<think>a</think>b", tokenbus={"features": {"reasoning": False}})
        assert message == {"role": "assistant", "content": "<think>a</think>b"}
        message, _ = await both(api, "<think>a</think>b")
        assert message["reasoning_content"] == "a"
