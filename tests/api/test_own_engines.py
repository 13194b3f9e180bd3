"""An experiment whose arms have engines of their own: who goes where, what rows and reports say, and real engines of which one dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tokenbus.core.experiments.records import experiment_dir, read_rows
from tokenbus.core.worker.threads import available_cores

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(available_cores() < 2, reason="two engines need two cores"),
]

PATH = "/v1/tokenbus/experiments"
ARMS = {"on": {}, "off": {"features": {"prefix_cache": False}, "settings": {"scheduler.token_budget": 512}}}


def settings(folder: Path, **values: Any) -> dict[str, Any]:
    x = {"engines": "own", "arms": ARMS, "autostart": True, "washout_seconds": 0, **values}
    return {"server": {"state_dir": str(folder)}, "experiments": {"x": x}}


async def rows_of(api: Any, folder: Path) -> list[Any]:
    await api.service.experiments.tick()
    return list(read_rows(experiment_dir(folder, "x")))


async def act(api: Any, action: str) -> Any:
    answer = await api.call("POST", PATH, {"name": "x", "action": action})
    assert answer.status == 200, answer.body
    return answer.body["experiments"]["x"]


async def test_every_request_goes_to_its_arms_engine_with_its_switches(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        seen = Counter()
        for _ in range(60):
            answer = await api.complete("hello")
            arm = answer.headers["x-tokenbus-arm"].removeprefix("x/")
            seen[arm] += 1
            listed = answer.headers["x-tokenbus-features"].split(",")
            assert (answer.text, "prefix_cache" in listed) == ("hello", arm == "on")
        assert {arm: len(engine.admitted) for arm, engine in api.engines.items()} == dict(seen)
        assert min(seen.values()) > 10
        rows = await rows_of(api, tmp_path)
        view = (await api.call("GET", PATH)).body["experiments"]["x"]
    assert Counter(row.arm for row in rows) == seen
    assert all(row.own_engine and not row.shared_steps and row.slice is not None and row.counts for row in rows)
    assert len({row.config for row in rows}) == 2
    assert (view["engines"], view["shared_steps"]) == ("own", False)
    off = view["arms"]["off"]
    assert (off["features"], off["settings"]) == ({"prefix_cache": False}, {"scheduler.token_budget": 512})
    assert view["arms"]["on"]["settings"] == {"scheduler.token_budget": 2048}
    cores = [set(view["arms"][arm]["engine"]["cores"].split(",")) for arm in ARMS]
    assert cores[0].isdisjoint(cores[1])


async def test_who_is_left_out_or_rolled_back_is_the_controls(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        for _ in range(10):
            answer = await api.complete("hello", tokenbus={"features": {"prefix_cache": False}})
            assert answer.headers["x-tokenbus-arm"] == "x/excluded"
        assert [len(api.engines[arm].admitted) for arm in ARMS] == [10, 0]
        await act(api, "rollback")
        for _ in range(20):
            assert (await api.complete("hello")).headers["x-tokenbus-arm"] == "x/on"
        await act(api, "stop")
        assert (await api.complete("hello")).headers["x-tokenbus-arm"] == "default"
        assert [len(api.engines[arm].admitted) for arm in ARMS] == [31, 0]
        rows = await rows_of(api, tmp_path)
    assert Counter(row.excluded for row in rows)["client"] == 10
    assert {row.excluded for row in rows if row.arm == "off" and row.excluded != "client"} == {"tripped"}


async def test_it_does_not_run_beside_slices_and_can_not_be_ramped(serve, tmp_path):
    made = settings(tmp_path)
    made["experiments"]["turns"] = {"split": "slice", "arms": {"a": {}, "b": {"features": {"chunked_prefill": False}}}}
    async with serve(made) as api:
        answer = await api.call("POST", PATH, {"name": "turns", "action": "start"})
        assert (answer.status, "switch one engine only" in answer.error["message"]) == (409, True)
        answer = await api.call("POST", PATH, {"name": "x", "action": "ramp", "traffic": 0.5})
        assert (answer.status, "weights" in answer.error["message"]) == (409, True)


async def test_an_engine_that_changes_ends_the_run(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        await api.engines["off"].set_features({"chunked_prefill": False}, "engine: plugin 'chunked_prefill' failed")
        view = (await api.call("GET", PATH)).body["experiments"]["x"]
        assert (view["status"], "an engine was changed" in view["reason"]) == ("stopped", True)
        assert (await api.complete("hello")).text == "hello"


async def test_a_run_goes_on_after_a_restart_of_the_server(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        await api.complete("hello")
    async with serve(settings(tmp_path)) as api:
        view = (await api.call("GET", PATH)).body["experiments"]["x"]
        assert (view["status"], view["run"]) == ("running", 1)
    changed = settings(tmp_path)
    changed["features"] = {"disable": ["chunked_prefill"]}
    async with serve(changed) as api:  # both engines have it off: the arms are what they were
        assert (await api.call("GET", PATH)).body["experiments"]["x"]["status"] == "running"


@pytest.fixture(scope="module")
def server(serve_demo: Any, tmp_path_factory: Any) -> Any:
    folder = tmp_path_factory.mktemp("own")
    config = folder / "tokenbus.toml"
    config.write_text(
        f"""
        [server]
        state_dir = {json.dumps(str(folder))}
        [experiments.x]
        engines = "own"
        autostart = true
        washout_seconds = 0
        slice_seconds = 0.5
        [experiments.x.arms.plain]
        [experiments.x.arms.int8]
        features = {{ "quantization.int8" = true }}
        settings = {{ "cache.block_size" = 32 }}
        """
    )
    with serve_demo("--config", str(config)) as made:
        made.folder = folder
        yield made


def engines_of(server: Any) -> dict[str, Any]:
    status, body = server.call(PATH)
    assert status == 200
    return {arm: shown["engine"] for arm, shown in body["experiments"]["x"]["arms"].items()}


async def test_real_engines_have_equal_disjoint_cores_and_equal_memory(server, client_of):
    engines = engines_of(server)
    allowed = {}
    for arm, engine in engines.items():
        allowed[arm] = os.sched_getaffinity(engine["pid"])
    assert allowed["plain"].isdisjoint(allowed["int8"])
    assert len(allowed["plain"]) == len(allowed["int8"])
    assert {engine["kv_tokens"] for engine in engines.values()} == {
        128 * 16,
        128 * 32,
    }  # 256 blocks shared out, of 16 and 32 tokens
    client = client_of(server)
    answers = await asyncio.gather(*(client.complete("1, 2, 3, 4,", temperature=0, max_tokens=8) for _ in range(24)))
    by_arm = {}
    for answer in answers:
        by_arm.setdefault(answer.headers["x-tokenbus-arm"], []).append(answer)
    assert by_arm.keys() == {"x/plain", "x/int8"}
    for arm, same in by_arm.items():
        assert len({answer.text for answer in same}) == 1
        assert ("quantization.int8" in same[0].headers["x-tokenbus-features"]) == (arm == "x/int8")


def test_nothing_can_be_switched_live_there(server):
    for path, body in (
        ("features", {"features": {"prefix_cache": False}}),
        ("settings", {"settings": {"scheduler.token_budget": 64}}),
    ):
        status, answer = server.call(f"/v1/tokenbus/{path}", body)
        assert (status, "engines of their own" in answer["error"]["message"]) == (409, True)
    last = server.call("/v1/tokenbus/audit")[1]["entries"][-1]
    assert (last["result"], "those of experiment 'x'" in last["because"]) == ("refused", True)


async def test_an_arm_whose_engine_dies_comes_back_and_the_other_notices_nothing(server, client_of):
    client = client_of(server)
    before = engines_of(server)

    async def long(number: int) -> Any:
        return await client.complete(f"Count: {number}, ", temperature=0, max_tokens=150, ignore_eos=True)

    answers = asyncio.gather(*(long(number) for number in range(8)))
    await asyncio.sleep(0.5)
    os.kill(before["int8"]["pid"], signal.SIGKILL)
    await asyncio.sleep(0.2)
    status, body = server.call("/ready")
    assert (status, body["error"]["message"].startswith("arm 'int8': ")) == (503, True)
    done = await answers
    assert {answer.headers["x-tokenbus-arm"] for answer in done} == {"x/plain", "x/int8"}
    assert [answer.status for answer in done] == [200] * 8
    assert {answer.body["usage"]["completion_tokens"] for answer in done} == {150}
    after = engines_of(server)
    assert (after["plain"]["pid"], after["plain"]["restarts"]) == (before["plain"]["pid"], 0)
    assert (after["int8"]["pid"] != before["int8"]["pid"], after["int8"]["restarts"]) == (True, 1)
    assert server.call("/ready")[0] == 200
    await asyncio.sleep(1.5)  # rows are written about every second
    rows = [row for row in read_rows(experiment_dir(server.folder, "x")) if row.completion_tokens == 150]
    assert {(row.arm, row.engine, row.resumptions) for row in rows} == {("plain", 0, 0), ("int8", 1, 1)}


def test_at_the_end_no_engine_is_left(server):
    pids = [engine["pid"] for engine in engines_of(server).values()]
    server.send(signal.SIGTERM)
    assert server.wait() == 0
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
