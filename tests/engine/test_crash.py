"""A real engine with a tiny model dies under many streams: each answer is the one it would have been, to the bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import tokenizers
from engine_harness import request
from test_client import read, until

from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.errors import DeadlineError, EngineDiedError
from tokenbus.core.front.admission import Admitter, ParsedRequest, Prompt
from tokenbus.core.front.client import EngineClient, TokenStream
from tokenbus.core.front.tokenizer import Tokenizer
from tokenbus.core.host import make_host
from tokenbus.core.messages import StepReport
from tokenbus.core.request import AdmittedRequest

pytestmark = pytest.mark.anyio

NAMES = ("poison", "rival", "tally", "forgetful")


@asynccontextmanager
async def engine_of(path: Path, **sections: dict[str, Any]) -> AsyncIterator[EngineClient]:
    config = from_mapping(
        {
            "model": {"model": str(path), "threads": 1, **sections.pop("model", {})},
            "cache": {"num_blocks": 256, **sections.pop("cache", {})},
            "supervision": {"restart_backoff": 0.01, "restart_backoff_max": 0.1},
            "features": {
                "load": [f"crash_plugins:{name.title()}" for name in NAMES],
                "enable": [*NAMES, "speculative.ngram", "speculative.suffix"],
            },
            **sections,
        },
        "test",
    )
    host = make_host("front", config)
    client = EngineClient(config, Bus(), host, host.start_switches(config.features.enable))
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: client.run(task_status=task_status))
        try:
            await client.wait_ready()
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client.close()


SPELLS = {
    "type": "function",
    "function": {
        "name": "spell",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "minLength": 70}}, "required": ["word"]},
    },
}
KINDS: list[dict[str, Any]] = [
    {},
    {
        "structured_outputs": {"regex": "(and|or )+[0-9]{70}"},
        "frequency_penalty": 0.8,
        "presence_penalty": 0.3,
    },
    {"logprobs": 3},
    {"min_tokens": 90, "top_p": 0.9},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"tools": [SPELLS], "tool_choice": "required", "repetition_penalty": 1.3},
    {"tally": True},
    {"ignore_eos": True, "logprobs": 1},
]
WITHOUT_DRAFTS = (3, 4, 7)
"""Kinds that leave speculation out."""


def requests(client: EngineClient, name: str, max_tokens: int = 150) -> list[AdmittedRequest]:
    """Sixteen, of all kinds: greedy and seeded, long and short prompts, with everything that looks at past tokens."""
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(f"{client.config.model.model}/tokenizer.json"), {})
    admitter = Admitter(
        client.config,
        client.host,
        switches=lambda: client.switches,
        info=lambda: client.info,
        tokenize=tokenizer.encode_now,
        vocabulary=tokenizer.vocabulary,
    )
    parsed = [
        ParsedRequest(
            endpoint="chat" if "tools" in fields else "generate",
            prompts=[Prompt([1, *(3 + (7 * i + 5 * k) % 120 for k in range(3 + 40 * (i % 4)))])],
            n=2,
            max_tokens=max_tokens,
            temperature=float(i % 3 > 0),
            seed=100 + i,
            fields=fields,
            features=dict.fromkeys(("speculative.ngram", "speculative.suffix"), False) if i in WITHOUT_DRAFTS else {},
            own_features=True,
            group=f"{name}-{i}",
            arrival=time.time(),
        )
        for i, fields in enumerate(KINDS)
    ]
    return [admitted for one in parsed for admitted in admitter.prepare(admitter.admit(one)).requests]


async def collect(stream: TokenStream) -> tuple[Any, ...]:
    """All that a client can see of an answer."""
    tokens: list[int] = []
    logprobs: list[Any] = []
    prompt_logprobs: list[Any] = []
    async for chunk in stream:
        tokens += chunk.tokens
        logprobs += chunk.logprobs or ()
        prompt_logprobs += chunk.prompt_logprobs or ()
    finish = stream.finish
    assert finish is not None
    return tokens, logprobs, prompt_logprobs, finish.reason, finish.stop_token, finish.features, finish.cached_tokens


async def answers(streams: list[TokenStream]) -> list[Any]:
    found: list[Any] = [None] * len(streams)

    async def follow(index: int, stream: TokenStream) -> None:
        try:
            found[index] = await collect(stream)
        except EngineDiedError as error:
            found[index] = error

    async with anyio.create_task_group() as tasks:
        for index, stream in enumerate(streams):
            tasks.start_soon(follow, index, stream)
    return found


def first_difference(ours: Any, theirs: Any) -> Any:
    """For a failure's message: where two lists part, or two values that differ."""
    if isinstance(ours, list) and isinstance(theirs, list):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        return None if at is None and len(ours) == len(theirs) else (at, len(ours), len(theirs))
    return None if ours == theirs else (ours, theirs)


