"""Live settings, the audit trail, and the commands that show and change a running server's state."""

from __future__ import annotations

import functools
import json

import anyio
import anyio.to_thread
import pytest

from tokenbus.core import cli, logs
from tokenbus.core.api import admin
from tokenbus.core.bus import Bus
from tokenbus.core.config import ServerConfig
from tokenbus.core.errors import ConfigError
from tokenbus.core.front.audit import AuditTrail
from tokenbus.core.front.events import ChangeRefused, SettingsChange

pytestmark = pytest.mark.anyio

PATH = "/v1/tokenbus/settings"


@pytest.fixture(autouse=True)
def log_level():
    yield
    logs.set_level("info")


async def change(api, **values):
    return await api.call("POST", PATH, {"settings": {name.replace("__", "."): value for name, value in values.items()}})


# ---- settings -------------------------------------------------------------------------------------------------------------------


async def test_settings_are_listed_with_type_bounds_value_and_how_they_apply(serve):
    async with serve({"server": {"admin_key": "secret"}, "plugins": {"chunked_prefill": {"chunk_size": 77}}}) as api:
        answer = await api.call("GET", PATH, headers={"Authorization": "Bearer secret"})
        shown = answer.body["settings"]
        assert shown["scheduler.token_budget"] == {
            "value": 2048, "default": 2048, "schema": {"type": "integer", "minimum": 1}, "applies": "live",
            "note": "from the next step on; decodes that are running go on, also when they are more than that",
        }  # fmt: skip
        assert shown["plugins.chunked_prefill.slow_down"] == {
            "value": 3.6, "default": 3.6, "schema": {"type": "number", "exclusiveMinimum": 1}, "applies": "live",
        }  # fmt: skip
        assert shown["plugins.chunked_prefill.chunk_size"]["value"] == 77
        assert shown["server.log_level"]["schema"] == {"enum": ["debug", "error", "info", "warning"]}
        assert (shown["model.dtype"]["applies"], shown["server.admin_key"]["value"]) == ("restart", "set")
        assert "secret" not in json.dumps(answer.body)
        live = {name for name, entry in shown.items() if entry["applies"] == "live"}
        assert live == {
            "scheduler.token_budget", "scheduler.max_running", "scheduler.max_waiting", "scheduler.encoder_budget",
            "scheduler.encoder_slice_ms", "server.log_level",
            *(f"plugins.chunked_prefill.{field}" for field in ("mode", "chunk_size", "slow_down", "min_chunk")),
        }  # fmt: skip
        assert (await api.call("GET", PATH)).status == 401


async def test_a_change_counts_at_once(api):
    api.engine.hold = True
    answer = await change(api, scheduler__max_running=1, scheduler__max_waiting=1, server__log_level="error")
    assert answer.body["settings"]["scheduler.max_running"]["value"] == 1
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: api.complete("x", n=2))
        await api.until(lambda: len(api.engine.open) == 2)
        assert (await api.complete("x")).status == 429
        await change(api, scheduler__max_waiting=2)
        tasks.start_soon(lambda: api.complete("x"))
        await api.until(lambda: len(api.engine.open) == 3)
        api.engine.resume()


@pytest.mark.parametrize(
    ("values", "status", "param", "words"),
    [
        ({"scheduler__token_budget": 0}, 400, "settings.scheduler.token_budget", "`int` >= 1"),
        ({"scheduler__token_budget": "9"}, 400, "settings.scheduler.token_budget", "got `str`"),
        ({"scheduler__token_budget": 9.5}, 400, "settings.scheduler.token_budget", "got `float`"),
        ({"server__log_level": "loud"}, 400, "settings.server.log_level", "loud"),
        ({"plugins__chunked_prefill__slow_down": 1}, 400, "settings.plugins.chunked_prefill.slow_down", "> 1"),
        ({"scheduler__token_budge": 9}, 404, None, "did you mean 'scheduler.token_budget'"),
        ({"x" * 300: 9}, 400, None, "no setting is called so"),
        ({"model__dtype": "float32"}, 409, None, "restart"),
        ({"plugins__metrics__nothing": 1}, 404, None, "there is no setting"),
        ({"scheduler__max_running": 65_530}, 409, None, "together can't be raised above 65536"),
    ],
)
async def test_a_change_that_is_refused_changes_nothing(api, values, status, param, words):
    before = (await api.call("GET", PATH)).body
    answer = await change(api, scheduler__max_waiting=7, **values)
    assert answer.status == status
    assert words in answer.error["message"]
    if param is not None:
        assert answer.error["param"] == param
    assert (await api.call("GET", PATH)).body == before


async def test_nonsense_bodies(api):
    for body in ({}, {"settings": []}, {"settings": {}, "x": 1}, {"settings": None}):
        assert (await api.call("POST", PATH, body)).status == 400
    assert (await api.call("POST", PATH, {"settings": {}})).status == 200


# ---- audit ----------------------------------------------------------------------------------------------------------------------


