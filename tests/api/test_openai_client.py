"""The `openai` package against the server."""

from __future__ import annotations

import openai
import pytest

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(api):
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_chat(api, client):
    api.outputs("hello world")
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, max_completion_tokens=5
    )
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert [entry.token for entry in answer.choices[0].logprobs.content] == list("hello")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    again = [*({"role": "user", "content": "hi"},), answer.choices[0].message, {"role": "user", "content": "more"}]
    assert (await client.chat.completions.create(model="tiny", messages=again)).choices[0].message.content == "hello world"


async def test_streams(api, client):
    api.outputs("hello world")
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], stream=True, n=2, stream_options={"include_usage": True}
    )
    texts, usage = {0: "", 1: ""}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "hello world", 1: "hello world"}
    assert usage.completion_tokens == 22
    stream = await client.completions.create(model="tiny", prompt="x", stream=True, extra_body={"top_k": 5})
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


async def test_streamed_chat_with_the_accumulating_helper(api, client):
    api.outputs("hello world")
    async with client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "hi"}]) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello world"


async def test_completions_and_models(client):
    answer = await client.completions.create(model="tiny", prompt=["ab", "cd"], echo=True, logprobs=1, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["aba", "cdc"]
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.5, -0.5]
    assert [model.id async for model in await client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors(client):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="x", extra_body={"temperatur": 1})
    assert bad.value.param == "temperatur"
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="else", prompt="x")
