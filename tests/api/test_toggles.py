"""Random toggles over HTTP, with a real engine and a tiny model, while clients go on asking: no request is lost, none fails but with a 400
that names a field whose plugin was off, and every text is what it is without toggles."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp import web

from tokenbus.core.api import admin, misc
from tokenbus.core.api.app import Routes, make_app
from tokenbus.core.api.auth import Gate
from tokenbus.core.api.connection import make_runner
from tokenbus.core.bus import Bus
from tokenbus.core.config import from_mapping
from tokenbus.core.front.client import EngineClient
from tokenbus.core.front.events import FeatureChange
from tokenbus.core.front.service import Service
from tokenbus.core.host import make_host
from tokenbus.core.selftest.tiny import make_tiny
from tokenbus.kernels.cpu import lib

pytestmark = pytest.mark.anyio

ASKERS = 6
SPEED = ("chunked_prefill", "prefix_cache", "speculative.ngram", "speculative.suffix")
NAMES = (
    *SPEED, "scheduling.unified", "scheduling.priority", "sampling.stops", "sampling.logprobs", "sampling.penalties",
    "sampling.truncation", "structured", "tools", "tools.auto", "tools.hermes", "reasoning", "metrics", "quantization.int8",
)  # fmt: skip
FEATURES = "/v1/tokenbus/features"


def bodies() -> list[dict[str, Any]]:
    """Requests that share beginnings and use fields of several plugins."""
    made = []
    for index in range(10):
        prompt = [40 + (7 * i + i * i) % 60 for i in range(20 + 13 * (index % 4))] + [65 + index] * 3
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 12 + 3 * index, "ignore_eos": True, "seed": index}
        body["temperature"] = 0.7 if index % 2 else 0
        body |= ({}, {"logprobs": 1}, {"repetition_penalty": 1.2}, {"top_k": 20, "priority": 1})[index % 4]
        made.append(body)
    return made


@asynccontextmanager
async def served(folder: Path, tokenizer: Any) -> AsyncIterator[tuple[str, EngineClient]]:
    config = from_mapping(
        {
            "model": {"model": str(folder), "dtype": "float32", "max_model_len": 512, "threads": 1},
            "cache": {"num_blocks": 60, "block_size": 16},
            "scheduler": {"token_budget": 64, "max_running": 5},
            "server": {"log_level": "warning"},
            "features": {"enable": ["scheduling.priority"]},
        },
        "test",
    )
    host, bus = make_host("front", config), Bus()
    client = EngineClient(config, bus, host, host.start_switches(config.features.enable))
    async with anyio.create_task_group() as tasks:
        await tasks.start(lambda *, task_status: client.run(task_status=task_status))
        await client.wait_ready()
        service = Service(config, host, client, bus, model_name="tiny", tokenizer=tokenizer, template=None)
        routes = Routes(service)
        misc.add_routes(routes)
        admin.add_routes(routes)
        runner = make_runner(make_app(service, routes, Gate(config.server)), 0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}", client
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()
                service.close()
                await client.close()


class World:
    def __init__(self, url: str, session: aiohttp.ClientSession, client: EngineClient, rng: random.Random) -> None:
        self.url, self.session, self.client, self.rng = url, session, client, rng
        self.truth: dict[tuple[bool, int], str] = {}
        """By whether attention.cpu computes, and the body's number."""
        self.tick = 0
        """Changes so far."""
        self.was_off: dict[str, int] = dict.fromkeys(client.host.catalogue.keys() - client.switches.on, 0)
        """The last tick at which a plugin was off."""
        self.asking = 0
        self.done = False
        self.go, self.idle = anyio.Event(), anyio.Event()
        self.go.set()
        self.outcomes: Counter[str] = Counter()
        client.bus.listen(self.note, FeatureChange)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.session.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def switch(self, **changes: bool) -> int:
        status, _ = await self.post(FEATURES, {"features": changes})
        return status

    def note(self, change: FeatureChange) -> None:
        """Called as the front adopts it."""
        self.tick += 1
        for name in self.client.host.catalogue.keys() - change.state.on:
            self.was_off[name] = self.tick

    async def ask(self, number: int, features: dict[str, bool]) -> None:
        began = self.tick
        body = {**bodies()[number], "tokenbus": {"features": features}}
        status, answer = await self.post("/v1/completions", body)
        if status == 200:
            applied = answer["tokenbus"]
            assert answer["choices"][0]["finish_reason"] == "length"
            for name, wish in features.items():
                assert (name in applied["features"]) == wish, applied
            truth = self.truth.setdefault(("attention.cpu" in applied["features"], number), answer["choices"][0]["text"])
            assert answer["choices"][0]["text"] == truth, (number, applied)
            self.outcomes["answered"] += 1
            return
        error = answer["error"]
        assert (status, error["code"]) == (400, "FeatureOffError"), answer
        claimers = self.client.host.claimers(error["param"])
        assert all(self.was_off.get(name, -1) >= began for name in claimers), (error, began, self.was_off)
        self.outcomes["refused"] += 1

    async def asker(self, index: int) -> None:
        rng = random.Random(index)
        while not self.done:
            await self.go.wait()
            self.asking += 1
            features = {name: rng.random() < 0.5 for name in SPEED if rng.random() < 0.25}
            await self.ask(rng.randrange(len(bodies())), features)
            self.asking -= 1
            if not self.asking:
                self.idle.set()

    async def while_nobody_asks(self, **changes: bool) -> None:
        self.go, self.idle = anyio.Event(), anyio.Event()
        if self.asking:
            await self.idle.wait()
        assert await self.switch(**changes) == 200
        self.go.set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny-llama"))


@pytest.mark.parametrize(
    "toggles",
    [pytest.param(120, marks=pytest.mark.slow), pytest.param(3000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])],
)
async def test_toggles_over_http(folder: Path, tokenizer: Any, toggles: int):
    rng = random.Random(toggles)
    kernels = {} if lib.load() is None else {"attention.cpu": True}
    async with served(folder, tokenizer) as (url, client), aiohttp.ClientSession() as session:
        world = World(url, session, client, rng)
        for holder in (*kernels, "attention.torch"):  # every answer by itself, with each kernel set
            await world.switch(**{holder: True})
            for number in range(len(bodies())):
                await world.ask(number, {})
        assert world.outcomes == {"answered": len(world.truth)}
        async with anyio.create_task_group() as tasks:
            for index in range(ASKERS):
                tasks.start_soon(world.asker, index)
            for number in range(toggles):
                if kernels and number % 30 == 29:
                    await world.while_nobody_asks(**{"attention.cpu": rng.random() < 0.5})
                    continue
                names = rng.sample(NAMES, rng.choice((1, 1, 2, 3)))
                status = await world.switch(**{name: rng.random() < 0.7 for name in names})
                world.outcomes[f"switch {status}"] += 1
            world.done = True
        stats = await client.query("stats")
        assert await client.query("integrity") == {"ok": True, "problem": ""}
        assert (stats["open"], stats["free_blocks"], client.open_requests) == (0, 60, 0)
        assert set(stats["on"]) == set(stats["loaded"]) == set(client.host.loaded) == client.switches.on
        assert client.restarts == 0
        async with session.get(url + "/v1/tokenbus/audit?last=1000") as response:
            entries = (await response.json())["entries"]
    assert len(entries) >= min(toggles, 1000)
    assert world.outcomes.keys() == {"answered", "refused", "switch 200", "switch 409"}, world.outcomes
    assert world.outcomes["answered"] > toggles / 4