def kill(client: EngineClient) -> None:
    if (pid := client.engine_pid) is not None:
        os.kill(pid, signal.SIGKILL)


async def killed_at_random(
    client: EngineClient, kills: int, seed: int, max_tokens: int, most_steps: int, *, small_pool: bool = False
) -> None:
    """small_pool: some lose their blocks, and the prefix cache gives what it happens to have kept."""
    await answers(client.submit(requests(client, "warm", max_tokens)))  # so that all runs find the same in the prefix cache
    plain = await answers(client.submit(requests(client, "plain", max_tokens)))
    assert sum(answer[-1] for answer in plain) > 0
    assert all(len(answer[0]) > 10 for answer in plain)
    rng = random.Random(seed)
    streams = client.submit(requests(client, "killed", max_tokens))
    found: list[Any] = []
    steps = [0]
    drafts: Counter[str] = Counter()

    def count_step(report: StepReport) -> None:
        steps[0] += report.num_requests > 0
        drafts.update({name: int(count) for name, count in report.counters.items() if name.startswith("speculative")})

    client.bus.listen(count_step, StepReport)

    async def follow() -> None:
        found.extend(await answers(streams))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        for count in range(kills):
            await until(lambda: client.restarts == count and client.ready()[0])  # noqa: B023
            if count % 3 != 1:  # else while suspects are still being tried; never twice in a row, which could blame one of them
                await until(lambda: not client.suspects)
            target = steps[0] + rng.randrange(most_steps)
            await until(lambda: steps[0] >= target or len(client.journal) < 4)  # noqa: B023
            kill(client)
            await until(lambda: not client.ready()[0])
    for index, (answer, expected) in enumerate(zip(found, plain, strict=True)):
        differences = [*map(first_difference, answer, expected)]
        assert not any(differences[:6] if small_pool else differences), (index, differences)
    preempted = sum(stream.finish.preemptions for stream in streams if stream.finish is not None)
    assert bool(preempted) == small_pool
    assert sum(stream.resumptions for stream in streams) >= 16
    accepted, proposed = (
        sum(n for name, n in drafts.items() if name.endswith(f".{what}_tokens")) for what in ("accepted", "proposed")
    )
    assert 0 < accepted < proposed, drafts
    assert await client.query("integrity") == {"ok": True, "problem": ""}
    assert len(client.journal) == 0


@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.long)])
async def test_killed_under_sixteen_streams_every_answer_is_the_same(tiny_llama: Path, worker: str):
    async with engine_of(tiny_llama, model={"worker": worker}) as client:
        await killed_at_random(client, 3, 1, 150, 20)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_killed_twenty_times_under_sixteen_streams(tiny_llama: Path):
    async with engine_of(tiny_llama, cache={"num_blocks": 80}) as client:
        await killed_at_random(client, 20, 2, 380, 10, small_pool=True)


@pytest.mark.parametrize(("worker", "how"), [("thread", "the engine process was killed by"), ("process", "worker process")])
async def test_one_poisoned_request_among_fifteen_good_ones_ends_alone(tiny_llama: Path, worker: str, how: str):
    async with engine_of(tiny_llama, model={"worker": worker}) as client:
        wanted = requests(client, "plain", 100)[:15]
        plain = await answers(client.submit(wanted))
        good = requests(client, "good", 100)[:15]
        (bad,) = client.submit([request("bad", [1, 5, 9], 60, features=client.switches.names(), fields={"poison": 7})])
        *found, ended = await answers([*client.submit(good), bad])
        assert [answer[:6] for answer in found] == [answer[:6] for answer in plain]
        assert isinstance(ended, EngineDiedError)
        assert "died twice at the same position while it ran this request alone: " in str(ended)
        assert how in str(ended)
        assert ended.request_id == "bad"
        assert 2 <= client.restarts <= 4  # on a busy machine a death may take the news of steps that went well with it
        assert client.ready() == (True, "ok")