async def test_every_change_and_every_refusal_is_on_record(serve, tmp_path):
    path = tmp_path / "deep" / "audit.jsonl"
    async with serve({"server": {"audit_file": str(path)}}) as api:
        await api.call("POST", "/v1/tokenbus/features", {"features": {"scheduling.priority": True}})
        await api.call("POST", "/v1/tokenbus/features", {"features": {"quantization.int8": True}})
        await change(api, scheduler__max_waiting=7)
        await change(api, model__dtype="float32")
        entries = (await api.call("GET", "/v1/tokenbus/audit?last=9")).body["entries"]
        assert len((await api.call("GET", "/v1/tokenbus/audit?last=1")).body["entries"]) == 1
        for last in ("0", "x", "4096"):
            assert (await api.call("GET", f"/v1/tokenbus/audit?last={last}")).error["param"] == "last"
    assert all(entry.pop("who") == "loopback 127.0.0.1" and entry.pop("time").endswith("Z") for entry in entries)
    because = [entry.pop("because", None) for entry in entries]
    assert entries == [
        {
            "what": "features", "result": "applied", "asked": {"scheduling.priority": True},
            "from": {"scheduling.unified": True, "scheduling.priority": False},
            "to": {"scheduling.unified": False, "scheduling.priority": True},
        },
        {"what": "features", "result": "refused", "asked": {"quantization.int8": True}},
        {
            "what": "settings", "result": "applied", "asked": {"scheduler.max_waiting": 7},
            "from": {"scheduler.max_waiting": 1024}, "to": {"scheduler.max_waiting": 7},
        },
        {"what": "settings", "result": "refused", "asked": {"model.dtype": "float32"}},
    ]  # fmt: skip
    assert because[0] == {"scheduling.unified": "its slot 'scheduling' is held by 'scheduling.priority'"}
    assert "restart with --enable" in because[1]
    assert because[2] is None
    assert "can't change live" in because[3]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["features", "features", "settings", "settings"]
    async with serve({"server": {"audit_file": str(path)}}) as api:  # the next server's trail goes on from there
        assert (await api.call("GET", "/v1/tokenbus/audit")).body["entries"] == lines


def trail(path, **values):
    bus = Bus()
    return AuditTrail(ServerConfig(audit_file=str(path), **values), bus), bus


def test_files_are_set_aside_by_size_and_the_oldest_goes(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"n": 0}\nnot json\n')
    made, bus = trail(path, audit_file_mb=1, audit_files_kept=2)
    assert made.last(9) == [{"n": 0}]
    for number in range(10):
        bus.publish(ChangeRefused("settings", {"n": number}, "x" * 400_000, "me", 0.0))
    made.close()
    made.close()
    bus.publish(SettingsChange({}, {}, "late", 0.0))  # kept in memory
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    numbers = [
        [json.loads(line)["asked"]["n"] for line in (tmp_path / name).read_bytes().splitlines()] for name in reversed(names)
    ]
    assert [number for file in numbers for number in file] == list(range(4, 10))
    assert made.last(1)[0]["who"] == "late"


def test_a_file_that_cant_be_written_is_an_error_at_start_and_a_loud_line_later(tmp_path):
    with pytest.raises(ConfigError, match=r"server.audit_file: can't write"):
        trail(tmp_path)
    path = tmp_path / "audit.jsonl"
    made, bus = trail(path)
    path.unlink()
    path.mkdir()
    from structlog.testing import capture_logs

    with capture_logs() as lines:
        bus.publish(SettingsChange({}, {}, "me", 0.0))
        made.close()
    assert [line["event"] for line in lines] == ["audit_not_written"]
    assert made.last(1)[0]["who"] == "me"


# ---- commands -------------------------------------------------------------------------------------------------------------------


async def command(*words):
    return await anyio.to_thread.run_sync(functools.partial(cli.main, words))


async def test_the_command_for_features(api, capsys):
    assert await command("features", "--url", api.url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("metrics ")).split()[:3] == ["metrics", "on", "step"]
    assert "slot scheduling: scheduling.unified" in lines
    port = api.url.rpartition(":")[2]
    assert await command("features", "--port", port, "--json", "metrics=off", "scheduling.priority=on") == 0
    assert json.loads(capsys.readouterr().out) == admin.feature_state(api.service)
    assert not api.engine.switches.on & {"metrics", "scheduling.unified"}
    for words, reason in [
        (("metrics=maybe",), "must be on or off"),
        (("metrics",), "must be NAME=VALUE"),
        (("metrics=on", "metrics=off"), "is given twice"),
        (("quantization.int8=on", "metrics=on"), "restart with --enable"),
        (("--url", "ftp://x"), "must begin with http"),
        (("--url", "http://127.0.0.1:1"), "no server answers at http://127.0.0.1:1"),
    ]:
        assert await command("features", "--port", port, *words) == 1
        assert reason in capsys.readouterr().err
    assert "metrics" not in api.engine.switches.on


async def test_the_command_for_settings_and_the_admin_key(serve, capsys, tmp_path):
    (tmp_path / "key").write_text("secret\n")
    async with serve({"server": {"admin_key": "secret"}}) as api:
        where = ("settings", "--url", api.url)
        assert await command(*where) == 1
        assert "admin key is needed" in capsys.readouterr().err
        where += ("--admin-key", f"@{tmp_path / 'key'}")
        assert await command(*where, "scheduler.max_waiting=7", "server.log_level=error") == 0
        rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
        assert rows["scheduler.max_waiting"] == ["scheduler.max_waiting", "7", "live", "integer", ">=", "1"]
        assert rows["server.log_level"][1] == '"error"'
        assert await command(*where, "scheduler.max_waiting=many") == 1
        assert "settings.scheduler.max_waiting" in capsys.readouterr().err
        assert await command(*where, "--json") == 0
        assert json.loads(capsys.readouterr().out)["settings"]["scheduler.max_waiting"]["value"] == 7
