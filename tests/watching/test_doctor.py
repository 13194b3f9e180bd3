"""`tokenbus doctor`: a server that is well, and one for each way of being sick."""

from __future__ import annotations

import json

import pytest

from tokenbus.core.cli import main
from tokenbus.core.watching.checks import CHECKS

NOW = 1_000_000.0
WAITER = ["w", False, 5, 0, 0, 10, NOW - 30, 0, 0, 0, ""]


def examine(url, capsys, *flags):
    """(exit status, findings by check)."""
    status = main(["doctor", "--url", url, "--seconds", "0.1", "--json", *flags])
    return status, {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_healthy_server_is_all_well(url, capsys):
    status, found = examine(url, capsys)
    assert status == 0
    assert {check: one["level"] for check, one in found.items()} == {check.name: "ok" for check in CHECKS}
    assert found["share of the machine's limit"]["value"] == "63 %"
    assert found["prefix cache hits"]["value"] == "25 % of prompt tokens"
    assert found["idle between steps while there is work"]["value"] == "5 %"
    assert all(one["healthy"] and not one["meaning"] and not one["advice"] for one in found.values())


def test_the_areas_that_a_server_is_judged_by():
    areas = ["queue", "batch", "kv", "kernels", "distribution", "quantisation", "observability"]
    assert list(dict.fromkeys(check.area for check in CHECKS)) == areas


SICK = [
    ("server", "bad", {"server": {"state": "restarting", "doubt": "the engine died and is being restarted"}}),
    ("requests waiting", "warning", {"engine": {"waiting": 600}}),
    ("requests waiting", "bad", {"engine": {"waiting": 1024}}),
    ("longest wait", "warning", {"requests": [WAITER]}),
    ("refused for load", "warning", {"refused": {"429 OverloadedError": 1, "400 FieldError": 500}}),
    ("refused for load", "bad", {"refused": {"429 OverloadedError": 100}}),
    ("ended with an error", "warning", {"finished": {"PluginError": 4}}),
    ("ended with an error", "bad", {"finished": {"PluginError": 40}}),
    ("request cap", "warning", {"engine": {"running": 256, "waiting": 1}}),
    ("steps", "warning", {"lag": {"engine": {"seconds": 0.0, "step_age": 8.0}}}),
    ("steps", "bad", {"lag": {"engine": {"seconds": 0.0, "step_age": 40.0}}}),
    ("steps", "bad", {"steps": [], "lag": {"engine": {"seconds": 0.0, "step_age": 0.0}}}),
    ("blocks in use", "warning", {"engine": {"free_blocks": 5, "retained_blocks": 2}}),
    ("blocks in use", "warning", {"engine": {"free_blocks": 0, "retained_blocks": 0}}),
    ("blocks in use", "bad", {"engine": {"free_blocks": 0, "retained_blocks": 0, "waiting": 5}}),
    ("preemptions", "warning", {"ended": {"preemptions": 20}}),
    ("preemptions", "bad", {"ended": {"preemptions": 150}}),
    ("room", "warning", {"info": {"max_model_len": 1600}}),
    ("lossless", "warning", {"info": {"lossless": False, "lossless_reason": "a fallback model"}}),
    ("share of the machine's limit", "warning", {"info": {"read_bytes_per_second": 1e6, "flops_per_second": 1e6}}),
    ("engine process", "warning", {"server": {"restarts": 2}}),
    ("engine process", "bad", {"server": {"restarts": 2, "suspects": 3}}),
    ("front's loop lag", "warning", {"lag": {"front": {"seconds": 0.4, "step_age": 0.0}}}),
    ("engine's loop lag", "bad", {"lag": {"engine": {"seconds": 1.5, "step_age": 0.0}}}),
]


@pytest.mark.parametrize(
    ("check", "level", "changes"), SICK, ids=[f"{check}-{level}-{i}" for i, (check, level, _) in enumerate(SICK)]
)
def test_a_sick_server_is_told_what_and_what_to_do(told, url, capsys, make_frame, check, level, changes):
    told.frames = [make_frame(**changes)]
    status, found = examine(url, capsys)
    assert found[check]["level"] == level
    assert found[check]["meaning"]
    assert found[check]["advice"]
    assert status == max({"ok": 0, "unknown": 0, "warning": 1, "bad": 2}[one["level"]] for one in found.values()) >= 1


def test_steps_that_mostly_encode(told, url, capsys, make_frame, make_step):
    name = "time in the encoder of pictures and sounds"
    assert examine(url, capsys)[1][name]["value"] == "no pictures or sounds"
    told.frames = [make_frame(steps=[make_step(i, media_tokens=400, phases={"encode": 0.06}) for i in range(40)])]
    found = examine(url, capsys)[1][name]
    assert (found["level"], found["value"]) == ("warning", "63 %")
    assert "scheduler.encoder_budget" in found["advice"]


def test_steps_that_come_late_or_uneven(told, url, capsys, make_frame, make_step):
    told.frames = [make_frame(steps=[make_step(i, duration=0.03) for i in range(40)])]
    assert examine(url, capsys)[1]["idle between steps while there is work"]["level"] == "bad"
    told.frames = [
        make_frame(
            steps=[make_step(i, duration=3.0 if i == 20 else 0.09, preempted=[0] if i % 5 == 0 else []) for i in range(40)]
        )
    ]
    found = examine(url, capsys)[1]
    assert found["evenness of steps"]["level"] == "warning"
    assert found["preemptions"]["level"] == "warning"


def test_allocations_that_fail_while_it_watches(told, url, capsys, make_frame):
    told.frames = [make_frame(), make_frame(engine={"allocation_failures": 9})]
    found = examine(url, capsys)[1]["failed allocations"]
    assert (found["level"], found["value"]) == ("warning", "6 in 0.1 s, 9 since the engine began")


def test_plugins_and_kernels(told, url, capsys):
    table = {
        **told.features["features"],
        "quantization.int8": {"on": True, "failed": "it broke", "scope": "engine", "lossless": False},
    }
    told.features = {"features": table, "slots": {**told.features["slots"], "attention": "core (torch)"}}
    told.metrics = False
    status, found = examine(url, capsys)
    assert status == 2
    levels = {check: found[check]["level"] for check in ("attention", "plugins", "weights and K/V", "metrics")}
    assert levels == {"attention": "warning", "plugins": "bad", "weights and K/V": "bad", "metrics": "warning"}
    assert "it broke" in found["plugins"]["value"]


def test_a_watcher_that_is_too_slow_says_so(told, url, capsys, make_frame):
    told.frames = [{"missed_frames": 4}, make_frame()]
    assert examine(url, capsys)[1]["this watcher"]["level"] == "warning"


def test_an_idle_server_has_not_much_to_judge_by_and_is_well(told, url, capsys, make_frame):
    told.frames = [
        make_frame(
            steps=[],
            requests=[],
            engine={"open": 0, "running": 0},
            ended={"requests": 0, "prompt_tokens": 0},
            finished={"stop": 0},
        )
    ]
    status, found = examine(url, capsys)
    assert status == 0
    assert found["share of the machine's limit"]["level"] == "unknown"
    assert found["prefix cache hits"]["level"] == "unknown"


def test_an_engine_that_does_not_answer_is_not_waited_for_for_ever(told, url, capsys, make_frame):
    silent = make_frame(server={"state": "restarting", "doubt": "the engine died and is being restarted"})
    for key in ("engine", "steps", "ids", "lost_steps", "requests", "blocks"):
        del silent[key]
    told.frames = [silent]
    status, found = examine(url, capsys)
    assert status == 2
    assert found["blocks in use"]["level"] == "unknown"


def test_no_server(capsys):
    status, found = examine("http://127.0.0.1:9", capsys)
    assert status == 2
    assert list(found) == ["server"]
    assert "--url" in found["server"]["value"]


def test_a_wrong_key_and_a_right_one(told, url, capsys):
    told.key = "secret"
    status, found = examine(url, capsys)
    assert status == 2
    assert found["server"]["value"] == "the admin key is needed"
    assert examine(url, capsys, "--admin-key", "secret")[0] == 0


def test_something_that_is_no_server_of_ours(told, url, capsys):
    told.raw = b"HTTP/1.0 200 OK\r\n\r\n<html>"
    assert examine(url, capsys)[0] == 2
    told.raw = b"\x00garbage"
    assert examine(url, capsys)[0] == 2


def test_the_report_for_people(told, url, capsys, make_frame):
    told.frames = [make_frame(engine={"waiting": 600})]
    assert main(["doctor", "--url", url, "--seconds", "0.1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if "requests waiting" in line)
    assert lines[at] == "  WARN requests waiting: 600 of 1024   [healthy: below 50 % of max_waiting]"
    assert lines[at + 1].startswith("       means: ")
    assert lines[at + 2].startswith("       do: ")
    assert lines[-1] == "24 ok, 0 not known yet, 1 warnings, 0 bad"


@pytest.mark.parametrize("flag", [["--seconds", "0"], ["--seconds", "x"], ["--seconds", "nan"], ["--json=1"]])
def test_wrong_flags(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *flag])
    capsys.readouterr()


def test_a_wrong_url(capsys):
    assert main(["doctor", "--url", "ftp://x"]) == 1
    assert "must begin with http" in capsys.readouterr().err