@pytest.mark.slow
async def test_two_that_kill_only_together_run_one_after_the_other_and_nobody_ends(tiny_llama: Path):
    async with engine_of(tiny_llama) as client:
        features = client.switches.names()

        def rivals(name: str) -> list[AdmittedRequest]:
            return [
                request(f"{name}{i}", [1, 5, 9 + i], 40, features=features, fields={"rival": True, "ignore_eos": True})
                for i in range(2)
            ]

        plain = [(await answers(client.submit([rival])))[0] for rival in rivals("plain")]
        plain += await answers(client.submit(requests(client, "plain", 100)[:6]))
        assert client.restarts == 0
        streams = client.submit([*rivals("both"), *requests(client, "good", 100)[:6]])
        found = await answers(streams)
        assert [answer[:6] for answer in found] == [answer[:6] for answer in plain]
        assert client.restarts == 3
        assert client.suspects == 0
        assert client.ready() == (True, "ok")
        assert await client.query("integrity") == {"ok": True, "problem": ""}


async def test_plugins_that_forget_and_plugins_that_are_off_by_now(tiny_llama: Path):
    async with engine_of(tiny_llama) as client:
        names = client.switches.names()

        def ask(name: str) -> list[AdmittedRequest]:
            fields: list[dict[str, Any]] = [{"tally": True}, {"forget": True}, {}]
            return [request(f"{name}{i}", [1, 7, 9], 200, features=names, fields=f) for i, f in enumerate(fields)]

        plain = await answers(client.submit(ask("plain")))
        assert plain[0][0] != plain[2][0], "it changes the answer, so it can't be left out unnoticed"
        streams = client.submit(ask("killed"))
        begun = [(await anext(stream)).tokens for stream in streams]
        await client.set_features({"tally": False, "prefix_cache": False}, "me")  # one stays with its request, one leaves
        kill(client)
        found = await answers(streams)
        assert isinstance(found[1], EngineDiedError)
        assert (found[1].plugin, found[1].request_id) == ("forgetful", "killed1")
        for i in (0, 2):
            assert begun[i] + found[i][0] == plain[i][0]
            assert found[i][5] == tuple(sorted(set(plain[i][5]) - {"prefix_cache"}))
        assert client.restarts == 1
        stats = await client.query("stats")
        assert "tally" not in stats["on"]
        assert "tally" not in stats["loaded"], "unloaded after its last request"


async def test_time_and_clients_go_on_while_the_engine_is_away(tiny_llama: Path):
    limits = {"supervision": {"restart_backoff": 4.0}}
    async with engine_of(tiny_llama, **limits) as client:
        features = client.switches.names()
        late, left, stays = client.submit(
            [
                request("late", [1, 2], 500, features=features, arrival=time.time(), deadline=time.time() + 2.0),
                request("left", [1, 2], 500, features=features),
                request("stays", [1, 2], 500, features=features),
            ]
        )
        for stream in (late, left, stays):
            await anext(stream)
        kill(client)
        left.cancel("stop")  # on its way to an engine that is no more
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"time was up after 2\.\d s, .* it was held back"):
            await read(late)
        assert not client.ready()[0]
        await read(left)
        assert left.finish is not None
        assert left.finish.reason == "stop"
        stays.cancel()
        stays.cancel()
        await read(stays)
        assert stays.finish is not None
        assert stays.finish.reason == "cancelled"
        assert time.monotonic() - began < 3.5
        assert client.open_requests == len(client.journal) == 0
        await until(lambda: client.ready()[0])
        assert (await client.query("stats"))["open"] == 0


async def test_a_model_that_cant_be_loaded_again_ends_requests_not_the_server(tiny_llama: Path, tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    limits = {"supervision": {"restart_backoff": 0.01, "restart_backoff_max": 0.1, "resume_starts": 2}}
    async with engine_of(model, **limits) as client:
        (stream,) = client.submit([request("a", [1, 2], 500, features=client.switches.names())])
        await anext(stream)
        (model / "model.safetensors").rename(tmp_path / "away")
        kill(client)
        with pytest.raises(EngineDiedError, match=r"2 attempts to start another one failed: the engine gave up: .*safetensors"):
            await read(stream)
        assert not client.ready()[0]
        (tmp_path / "away").rename(model / "model.safetensors")
        await until(lambda: client.ready()[0])
        assert len(await read(client.submit([request("b", [1, 2], 3)])[0])) == 3
