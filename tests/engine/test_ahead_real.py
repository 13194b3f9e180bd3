"""`scheduler.ahead` on a real engine with a tiny model: the same answers, and the same ones after it has died with two steps in flight."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from engine_harness import request
from test_client import until
from test_crash import NAMES, answers, engine_of, first_difference, kill, requests

from tokenbus.core.errors import EngineDiedError
from tokenbus.core.front.client import EngineClient
from tokenbus.core.messages import StepReport

pytestmark = pytest.mark.anyio

FEATURES = {"load": [f"crash_plugins:{name.title()}" for name in NAMES], "enable": NAMES}
"""Without speculation, which would have every step wait; grammars still propose what they force."""


def count_steps(client: EngineClient) -> Counter[str]:
    seen: Counter[str] = Counter()

    def count(report: StepReport) -> None:
        seen["steps"] += report.num_requests > 0
        seen["ahead"] += report.ahead
        seen["in vain"] += report.ahead_discarded
        seen[f"waited: {report.waited}"] += bool(report.waited)
        seen["gaps"] += report.gap > 0

    client.bus.listen(count, StepReport)
    return seen


async def plain_answers(path: Path, worker: str) -> list[Any]:
    async with engine_of(path, model={"worker": worker}, scheduler={"ahead": "off"}, features=FEATURES) as client:
        seen = count_steps(client)
        found = await answers(client.submit(requests(client, "plain", 100)))
        assert (seen["ahead"], seen["in vain"]) == (0, 0)
        assert seen["gaps"] > 20
        return found


def compare(found: list[Any], plain: list[Any]) -> None:
    for index, (answer, expected) in enumerate(zip(found, plain, strict=True)):
        differences = [*map(first_difference, answer, expected)]
        assert not any(differences[:6]), (index, differences)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.long)])
async def test_every_answer_is_the_same_also_through_deaths(tiny_llama: Path, worker: str):
    plain = await plain_answers(tiny_llama, worker)
    small = {"cache": {"num_blocks": 60}, "scheduler": {"ahead": "on", "token_budget": 64}, "features": FEATURES}
    async with engine_of(tiny_llama, model={"worker": worker}, **small) as client:
        assert client.info is not None
        assert client.info.ahead
        seen = count_steps(client)
        compare(await answers(client.submit(requests(client, "once", 100))), plain)
        assert seen["ahead"] > 40, seen
        assert min(seen[name] for name in ("in vain", "waited: drafts", "waited: blocks")) > 0, seen
        streams = client.submit(requests(client, "killed", 100))
        found: list[Any] = []

        async def follow() -> None:
            found.extend(await answers(streams))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for count in range(2):
                await until(lambda: client.restarts == count and client.ready()[0] and not client.suspects)  # noqa: B023
                target = seen["ahead"] + 7
                await until(lambda: seen["ahead"] >= target)  # noqa: B023
                kill(client)
                await until(lambda: not client.ready()[0])
        compare(found, plain)
        assert sum(stream.resumptions for stream in streams) >= 2  # the machine's load decides how many were still open
        assert await client.query("integrity") == {"ok": True, "problem": ""}
        assert (await client.query("stats"))["free_blocks"] == 60


@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.long)])
async def test_a_poisoned_request_ends_alone(tiny_llama: Path, worker: str):
    """It kills in a step that was planned ahead, before the output of the one before it has gone out, or after."""
    async with engine_of(tiny_llama, model={"worker": worker}, scheduler={"ahead": "on"}, features=FEATURES) as client:
        seen = count_steps(client)
        plain = await answers(client.submit(requests(client, "plain", 100)[2:6]))
        good = requests(client, "good", 100)[2:6]
        (bad,) = client.submit([request("bad", [1, 5, 9], 60, features=client.switches.names(), fields={"poison": 7})])
        *found, ended = await answers([*client.submit(good), bad])
        assert [answer[:6] for answer in found] == [answer[:6] for answer in plain]
        assert isinstance(ended, EngineDiedError)
        assert "died twice at the same position while it ran this request alone" in str(ended)
        assert 2 <= client.restarts <= 3
        assert seen["ahead"] > 20, seen
