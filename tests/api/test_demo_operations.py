"""Rows of the case book that need a server of their own: a small pool, a killed engine, signals."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import aiohttp
import anyio
import pytest

pytestmark = pytest.mark.anyio


async def test_c27_c28_c29_small_pool(serve_demo, demo_server, client_of):
    """Eight blocks of 16: the pool is the limit, not the model. Four requests start with two blocks each and need three: some are
    preempted, and all end as on a server with room."""
    with serve_demo("--num-blocks", "8", "--token-budget", "64") as server:
        api, roomy = client_of(server), client_of(demo_server)
        listed = await api.call("GET", "/v1/models")
        limit = listed.body["data"][0]["max_model_len"]
        assert limit <= 128
        refused = await api.complete(list(range(1000, 1000 + limit)))
        assert (refused.status, refused.error["code"]) == (400, "ContextLengthError")
        assert str(limit) in refused.error["message"]
        await api.check_well()
        fields = {"max_tokens": 32, "ignore_eos": True, "frequency_penalty": 1, "temperature": 0.7}
        bodies = [{"prompt": [1000 + seed, 1100, 1200, 1300], "seed": seed, **fields} for seed in range(4)]
        found: dict[tuple[str, int], str] = {}

        async def ask(client, body):
            found[client.url, body["seed"]] = (await client.complete(**body)).text

        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(ask, api, body)
        assert await api.metric("tokenbus_preemptions_total") >= 1
        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(ask, roomy, body)
        assert [found[api.url, seed] for seed in range(4)] == [found[roomy.url, seed] for seed in range(4)]
        await api.check_well()


async def test_c59_killed_engine_then_c60_drain(serve_demo, client_of):
    with serve_demo("--restart-backoff", "0.2", "--drain-seconds", "60", "--enable", "speculative.ngram") as server:
        api = client_of(server)
        await api.check_well()
        engine = _engine_of(server.process.pid)
        found = []

        async def follow(prompt, tokens):
            found.append(await api.stream_completion(prompt, max_tokens=tokens, ignore_eos=True, temperature=0))

        whole = [await _answer(api, fields) for fields in KINDS]
        killed: list = [None] * len(KINDS)

        async def ask(index):
            killed[index] = await _answer(api, KINDS[index])

        async with anyio.create_task_group() as tasks:
            for index in range(len(KINDS)):
                tasks.start_soon(ask, index)
            await _until(api, lambda running: running >= 5)
            os.kill(engine, signal.SIGKILL)
            with anyio.fail_after(10):
                while (await api.call("GET", "/ready")).status == 200:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
            assert (await api.call("GET", "/health")).status == 200
            refused = await api.complete("x", max_tokens=1)
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) >= 1
        for fields, before, after in zip(KINDS, whole, killed, strict=True):
            assert before.pop("resumed") is None
            assert after.pop("resumed") in {None, 1}, "none if it had ended before"
            assert before == after, fields
        assert await api.metric("tokenbus_request_resumptions_total") >= 5
        assert (await api.call("GET", "/ready")).status == 200
        await api.check_well()
        assert _engine_of(server.process.pid) != engine

        found.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow, "1, 2, 3,", 12)
            tasks.start_soon(follow, "1, 2, 3,", 12)
            await _until(api, lambda running: running >= 2)
            server.send(signal.SIGTERM)
            with anyio.fail_after(10):
                while (await api.call("GET", "/ready")).status == 200:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
            third = await api.complete("x", max_tokens=1)
            assert third.status == 503
            assert third.headers["Retry-After"]
        assert [events.reasons()[-1] for events in found] == ["length", "length"]
        assert all(events.done for events in found)
        assert await anyio.to_thread.run_sync(server.wait) == 0
        assert not _alive(_engine_of(server.process.pid, default=engine))


KINDS: list[dict[str, object]] = [
    {"stream": True, "max_tokens": 90, "temperature": 0, "logprobs": 2},
    {"stream": True, "max_tokens": 80, "n": 2, "frequency_penalty": 0.4, "stop": [" the", "xyzzy"], "min_tokens": 40},
    {"max_tokens": 70, "n": 2, "temperature": 1.1, "top_p": 0.95},
    {"max_tokens": 90, "temperature": 0, "echo": True, "logprobs": 1, "prompt": "A list of colours: red,"},
    {"stream": True, "max_tokens": 70, "structured_outputs": {"regex": "([a-z]{2,8} ){40,50}"}, "frequency_penalty": 0.5},
]


async def _answer(api, fields):
    """All that a client sees of an answer, but for its id and time."""
    body = {"prompt": "Once upon a time", "seed": 11, "ignore_eos": True, **fields}
    if not fields.get("stream"):
        answer = await api.complete(**body)
        assert answer.status == 200, answer.body
        return {key: answer.body[key] for key in ("choices", "usage")} | {"resumed": answer.body["tokenbus"].get("resumed")}
    body.pop("stream")
    events = await api.stream_completion(**body, stream_options={"include_usage": True})
    assert events.status == 200
    assert events.done
    told = [chunk["tokenbus"] for chunk in events.chunks if "tokenbus" in chunk]
    seen = {"usage": events.chunks[-1]["usage"], "resumed": told[-1].get("resumed")}
    for index in range(int(body.get("n", 1))):
        pieces = [c for chunk in events.chunks for c in chunk["choices"] if c["index"] == index]
        seen[f"text {index}"] = events.text(index)
        seen[f"end {index}"] = (pieces[-1]["finish_reason"], pieces[-1]["stop_reason"])
        seen[f"logprobs {index}"] = [v for p in pieces if p["logprobs"] for v in p["logprobs"]["token_logprobs"]]
    return seen


async def test_c60_second_signal_ends_at_once(serve_demo, client_of):
    with serve_demo("--drain-seconds", "60") as server:
        api = client_of(server)
        engine = _engine_of(server.process.pid)

        async def ask():
            with contextlib.suppress(aiohttp.ClientError):  # or the connection is cut before the answer is out
                assert (await api.complete("Once upon a time", max_tokens=480, ignore_eos=True)).status == 503

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await _until(api, lambda running: running >= 1)
            server.send(signal.SIGTERM)
            with anyio.fail_after(10):
                while (await api.call("GET", "/ready")).status == 200:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
            server.send(signal.SIGTERM)
            assert await anyio.to_thread.run_sync(server.wait, 10) == 128 + signal.SIGTERM
        assert not _alive(engine)


async def _until(api, condition) -> None:
    with anyio.fail_after(20):
        while not condition(await api.metric("tokenbus_requests_running")):  # noqa: ASYNC110 - a gauge of another process
            await anyio.sleep(0.01)


def _engine_of(front: int, default: int | None = None) -> int:
    """The process whose parent is `front`."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(encoding="ascii").rpartition(")")[2].split()[1])
        except (OSError, ValueError):  # it has just ended
            continue
        if parent == front:
            return int(stat.parent.name)
    assert default is not None
    return default


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
