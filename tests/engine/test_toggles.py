"""Thousands of random toggles under load: nothing is lost, nothing fails, and answers stay what they are.

Requests are admitted with switches that may be out of date by the time they reach the engine, as the front's are; some have plugins that
are off, some pin one. Toggles come one to three at once and are refused for every reason there is.
"""

from __future__ import annotations

import random
from collections import Counter

import anyio
import pytest
from engine_fakes import FakeWorker, following
from engine_harness import Harness, engine, request
from test_plugins import plugin

from tokenbus.core.config import SchedulerConfig
from tokenbus.core.errors import ConflictError
from tokenbus.core.messages import SetFeatures
from tokenbus.core.plugin import Plugin, PluginInfo, hookimpl
from tokenbus.plugins.chunked_prefill import ChunkedPrefill
from tokenbus.plugins.prefix_cache import PrefixCache
from tokenbus.plugins.scheduling.fcfs import Fcfs
from tokenbus.plugins.scheduling.priority import Priority

pytestmark = pytest.mark.anyio

OPEN = 24
"""Requests that are kept open."""


class Wobbly(Plugin):
    """Starts every third time only."""

    info = PluginInfo(name="wobbly", summary="", scope="step", lossless=True)
    starts = 0

    @hookimpl
    def engine_started(self) -> None:
        Wobbly.starts += 1
        if Wobbly.starts % 3:
            raise ValueError("not now")


class Balance(Plugin):
    """Counts who comes and goes; what it has of a request must be gone when it stops."""

    open_requests: set[str]

    @hookimpl
    def engine_started(self) -> None:
        self.open_requests = set()

    @hookimpl
    def request_added(self, request) -> None:
        assert request.request_id not in self.open_requests
        self.open_requests.add(request.request_id)

    @hookimpl
    def request_removed(self, request) -> None:
        self.open_requests.remove(request.request_id)

    @hookimpl
    def engine_stopped(self) -> None:
        assert not self.open_requests


class Lossy(Balance):
    info = PluginInfo(name="lossy", summary="", scope="step", lossless=False, claims={"x"})


class Lossless(Balance):
    info = PluginInfo(name="lossless", summary="", scope="request", lossless=True)


class Guest(Balance):
    info = PluginInfo(name="guest", summary="", scope="request", lossless=False, claims={"y"})


PLUGINS = (
    ChunkedPrefill, PrefixCache, Fcfs, Priority, Wobbly, Lossy, Lossless, Guest,
    plugin("needy", requires=("lossy",)),
    plugin("rival", conflicts=("lossless",)),
    plugin("attention.one", slot="attention"),
    plugin("attention.two", slot="attention"),
    plugin("attention.odd", slot="attention", lossless=False),
    plugin("wont_start", fails_in=("engine_started",)),
    plugin("wont_load", fails_at_load=True),
    plugin("fixed", scope="engine"),
)  # fmt: skip
NAMES = tuple(cls.info.name for cls in PLUGINS)


class Load:
    def __init__(self, e: Harness, rng: random.Random) -> None:
        self.e, self.rng = e, rng
        self.admitted: dict[str, tuple[list[int], int]] = {}
        self.cancelled: set[str] = set()
        self.known: list[frozenset[str]] = [frozenset()]
        """What was on, newest last."""

    @property
    def num_open(self) -> int:
        return len(self.admitted) - len(self.e.finished)

    async def add(self) -> None:
        rng, request_id = self.rng, f"r{len(self.admitted)}"
        on = rng.choice(self.known[-4:])
        pinned = {name: rng.random() < 0.5 for name in ("lossless", "chunked_prefill", "prefix_cache") if rng.random() < 0.2}
        if "rival" in on:
            pinned.pop("lossless", None)
        fields = {"x": 1} if "lossy" in on and rng.random() < 0.5 else {}
        if rng.random() < 0.3:
            pinned["guest"], fields = True, {**fields, "y": 1}
        features = (on - {name for name, wish in pinned.items() if not wish}) | {name for name, wish in pinned.items() if wish}
        prompt = [*range(10, 10 + rng.randrange(25)), *(rng.randrange(40, 60) for _ in range(rng.randrange(1, 6)))]
        count = rng.randrange(1, 16)
        self.admitted[request_id] = prompt, count
        await self.e.add(request(request_id, prompt, count, features=tuple(sorted(features)), pinned=pinned, fields=fields))

    def check(self) -> None:
        assert self.e.finished.keys() == self.admitted.keys()
        assert len(self.e.ends) == len(self.admitted), "one ended twice"
        for request_id, (prompt, count) in self.admitted.items():
            finish = self.e.finished[request_id]
            assert finish.error is None, f"{request_id}: {finish.error}"
            assert finish.reason == "length"
            assert self.e.tokens[request_id] == following(prompt, count), request_id


@pytest.mark.parametrize("toggles", [1500, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_random_toggles_lose_nothing_and_change_no_answer(toggles: int):
    rng = random.Random(toggles)
    scheduler = SchedulerConfig(token_budget=32, max_running=12)
    outcomes: Counter[str] = Counter()
    async with engine(*PLUGINS, worker=FakeWorker(), num_blocks=40, scheduler=scheduler) as e:
        load = Load(e, rng)
        for number in range(toggles):
            while load.num_open < OPEN and rng.random() < 0.9:
                await load.add()
            names = rng.sample(NAMES, rng.choice((1, 1, 1, 2, 3)))
            if number % 50 == 49:  # now and then nothing is open, and another kernel set may come
                await e.until(lambda: not load.num_open)
                names = ["attention.odd"]
            try:
                now = await e.switch(**{name: rng.random() < 0.6 for name in names})
            except ConflictError:
                outcomes["refused"] += 1
                if rng.random() < 0.05:
                    assert set((await e.query("stats"))["on"]) == load.known[-1]
            else:
                outcomes["changed" if now != load.known[-1] else "same"] += 1
                load.known.append(now)
        await e.until(lambda: not load.num_open)
        load.check()
        stats = await e.query("stats")
        assert await e.query("integrity") == {"ok": True, "problem": ""}
        assert (stats["open"], stats["running"], stats["waiting"]) == (0, 0, 0)
        assert set(stats["loaded"]) == set(stats["on"]) == load.known[-1]
        assert not e.core.scheduler.switches.failed
        assert not [message for message in e.others if type(message).__name__ == "PluginDisabled"]
    met = Counter(name for finish in e.finished.values() for name in finish.features)
    assert min(outcomes.values()) > toggles / 20, outcomes
    assert met.keys() == set(NAMES) - {"fixed", "wont_start", "wont_load"}
    assert sum(finish.preemptions for finish in e.finished.values()) > 0
    assert sum(finish.cached_tokens for finish in e.finished.values()) > 0


async def test_toggles_that_overtake_each_other_in_the_mailbox():
    """Changes that arrive while a step computes are applied in order, with the requests between them."""
    entered, gate = anyio.Event(), anyio.Event()

    async def before(order):
        entered.set()
        await gate.wait()

    async with engine(*PLUGINS, worker=FakeWorker(before=before)) as e:
        await e.add(request("first"))
        await entered.wait()
        for number in range(50):
            await e.channel.send(SetFeatures(100 + number, {"lossy": number % 2 == 0}))
            if number % 2 == 0:
                await e.add(request(f"r{number}", features=("lossy",), fields={"x": 1}))
        await e.arrived(75)
        gate.set()
        await e.until_finished("first", *(f"r{number}" for number in range(0, 50, 2)))
        assert {finish.reason for finish in e.finished.values()} == {"length"}
        assert (await e.query("stats"))["loaded"] == []
