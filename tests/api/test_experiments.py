"""Experiments as clients and operators meet them: headers, bodies, refusals, metrics, the command line, and a real engine that dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from tokenbus.core.cli import main
from tokenbus.core.experiments.records import experiment_dir, read_rows

pytestmark = pytest.mark.anyio

PATH = "/v1/tokenbus/experiments"
ARMS = {"on": {}, "off": {"features": {"prefix_cache": False}}}
USERS = [f"u{i}" for i in range(40)]


def settings(folder: Path, experiments: dict[str, Any] | None = None, **server: Any) -> dict[str, Any]:
    made = experiments or {"cache": {"arms": ARMS, "split": "user", "autostart": True}}
    return {"server": {"state_dir": str(folder), **server}, "experiments": made}


async def rows_of(api: Any, folder: Path, name: str = "cache") -> list[Any]:
    await api.service.experiments.tick()
    return list(read_rows(experiment_dir(folder, name)))


async def test_an_arm_is_in_header_body_engine_record_and_row_and_stays(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        arms = {}
        for user in [*USERS, *USERS]:
            answer = await api.complete("hello", user=user)
            arm = answer.headers["x-tokenbus-arm"]
            assert arms.setdefault(user, arm) == arm == answer.body["tokenbus"]["arm"]
            admitted = api.engine.admitted[-1]
            assert admitted.arm == arm == api.records[-1].arm
            assert admitted.pinned == {"prefix_cache": arm == "cache/on"}
            listed = answer.headers["x-tokenbus-features"].split(",")
            assert ("prefix_cache" in listed) == (arm == "cache/on") == ("prefix_cache" in admitted.features)
        assert set(arms.values()) == {"cache/on", "cache/off"}
        rows = await rows_of(api, tmp_path)
    assert Counter(f"cache/{row.arm}" for row in rows) == Counter([*arms.values(), *arms.values()])
    assert len({row.unit for row in rows}) == len(USERS)
    assert all(row.counts and row.completion_tokens == 5 and row.ttft is not None and row.e2e >= row.ttft for row in rows)


async def test_what_is_done_with_an_experiment_is_in_the_audit_trail(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        for action, more in (("ramp", {"traffic": 0.5}), ("rollback", {}), ("stop", {})):
            assert (await api.call("POST", PATH, {"name": "cache", "action": action, **more})).status == 200
        entries = (await api.call("GET", "/v1/tokenbus/audit?last=10")).body["entries"]
    found = [entry for entry in entries if entry["what"] == "experiment"]
    assert [entry["result"] for entry in found] == ["started", "ramped", "rolled_back", "stopped"]
    assert found[1]["asked"] == {"experiment": "cache", "run": 1, "traffic": 0.5, "weights": {"on": 0.5, "off": 0.5}}
    assert found[2]["asked"]["weights"] == {"on": 0.5, "off": 0.0}
    assert found[3]["because"].startswith("stopped by loopback ")
    assert [entry["who"].split()[0] for entry in found] == ["server", *["loopback"] * 3]


async def test_a_stream_and_a_chat_say_their_arm(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        events = await api.stream_completion("hello", user="u1")
        assert events.headers["x-tokenbus-arm"] == events.chunks[-1]["tokenbus"]["arm"]
        answer = await api.chat("hi", user="u1")
        assert answer.headers["x-tokenbus-arm"] == events.headers["x-tokenbus-arm"]
        plain = await api.complete("hello")
        assert plain.headers["x-tokenbus-arm"] == plain.body["tokenbus"]["arm"] == "default"
        assert [row.endpoint for row in await rows_of(api, tmp_path)] == ["completion", "chat"]


async def test_the_answer_of_a_lossless_arm_is_the_plain_one(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        for user in USERS[:10]:
            assert (await api.complete("hello", user=user)).text == "hello"
        await api.check_well()


async def test_who_chooses_or_needs_the_switch_is_left_out_and_well_served(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        for user in USERS[:8]:
            chose = await api.complete("hello", user=user, tokenbus={"features": {"prefix_cache": False}})
            needs = await api.complete("hello", user=user, cache_salt="s")
            for answer in (chose, needs):
                assert (answer.text, answer.headers["x-tokenbus-arm"]) == ("hello", "cache/excluded")
            assert "prefix_cache" not in chose.headers["x-tokenbus-features"]
            assert "prefix_cache" in needs.headers["x-tokenbus-features"]
        rows = await rows_of(api, tmp_path)
        assert Counter(row.excluded for row in rows) == {"client": 8, "claims": 8}
        assert {row.arm for row in rows} == {"on", "off"}


async def test_a_switch_of_the_server_that_takes_an_arm_away(serve, tmp_path):
    """But one that a request can have on its own: each keeps its arm."""
    async with serve(settings(tmp_path)) as api:
        await api.call("POST", "/v1/tokenbus/features", {"features": {"prefix_cache": False}})
        for user in USERS:
            answer = await api.complete("hello", user=user)
            on = "prefix_cache" in answer.headers["x-tokenbus-features"]
            assert (answer.text, on) == ("hello", answer.headers["x-tokenbus-arm"] == "cache/on")
        rows = await rows_of(api, tmp_path)
        assert {(row.arm, row.excluded) for row in rows} == {("on", ""), ("off", "")}


async def test_an_arm_can_switch_on_what_the_server_has_off(serve, tmp_path):
    arms = {"plain": {}, "drafts": {"features": {"speculative.ngram": True}}}
    async with serve(settings(tmp_path, {"x": {"arms": arms, "split": "user", "autostart": True}})) as api:
        seen = set()
        for user in USERS:
            answer = await api.complete("hello", user=user)
            assert answer.text == "hello"
            seen.add((answer.headers["x-tokenbus-arm"], "speculative.ngram" in answer.headers["x-tokenbus-features"]))
        assert seen == {("x/plain", False), ("x/drafts", True)}


async def test_a_full_queue_and_a_wrong_field_have_rows(serve, tmp_path):
    tight = {**settings(tmp_path), "scheduler": {"max_running": 1, "max_waiting": 1}}
    async with serve(tight) as api:
        api.engine.hold = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(api.complete, "a", user="u1"))
            tasks.start_soon(partial(api.complete, "b", user="u1"))
            await api.until(lambda: api.engine.open_requests == 2)
            assert (await api.complete("c", user="u1")).status == 429
            assert (await api.complete("c", user="u1", top_p=7)).status == 400
            assert (await api.complete("c", user="u1", n=2)).status == 429
            api.engine.resume()
        rows = await rows_of(api, tmp_path)
        assert [(row.finish_reason, row.status) for row in rows] == [
            ("refused", 429), ("refused", 400), ("refused", 429), ("stop", 0), ("stop", 0),
        ]  # fmt: skip
        assert api.service.experiments.view()["cache"]["rows"]["pending"] == 0


async def test_a_client_that_leaves_has_a_row(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        api.engine.hold_after = 1
        call = asyncio.ensure_future(api.stream_completion("hello", user="u1"))
        await api.until(lambda: api.engine.open_requests == 1)
        call.cancel()
        await api.until(lambda: api.records)
        assert [row.finish_reason for row in await rows_of(api, tmp_path)] == ["cancelled"]


async def test_an_arm_that_fails_gives_its_traffic_to_the_control(serve, tmp_path):
    guarded = {"arms": ARMS, "split": "user", "autostart": True, "guard": {"max_error_rate": 0.2, "min_samples": 5}}
    async with serve(settings(tmp_path, {"cache": guarded})) as api:
        arms = {user: (await api.complete("hello", user=user)).headers["x-tokenbus-arm"] for user in USERS[:20]}
        bad = next(user for user, arm in arms.items() if arm == "cache/off")
        from tokenbus.core.errors import WorkerError

        api.engine.fail_after[0] = WorkerError("no luck")
        for _ in range(8):
            assert (await api.complete("hello", user=bad)).status == 500
        api.engine.fail_after.clear()
        await api.service.experiments.tick()
        state = (await api.call("GET", PATH)).body["experiments"]["cache"]
        assert "requests failed" in state["arms"]["off"]["off"]
        answer = await api.complete("hello", user=bad)
        assert (answer.text, answer.headers["x-tokenbus-arm"]) == ("hello", "cache/on")
        assert "prefix_cache" in answer.headers["x-tokenbus-features"]


async def test_a_header_can_be_what_sticks(serve, tmp_path):
    split = {"arms": ARMS, "split": "header:X-Team", "autostart": True}
    async with serve(settings(tmp_path, {"cache": split})) as api:
        first = {team: (await api.complete("a", headers={"x-team": team})).headers["x-tokenbus-arm"] for team in USERS}
        again = {team: (await api.complete("a", headers={"X-TEAM": team})).headers["x-tokenbus-arm"] for team in USERS}
        assert first == again
        assert set(first.values()) == {"cache/on", "cache/off"}
        assert (await api.complete("a")).headers["x-tokenbus-arm"] == "default"


async def test_two_experiments_at_once(serve, tmp_path):
    chunks = {"arms": {"whole": {"features": {"chunked_prefill": False}}, "pieces": {}}, "split": "request", "autostart": True}
    both = {"cache": {"arms": ARMS, "split": "user", "autostart": True}, "chunks": chunks}
    async with serve(settings(tmp_path, both)) as api:
        seen = Counter([(await api.complete("a", user=user)).headers["x-tokenbus-arm"] for user in USERS])
        assert set(seen) == {f"cache/{a},chunks/{b}" for a in ("on", "off") for b in ("whole", "pieces")}
        assert len(await rows_of(api, tmp_path, "cache")) == len(await rows_of(api, tmp_path, "chunks")) == len(USERS)


async def test_slices_switch_the_server_as_the_switches_route_does(serve, tmp_path):
    arms = {"fifo": {"features": {"scheduling.unified": True}}, "core": {"features": {"scheduling.unified": False}}}
    sliced = {"arms": arms, "split": "slice", "slice_seconds": 0.15, "washout_seconds": 0.01, "autostart": True}
    async with serve(settings(tmp_path, {"order": sliced})) as api:
        seen = set()
        with anyio.fail_after(20):
            while len(api.changes) < 6 or len(seen) < 2:
                seen.add((await api.complete("hello")).headers["x-tokenbus-arm"])
                assert api.engine.open == {}
        assert seen - {"order/excluded"} == {"order/fifo", "order/core"}
        assert {change.who for change in api.changes} == {"experiment order"}
        assert {frozenset(change.changes) for change in api.changes} == {frozenset({"scheduling.unified"})}
        rows = await rows_of(api, tmp_path, "order")
        by_slice: dict[int, set[str]] = {}
        for row in rows:
            by_slice.setdefault(row.slice, set()).add(row.arm)
        assert all(len(found) == 1 for found in by_slice.values())
        await api.call("POST", PATH, {"name": "order", "action": "stop"})
        state = (await api.call("GET", "/v1/tokenbus/features")).body
        assert state["features"]["scheduling.unified"]["on"]


async def test_what_an_operator_does_and_what_is_refused(serve, tmp_path):
    off = {"cache": {"arms": ARMS, "split": "user"}, "again": {"arms": ARMS, "split": "request"}}
    async with serve(settings(tmp_path, off)) as api:
        assert (await api.complete("a", user="u1")).headers["x-tokenbus-arm"] == "default"

        async def act(**body):
            return await api.call("POST", PATH, body)

        started = await act(name="cache", action="start", traffic=0.5)
        assert started.body["experiments"]["cache"]["status"] == "running"
        assert started.body["experiments"]["cache"]["traffic"] == 0.5
        assert "same engine steps" in started.body["experiments"]["cache"]["note"]
        wrong = [
            (404, {"name": "none", "action": "start"}, "there are: again, cache"),
            (409, {"name": "cache", "action": "start"}, "is running"),
            (409, {"name": "again", "action": "start"}, "both switch 'prefix_cache'"),
            (409, {"name": "again", "action": "stop"}, "not running"),
            (400, {"name": "cache", "action": "ramp"}, "'traffic': is missing"),
            (400, {"name": "cache", "action": "ramp", "traffic": 2}, "between 0 and 1"),
            (400, {"name": "cache", "action": "stop", "traffic": 0.5}, "only makes sense"),
            (400, {"name": "cache", "action": "explode"}, "action"),
            (400, {"name": "cache", "action": "stop", "now": True}, "now"),
        ]
        for status, body, says in wrong:
            answer = await act(**body)
            assert (answer.status, says in answer.error["message"]) == (status, True), answer.body
        assert (await act(name="cache", action="ramp", traffic=1)).status == 200
        assert (await api.complete("a", user="u1")).headers["x-tokenbus-arm"].startswith("cache/")
        rolled = (await act(name="cache", action="rollback")).body["experiments"]["cache"]
        assert "rolled back by loopback" in rolled["arms"]["off"]["off"]
        arms = {(await api.complete("a", user=user)).headers["x-tokenbus-arm"] for user in USERS[:10]}
        assert arms == {"cache/on"}
        assert (await act(name="cache", action="stop")).body["experiments"]["cache"]["status"] == "stopped"
        await api.check_well()


async def test_the_route_is_an_operators(serve, tmp_path):
    async with serve(settings(tmp_path, admin_key="secret")) as api:
        assert (await api.call("GET", PATH)).status == 401
        assert (await api.call("POST", PATH, {"name": "cache", "action": "stop"})).status == 401
        assert (await api.call("GET", PATH, headers={"Authorization": "Bearer secret"})).status == 200


async def test_without_experiments_the_route_says_so(api):
    assert (await api.call("GET", PATH)).body == {"experiments": {}}
    answer = await api.call("POST", PATH, {"name": "x", "action": "start"})
    assert (answer.status, "there are: none" in answer.error["message"]) == (404, True)


async def test_metrics_carry_the_arm(serve, tmp_path):
    async with serve(settings(tmp_path)) as api:
        counts = Counter([(await api.complete("hello", user=user)).headers["x-tokenbus-arm"] for user in USERS[:10]])
        async with api.session.get(api.url + "/metrics") as response:
            text = await response.text()
        for arm, count in counts.items():
            assert f'tokenbus_arm_ttft_seconds_count{{arm="{arm}"}} {count}.0' in text
            assert f'tokenbus_requests_finished_total{{arm="{arm}",reason="stop"}} {count}.0' in text


async def test_the_command_line(serve, tmp_path, capsys):
    async with serve(settings(tmp_path)) as api:

        async def ab(*words: str) -> tuple[int, str, str]:
            code = await anyio.to_thread.run_sync(main, ["ab", *words, "--url", api.url])
            return code, *capsys.readouterr()

        code, out, _ = await ab("list")
        assert (code, "cache: running (run 1), split by user, 100% of traffic" in out) == (0, True)
        assert "prefix_cache off" in out
        code, out, _ = await ab("list", "--json")
        assert '"prefix_cache": false' in out
        code, out, _ = await ab("ramp", "cache", "0.25")
        assert (code, "25% of traffic" in out) == (0, True)
        code, out, _ = await ab("stop", "cache")
        assert (code, "cache: stopped" in out) == (0, True)
        code, _, err = await ab("stop", "cache")
        assert (code, err) == (1, "tokenbus: experiment 'cache' is not running: start it first\n")
        code, out, _ = await ab("start", "cache", "--traffic", "0.5")
        assert (code, "running (run 2), split by user, 50% of traffic" in out) == (0, True)
        code, out, _ = await ab("rollback", "cache")
        assert (code, "off: rolled back by loopback" in out) == (0, True)
    port = api.url.rpartition(":")[2]
    assert main(["ab", "list", "--port", port]) == 1
    assert f"no server answers at http://127.0.0.1:{port}" in capsys.readouterr().err
    assert main(["ab", "list", "--url", "file:///etc/passwd"]) == 1
    assert "must begin with http:// or https://" in capsys.readouterr().err


@pytest.mark.long
async def test_a_run_lives_through_engine_and_server(serve_demo, client_of, tmp_path):
    """A real engine: an open request keeps its arm when the engine dies; users keep theirs when the server is started again."""
    config = tmp_path / "tokenbus.toml"
    state = tmp_path / "state"
    config.write_text(
        f'[server]\nstate_dir = "{state}"\n[experiments.cache]\nsplit = "user"\n[experiments.cache.arms.on]\n'
        "[experiments.cache.arms.off]\nfeatures = { prefix_cache = false }\n"
    )
    flags = ("--config", str(config), "--restart-backoff", "0.2")

    async def arms_of(api):
        found = {}
        for user in USERS[:12]:
            answer = await api.complete("1, 2, 3, 4,", temperature=0, max_tokens=3, user=user)
            assert answer.text == " 5,"
            found[user] = answer.headers["x-tokenbus-arm"]
        return found

    with serve_demo(*flags) as server:
        api = client_of(server)
        await api.call("POST", PATH, {"name": "cache", "action": "start"})
        first = await arms_of(api)
        assert set(first.values()) == {"cache/on", "cache/off"}
        found = []

        async def follow():
            found.append(await api.complete("a", max_tokens=200, ignore_eos=True, temperature=0, user="u1"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            with anyio.fail_after(30):
                while await api.metric("tokenbus_requests_running") < 1:  # noqa: ASYNC110 - another process
                    await anyio.sleep(0.01)
            os.kill(_engine_of(server.process.pid), signal.SIGKILL)
        assert found[0].body["tokenbus"]["resumed"] == 1
        assert found[0].headers["x-tokenbus-arm"] == found[0].body["tokenbus"]["arm"] == first["u1"]
        server.send(signal.SIGTERM)
        assert server.wait() == 0
    rows = list(read_rows(experiment_dir(state, "cache")))
    assert len(rows) == 13
    assert (rows[-1].resumptions, rows[-1].engine, rows[-1].completion_tokens) == (1, 1, 200)
    assert rows[0].engine_pid != rows[-1].engine_pid != 0
    assert f"cache/{rows[-1].arm}" == first["u1"]
    with serve_demo(*flags) as server:
        api = client_of(server)
        assert (await api.call("GET", PATH)).body["experiments"]["cache"]["run"] == 1
        assert await arms_of(api) == first


def _engine_of(pid: int) -> int:
    """The front's only child."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
