"""The engine's answer to Query("watch"), over the wire."""

from __future__ import annotations

import pytest
from engine_fakes import FAIL_STEP
from engine_harness import engine, request

pytestmark = pytest.mark.anyio


async def test_steps_requests_and_the_map_go_over_the_wire():
    async with engine(num_blocks=8) as e:
        assert (await e.query("watch"))["steps"] == []
        await e.add(request("a", [1, 2, 3], 3))
        await e.until_finished("a")
        reply = await e.query("watch", slow=True)
        assert reply["ids"] == ["a"]
        assert [(step["prefill"], step["decode"]) for step in reply["steps"]] == [({0: 3}, []), ({}, [0]), ({}, None)]
        assert all(step["duration"] >= 0 for step in reply["steps"])
        assert reply["requests"] == []
        assert reply["blocks"] == [[0, 0, 1]] * 8


async def test_a_step_that_failed_is_not_shown_and_does_no_harm():
    async with engine() as e:
        await e.query("watch")
        await e.add(request("bad", [FAIL_STEP], 3))
        await e.until_finished("bad")
        await e.add(request("good", [5], 1))
        await e.until_finished("good")
        reply = await e.query("watch")
        assert [reply["ids"][int(row)] for step in reply["steps"] for row in step["prefill"]] == ["good"]
